"""What vLLM and SGLang have added to OpenAI's requests and clients rely on."""

import pytest

from tests.server.conftest import Client
from tests.server.fakes import TEXT

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
BOTH = pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": USER})])
WITH_USAGE = {"include_usage": True, "continuous_usage_stats": True}


@BOTH
def test_continuous_usage_counts_what_was_streamed_so_far(client: Client, path: str, body: dict):
    *chunks, last = client.events(path, **body, max_tokens=9, stream_options=WITH_USAGE)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 1 and counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"] == 9
    assert all(
        chunk["usage"]["total_tokens"] - chunk["usage"]["completion_tokens"] == last["usage"]["prompt_tokens"] for chunk in chunks
    )


def test_continuous_usage_covers_all_choices(client: Client):
    *chunks, last = client.events(COMPLETIONS, prompt=["x", "yz"], n=2, max_tokens=4, stream_options=WITH_USAGE)
    assert chunks[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 16, "total_tokens": 19}
    assert last["usage"]["total_tokens"] == 19


def test_continuous_usage_does_not_need_the_last_chunk(client: Client):
    *_, last = client.events(COMPLETIONS, prompt="x", max_tokens=4, stream_options={"continuous_usage_stats": True})
    assert last["choices"] and last["usage"]["completion_tokens"] == 4


def test_the_prompt_alone(client: Client):
    answer = client.post(COMPLETIONS, prompt=["abc", "d"], echo=True, max_tokens=0, logprobs=2).json()
    assert [choice["text"] for choice in answer["choices"]] == ["abc", "d"]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c"] and logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["token_logprobs"] == [None, -0.98, -0.99] and logprobs["top_logprobs"][0] is None
    assert answer["usage"]["completion_tokens"] == 0 and answer["usage"]["prompt_tokens"] == 4
    assert "metrics" not in answer


def test_the_prompt_alone_without_logprobs(client: Client):
    answer = client.post(COMPLETIONS, prompt="abc", echo=True, max_tokens=0).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["logprobs"]) == ("abc", None)


@BOTH
def test_token_ids(client: Client, path: str, body: dict):
    expected = list(TEXT.encode()[:15])
    [choice] = client.post(path, **body, max_tokens=15, return_token_ids=True).json()["choices"]
    prompt = choice["prompt_token_ids"]
    assert choice["token_ids"] == expected and prompt == ([ord("x")] if path == COMPLETIONS else list(b"user: hi\n"))
    chunks = client.events(path, **body, max_tokens=15, return_token_ids=True)
    assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])] == expected
    assert [chunk["choices"][0]["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk["choices"][0]] == [prompt]
    assert "token_ids" not in client.post(path, **body, max_tokens=5).json()["choices"][0]


def test_token_ids_of_held_back_text(client: Client):
    """The stop string begins in token 5 and is not completed: chunks without text still carry their tokens."""
    chunks = client.events(COMPLETIONS, prompt="x", max_tokens=15, stop="quick brown bear", return_token_ids=True)
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == list(TEXT.encode()[:15])
    assert any(not chunk["choices"][0]["text"] and chunk["choices"][0]["token_ids"] for chunk in chunks)


@BOTH
@pytest.mark.parametrize("name", ["include_stop_str_in_output", "no_stop_trim"])
def test_the_stop_string_may_stay(client: Client, path: str, body: dict, name: str):
    def text(**more) -> str:
        [choice] = client.post(path, **body, max_tokens=15, **more).json()["choices"]
        return choice["text"] if path == COMPLETIONS else choice["message"]["content"]

    assert text(stop="quick", **{name: True}) == "The quick" and text(stop="quick", **{name: False}) == "The "
    assert text(stop_token_ids=[ord("q")], **{name: True}) == "The q" and text(stop_token_ids=[ord("q")]) == "The "


def test_the_stop_string_may_stay_in_generate(client: Client):
    for stop, expected in (({"stop": "quick"}, "The quick"), ({"stop_token_ids": [ord("q")]}, "The q")):
        answer = client.post("/generate", text="x", sampling_params={**stop, "no_stop_trim": True}).json()
        assert answer["text"] == expected
