"""Log probabilities in the three shapes. The fake engine gives token t -t / 100, and A, B, ... as the likeliest tokens."""

import math

import pytest

from jaxspec.engine.request import TokenLogprob
from jaxspec.sampling_params import SamplingParams
from jaxspec.server.logprobs import chat_logprobs, completion_logprobs, prompt_offsets, sglang_logprobs, sglang_top
from jaxspec.server.model import ServedModel
from jaxspec.tree_shape import TreeShape
from tests.server.conftest import USER, Client
from tests.server.fakes import CONTEXT, TEXT, TREE, byte_tokenizer, sentencepiece_tokenizer, with_tags

A, B = {"A": -0.65}, {"A": -0.65, "B": -0.66}
HELLO = [-ord(character) / 100 for character in "hello"]
THE = [-ord(character) / 100 for character in "The"]


def model() -> ServedModel:
    return ServedModel("fake", CONTEXT, TreeShape(3, 2, 5), byte_tokenizer())


@pytest.mark.parametrize(("count", "top"), [(0, {}), (1, A), (2, B)])
def test_completion(client: Client, count: int, top: dict):
    answer = client.post("/v1/completions", prompt="hello", max_tokens=3, logprobs=count).json()
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["T", "h", "e"],
        "token_logprobs": THE,
        "top_logprobs": [top | {token: logprob} for token, logprob in zip("The", THE, strict=True)],  # the token itself too
        "text_offset": [0, 1, 2],
    }
    assert client.engine.params == [SamplingParams(max_tokens=3, logprobs=count)]


def test_no_logprobs_unless_asked(client: Client):
    assert client.post("/v1/completions", prompt="hello").json()["choices"][0]["logprobs"] is None
    assert client.post("/v1/chat/completions", messages=USER, logprobs=False).json()["choices"][0]["logprobs"] is None
    assert not [key for key in client.post("/generate", text="hello").json()["meta_info"] if "logprob" in key]
    assert {params.logprobs for params in client.engine.params} == {None}


@pytest.mark.parametrize("prompt", ["hello", list(b"hello")])
def test_echo_with_logprobs(client: Client, prompt):
    """What lm-eval sends to score a text."""
    answer = client.post("/v1/completions", prompt=prompt, max_tokens=1, echo=True, logprobs=1, temperature=0).json()
    [choice] = answer["choices"]
    assert choice["text"] == "helloT"
    assert choice["logprobs"] == {
        "tokens": list("helloT"),
        "token_logprobs": [None, *HELLO[1:], THE[0]],
        "top_logprobs": [None, *(A | {token: -ord(token) / 100} for token in "elloT")],
        "text_offset": list(range(6)),
    }
    [params] = client.engine.params
    assert (params.logprobs, params.prompt_logprobs) == (1, 1)


def test_offsets_in_an_echo_with_special_tokens():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"], "bos_token": "<s>"})
    start, begin, prompt = *tokenizer.convert_tokens_to_ids(["<|im_start|>", "<s>"]), "<|im_start|>hi"
    of = ServedModel("fake", CONTEXT, TreeShape(3, 2, 5), tokenizer)
    assert prompt_offsets(of, [begin, start, *b"hi"], prompt) == [0, 0, 12, 13]
    assert prompt_offsets(of, [begin, start, *b"hi"], "hi") == [0, 0, 0, 1]
    assert prompt_offsets(of, [start, *b"im"], "im") == [0, 0, 1], "which is in the first token, too"
    assert prompt_offsets(of, [*b"im", start], None) == [0, 1, 2], "as token ids are decoded"
    assert prompt_offsets(of, [start, *b"i", begin], prompt[:-2] + "i") == [0, 12, 13], "with a token behind it"


def test_offsets_where_a_space_is_decoded_behind_special_tokens():
    tokenizer = with_tags(sentencepiece_tokenizer(), "<s>")
    of, ids = ServedModel("fake", CONTEXT, TREE, tokenizer), tokenizer.convert_tokens_to_ids(["<s>", "<s>", "▁the", "▁say"])
    assert tokenizer.decode(ids) == "<s><s> the say"
    assert prompt_offsets(of, ids, "<s>the say") == [0, 0, 3, 6]


def test_without_echo_the_prompt_is_not_scored(client: Client):
    assert client.post("/v1/completions", prompt="hello", logprobs=1).status_code == 200
    assert [params.prompt_logprobs for params in client.engine.params] == [None]


def test_offsets_count_characters(client: Client):
    """Half a character has no text of its own: its halves are where the character is."""
    [choice] = client.post("/v1/completions", prompt="hé", max_tokens=20, logprobs=0, echo=True).json()["choices"]
    offsets = choice["logprobs"]["text_offset"]
    assert choice["text"] == "hé" + TEXT[:19]
    assert len(offsets) == 3 + 20
    assert offsets[:4] == [0, 1, 1, 2]
    place = TEXT.index("ö")
    assert [offset - 2 for offset in offsets[3:]] == [*range(place + 1), place, *range(place + 1, 19)]
    assert choice["logprobs"]["tokens"][1] == "�"


def test_offsets_of_the_prompt_stay_inside_it():
    """Its tokens may have more text than the client wrote, such as that of a beginning-of-text token."""
    assert prompt_offsets(model(), list(b"hello"), "hel") == [0, 1, 2, 3, 3]


