"""Streams and whole answers are the same text, token for token, of whole characters, without stop strings, and rightly counted:
many prompts at once, on the real server, whose steps bring several tokens."""

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import pytest

PROMPTS = [
    *("class Stack:\n    def __init__(self):", "import os\n\ndef remove(path):", "def main():\n", "for index in range(10):\n"),
    *(
        '"""A docstring.\n',
        "try:\n    value = int(text)\nexcept",
        "if __name__ ==",
        "x = [1, 2, 3]\n",
        "    return self.",
        "# TODO: ",
    ),
    *('text = "日本語 日本語 日本語', "names = ['élan', 'ñandú', 'straße', '", "print('😀😀😀😀", 'assert "—" * 3 == "———'),
]
STOPS = ["self", "\n\n", ":", "日本", "é"]
GREEDY, SAMPLED = "greedy", "sampled"
TWO_BYTES, THREE_BYTES, FOUR_BYTES = "éñ", "日", "😀"
CASES = [
    *((kind, stop) for kind in (GREEDY, SAMPLED) for stop in ([], STOPS)),
    *((TWO_BYTES, []), (TWO_BYTES, ["éñ", "ññ"]), (THREE_BYTES, []), (FOUR_BYTES, [])),
]
"""How the text is made, and its stop strings. Characters: of random tokens that are bytes, so some are halves or impossible."""
REPLACEMENT = "\ufffd"


@dataclass
class Choice:
    """One choice of an answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    reason: str | None = None


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=300) as client:
        yield client


@pytest.mark.parametrize(("kind", "stop"), CASES, ids=lambda value: value if isinstance(value, str) else f"{len(value)} stops")
def test_text_is_whole_and_counted(http: httpx.Client, kind: str, stop: list[str]):
    body: dict[str, Any] = {"prompt": PROMPTS, "max_tokens": 40, "stop": stop, "return_token_ids": True, "seed": 5}
    characters = kind if kind not in (GREEDY, SAMPLED) else ""
    if characters:
        body["allowed_token_ids"] = sorted(set(http.post("/tokenize", json={"prompt": characters}).json()["tokens"]))
        assert len(body["allowed_token_ids"]) > 1
        body |= {"prompt": PROMPTS[:7], "max_tokens": 24}  # drafts are seldom right here, so it takes longer
    elif kind == GREEDY:
        body["temperature"] = 0
    whole, streamed = complete(http, body), stream(http, body)
    assert streamed == whole
    for choice in whole:
        decoded = http.post("/detokenize", json={"tokens": choice.token_ids, "skip_special_tokens": True}).json()["text"]
        if choice.reason == "length":
            assert len(choice.token_ids) == body["max_tokens"]
            assert decoded.startswith(choice.text) and not decoded[len(choice.text) :].strip(REPLACEMENT)  # half a character
            assert not any(string in choice.text for string in stop)
        else:  # a stop string, or the end of sequence
            assert choice.text == decoded[: min([place for string in stop if (place := decoded.find(string)) >= 0], default=None)]
    texts = "".join(choice.text for choice in whole)
    assert not characters or len(characters[0].encode()) in {len(one.encode()) for one in texts if one != REPLACEMENT}
    assert not stop or "stop" in {choice.reason for choice in whole}


def complete(http: httpx.Client, body: dict[str, Any]) -> list[Choice]:
    """Every choice of a whole answer, whose usage must be right."""
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(body["prompt"])))
    check_usage(answer["usage"], answer["choices"])
    return [Choice(choice["text"], choice["token_ids"], choice["finish_reason"]) for choice in answer["choices"]]


def stream(http: httpx.Client, body: dict[str, Any]) -> list[Choice]:
    """The same, put together from a stream, whose usage must be right after every chunk."""
    choices = [Choice() for _ in body["prompt"]]
    prompts: dict[int, list[int]] = {}
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    response = http.post("/v1/completions", json=body | options)
    assert response.status_code == 200, response.text
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    *chunks, last = [json.loads(event.removeprefix("data: ")) for event in events]
    for chunk in chunks:
        [piece] = chunk["choices"]
        choice = choices[piece["index"]]
        assert choice.reason is None
        choice.text += piece["text"]
        choice.token_ids += piece["token_ids"]
        choice.reason = piece["finish_reason"]
        prompts |= {piece["index"]: piece["prompt_token_ids"]} if "prompt_token_ids" in piece else {}
        assert chunk["usage"]["completion_tokens"] == sum(len(each.token_ids) for each in choices)
    if "allowed_token_ids" not in body:
        assert any(len(piece["token_ids"]) > 1 for chunk in chunks for piece in chunk["choices"])  # one step, several tokens
    assert last["choices"] == []
    made = [{"prompt_token_ids": prompts[index], "token_ids": choice.token_ids} for index, choice in enumerate(choices)]
    check_usage(last["usage"], made)
    return choices


def check_usage(usage: dict[str, int], choices: list[dict[str, Any]]) -> None:
    prompt, completion = (sum(len(choice[name]) for choice in choices) for name in ("prompt_token_ids", "token_ids"))
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, completion)
    assert usage["total_tokens"] == prompt + completion


def test_text_grows_in_generate(http: httpx.Client):
    """SGLang's streams bring all of the text each time, and end with the whole answer."""
    params = {"max_new_tokens": 40, "temperature": 0.9, "sampling_seed": 2, "stop": STOPS}
    body = {"text": PROMPTS[0], "sampling_params": params}
    whole = http.post("/generate", json=body).json()
    *events, _, _ = http.post("/generate", json=body | {"stream": True}).text.split("\n\n")
    events = [json.loads(event.removeprefix("data: ")) for event in events]
    for event, following in pairwise(events):
        assert following["text"].startswith(event["text"])
        assert following["output_ids"][: len(event["output_ids"])] == event["output_ids"]
        assert event["meta_info"]["completion_tokens"] == len(event["output_ids"])
    assert (events[-1]["text"], events[-1]["output_ids"]) == (whole["text"], whole["output_ids"])
    assert whole["meta_info"]["completion_tokens"] == len(whole["output_ids"])
