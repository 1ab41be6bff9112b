"""OpenAI's endpoints: what they answer, whole and streamed."""

import pytest

from jaxspec.sampling_params import SamplingParams
from tests.server.conftest import Client
from tests.server.fakes import CONTEXT, TEXT

USER = [{"role": "user", "content": "hi"}]
TEMPLATED = "user: hi\n"  # what the template makes of USER


def test_models(client: Client):
    listed = client.http.get("/v1/models").json()
    assert listed["object"] == "list"
    [card] = listed["data"]
    assert card == client.http.get("/v1/models/fake").json()
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake", "model", CONTEXT)


def test_completion(client: Client):
    answer = client.post("/v1/completions", prompt="hello", max_tokens=9).json()
    assert answer["object"] == "text_completion"
    assert answer["model"] == "fake"
    assert answer["choices"] == [{"index": 0, "text": TEXT[:9], "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 14}


def test_completion_defaults_are_openais(client: Client):
    answer = client.post("/v1/completions", prompt="hello").json()
    assert answer["usage"]["completion_tokens"] == 16
    assert client.engine.params == [SamplingParams(max_tokens=16, temperature=1.0)]


def test_a_default_budget_is_cut_to_the_context(client: Client):
    answer = client.post("/v1/completions", prompt="x" * (CONTEXT - 3)).json()
    assert answer["usage"]["completion_tokens"] == 3


def test_parameters_reach_the_engine(client: Client):
    fields = {"max_tokens": 5, "temperature": 0.5, "seed": 7, "stop": ["a", "b"], "stop_token_ids": [9], "ignore_eos": True}
    fields["skip_special_tokens"] = False
    assert client.post("/v1/completions", prompt="hello", **fields).status_code == 200
    assert client.post("/v1/chat/completions", messages=USER, **fields).status_code == 200
    assert client.engine.params == [SamplingParams(**fields)] * 2


@pytest.mark.parametrize("prompt", ["hello", list(b"hello"), ["hello"], [list(b"hello")]])
def test_prompt_forms(client: Client, prompt):
    answer = client.post("/v1/completions", prompt=prompt, max_tokens=4).json()
    assert answer["usage"]["prompt_tokens"] == 5
    assert [choice["text"] for choice in answer["choices"]] == [TEXT[:4]]


@pytest.mark.parametrize("prompt", [["one", "three"], [[1, 2, 3], [4, 5, 6, 7, 8]]])
def test_several_prompts(client: Client, prompt):
    answer = client.post("/v1/completions", prompt=prompt, max_tokens=4).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["text"] for choice in answer["choices"]] == [TEXT[:4]] * 2
    assert answer["usage"] == {"prompt_tokens": 8, "completion_tokens": 8, "total_tokens": 16}
    assert "metrics" not in answer  # they are of one generation


@pytest.mark.parametrize(
    ("stop", "text", "tokens"), [("brown", "The quick ", 15), (["zzz", "föx"], "The quick brown ", 20), ("nowhere", TEXT[:29], 30)]
)
def test_stop_strings(client: Client, stop, text, tokens):
    answer = client.post("/v1/completions", prompt="hello", max_tokens=30, stop=stop).json()
    [choice] = answer["choices"]
    assert choice["text"] == text
    assert choice["finish_reason"] == ("length" if stop == "nowhere" else "stop")
    assert answer["usage"]["completion_tokens"] == tokens  # tokens count, the ö has two


def test_speculation_is_in_the_metrics(client: Client):
    answer = client.post("/v1/completions", prompt="hello", max_tokens=10).json()
    # One token from the prefill, four verifications of two, and one that the budget cut after its accepted draft.
    assert answer["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": 1.8,
        "draft_acceptance_rate": 0.25,
        "acceptance_histogram": [0, 5, 0, 0],
        "num_spec_steps": 5,
        "num_accepted_draft_tokens": 5,
        "num_draft_tokens": 20,
    }


@pytest.mark.parametrize("max_tokens", range(1, 40, 6))
def test_streaming_a_completion_equals_the_whole(client: Client, max_tokens: int):
    body = {"prompt": "hello", "max_tokens": max_tokens, "stop": "ö"}
    whole = client.post("/v1/completions", **body).json()
    *events, last = client.events("/v1/completions", stream_options={"include_usage": True}, **body)
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + [whole["choices"][0]["finish_reason"]]
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert last.get("metrics") == whole.get("metrics")
    assert {event["id"] for event in events} == {last["id"]}
    assert all("�" not in event["choices"][0]["text"] for event in events)


def test_a_stream_has_no_usage_unless_asked(client: Client):
    events = client.events("/v1/completions", prompt="hello", max_tokens=5)
    assert all("usage" not in event and event["choices"] for event in events)


def test_streaming_several_prompts(client: Client):
    events = client.events("/v1/completions", prompt=["one", "three"], max_tokens=12)
    texts = ["", ""]
    for event in events:
        [choice] = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [TEXT[:12]] * 2


def test_chat(client: Client):
    answer = client.post("/v1/chat/completions", messages=USER, max_tokens=9).json()
    assert answer["object"] == "chat.completion"
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT[:9], "refusal": None}
    assert choice["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": len(TEMPLATED), "completion_tokens": 9, "total_tokens": len(TEMPLATED) + 9}


def test_a_chat_reply_may_fill_the_context(client: Client):
    answer = client.post("/v1/chat/completions", messages=USER).json()
    assert answer["usage"]["total_tokens"] == CONTEXT


def test_max_completion_tokens_wins(client: Client):
    answer = client.post("/v1/chat/completions", messages=USER, max_tokens=9, max_completion_tokens=4).json()
    assert answer["usage"]["completion_tokens"] == 4


def test_text_parts_are_joined_by_line_breaks(client: Client):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = client.post("/v1/chat/completions", messages=[{"role": "user", "content": parts}], max_tokens=1).json()
    assert answer["usage"]["prompt_tokens"] == len("user: a\nb\n")


def test_streaming_a_chat_equals_the_whole(client: Client):
    body = {"messages": USER, "max_tokens": 33}
    whole = client.post("/v1/chat/completions", **body).json()
    first, *events, end, last = client.events("/v1/chat/completions", stream_options={"include_usage": True}, **body)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"]["content"] for event in events) == whole["choices"][0]["message"]["content"]
    assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"]) == ({}, "length")
    assert (last["choices"], last["usage"]) == ([], whole["usage"])


def test_a_reply_can_be_sent_back(client: Client):
    """openai-python sends the fields of a reply that it did not use as nulls and empty lists."""
    reply = {"role": "assistant", "content": "hello", "refusal": None, "annotations": [], "tool_calls": None, "audio": None}
    assert client.post("/v1/chat/completions", messages=[*USER, reply, *USER], max_tokens=1).status_code == 200