def test_streaming_a_completion(client: Client):
    body = {"prompt": ["hello", "x"], "max_tokens": 30, "logprobs": 2, "stop": "dog"}
    whole = client.post("/v1/completions", **body).json()
    parts: list[dict] = [{}, {}]
    for event in client.events("/v1/completions", **body):
        [choice] = event["choices"]
        for name, values in (choice["logprobs"] or {}).items():
            parts[choice["index"]].setdefault(name, []).extend(values)
    assert parts == [choice["logprobs"] for choice in whole["choices"]]


def test_a_text_that_is_held_back_does_not_hold_back_its_logprobs(client: Client):
    """ "quick " may become the stop string, so its text waits; its tokens don't."""
    events = client.events("/v1/completions", prompt="hello", max_tokens=9, stop="he quill", logprobs=0)
    assert [event["choices"][0]["text"] for event in events][:2] == ["T", ""]
    assert [len(event["choices"][0]["logprobs"]["tokens"]) for event in events] == [1, 2, 2, 2, 2]

    events = client.events("/v1/chat/completions", messages=USER, max_tokens=9, stop="he quill", logprobs=True)[1:-1]
    assert [event["choices"][0]["delta"]["content"] for event in events][:2] == ["T", ""]
    assert [len(event["choices"][0]["logprobs"]["content"]) for event in events] == [1, 2, 2, 2, 2]


def shown(token: str) -> dict:
    return {"token": token, "logprob": -ord(token) / 100, "bytes": [ord(token)]}


@pytest.mark.parametrize("count", [None, 0, 2])
def test_chat(client: Client, count: int | None):
    body = {"messages": USER, "max_tokens": 3, "logprobs": True, "top_logprobs": count}
    [choice] = client.post("/v1/chat/completions", **body).json()["choices"]
    top = [shown(token) for token in "AB"[: count or 0]]
    assert choice["logprobs"] == {"content": [shown(token) | {"top_logprobs": top} for token in "The"], "refusal": None}
    assert [params.logprobs for params in client.engine.params] == [count or 0]

    streamed = []
    for event in client.events("/v1/chat/completions", **body):
        [delta] = event["choices"]
        if delta["logprobs"]:
            assert "content" in delta["delta"]
            streamed += delta["logprobs"]["content"]
    assert streamed == choice["logprobs"]["content"]


def test_generate(client: Client):
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 3}, "return_logprob": True}
    meta = client.post("/generate", **body).json()["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.84, 84, None], [-1.04, 104, None], [-1.01, 101, None]]
    assert meta["input_token_logprobs"] == []
    assert "output_top_logprobs" not in meta
    assert client.engine.params == [SamplingParams(max_tokens=3, logprobs=0)]


@pytest.mark.parametrize("start", [0, 3, 4])
def test_generate_with_the_prompts(client: Client, start: int):
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "top_logprobs_num": 1}
    meta = client.post("/generate", **body, logprob_start_len=start, return_text_in_logprobs=True).json()["meta_info"]
    first, *others = "hello"[start:]
    assert meta["input_token_logprobs"] == [[None, ord(first), first], *([-ord(each) / 100, ord(each), each] for each in others)]
    assert meta["input_top_logprobs"] == [None, *([[-0.65, 65, "A"]] for _ in others)]
    assert meta["output_token_logprobs"] == [[-0.84, 84, "T"]]
    assert meta["output_top_logprobs"] == [[[-0.65, 65, "A"]]]
    assert client.engine.params == [SamplingParams(max_tokens=1, logprobs=1, prompt_logprobs=1)]


def test_streaming_generate(client: Client):
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 9}, "return_logprob": True, "top_logprobs_num": 2}
    body["logprob_start_len"] = 0
    whole = client.post("/generate", **body).json()["meta_info"]
    events = [event["meta_info"] for event in client.events("/generate", **body)]
    for event in events:  # cumulative, as all of it
        count = event["completion_tokens"]
        assert event["output_token_logprobs"] == whole["output_token_logprobs"][:count]
        assert event["output_top_logprobs"] == whole["output_top_logprobs"][:count]
    assert [event.get("input_token_logprobs") for event in events] == [None] * 4 + [whole["input_token_logprobs"]]
    assert len(whole["input_token_logprobs"]) == 5


def test_json_has_no_infinity():
    entry = TokenLogprob(84, -math.inf, ((65, math.nan), (66, -math.inf)))
    least = -9999.0
    made = completion_logprobs(model(), [84], [entry], [0])
    assert (made.token_logprobs, made.top_logprobs) == ([least], [{"A": least, "B": least, "T": least}])
    [content] = chat_logprobs(model(), [entry]).content
    assert [content["logprob"]] + [top["logprob"] for top in content["top_logprobs"]] == [least] * 3
    assert sglang_logprobs([84], [entry], None) == [[least, 84, None]]
    assert sglang_top([entry], None) == [[[least, 65, None], [least, 66, None]]]


def test_parts_of_characters_have_no_bytes_that_we_know():
    [content] = chat_logprobs(model(), [TokenLogprob(0xC3, -1.0, ())]).content
    assert (content["token"], content["bytes"]) == ("�", None)


def test_of_tokens_with_one_text_the_likeliest_counts():
    entry = TokenLogprob(0xC4, -3.0, ((0xC3, -1.0), (0xC5, -2.0)))
    assert completion_logprobs(model(), [0xC4], [entry], [0]).top_logprobs == [{"�": -1.0}]
