"""SGLang's /generate. That each field reaches the engine: test_openai_api.py."""

import itertools

import pytest

from jaxspec.sampling_params import SamplingParams
from jaxspec.server.sglang import api
from tests.server.conftest import Client
from tests.server.fakes import CONTEXT, TEXT

IDS = list(b"hello")


@pytest.mark.parametrize("prompt", [{"text": "hello"}, {"input_ids": IDS}])
def test_generate(client: Client, prompt):
    answer = client.post("/generate", sampling_params={"max_new_tokens": 9}, **prompt).json()
    assert answer["text"] == TEXT[:9]
    assert answer["output_ids"] == list(TEXT[:9].encode())
    meta = answer["meta_info"]
    assert meta.pop("id")
    assert 0 < meta.pop("e2e_latency") < 20
    assert meta == {
        "finish_reason": {"type": "length", "length": 9},
        "prompt_tokens": 5,
        "completion_tokens": 9,
        "cached_tokens": 0,
        "spec_verify_ct": 4,
        "spec_accept_length": 2.0,
        "spec_accept_rate": 0.25,
        "spec_num_correct_drafts": 4,
        "spec_num_proposed_drafts": 16,
        "spec_correct_drafts_histogram": [0, 4, 0, 0],
        "accepted_drafts_by_source": {"ngram": 4},
    }


@pytest.mark.parametrize(("params", "matched"), [({"stop": "brown"}, "brown"), ({"stop_token_ids": [ord("b")]}, ord("b"))])
def test_what_stopped_it(client: Client, params, matched):
    answer = client.post("/generate", text="hello", sampling_params=params).json()
    assert answer["text"] == "The quick "
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}


def test_defaults_are_sglangs(client: Client):
    assert client.post("/generate", text="hello").json()["meta_info"]["completion_tokens"] == CONTEXT - 5  # 128 do not fit
    assert client.engine.params == [SamplingParams(max_tokens=CONTEXT - 5, temperature=1.0)]


def test_put_is_the_same_as_post(client: Client):
    assert client.http.put("/generate", json={"text": "x", "sampling_params": {"max_new_tokens": 2}}).status_code == 200


def test_n_gets_a_list(client: Client):
    params = {"n": 2, "sampling_seed": 3, "max_new_tokens": 4}
    answers = client.post("/generate", text="hello", sampling_params=params).json()
    assert [answer["text"] for answer in answers] == [TEXT[:4]] * 2
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [5, 5]
    assert [each.seed for each in client.engine.params] == [3, 4]
    answers = client.post("/generate", text=["one", "three"], sampling_params=params).json()
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [3, 3, 5, 5]
    texts = {}
    for event in client.events("/generate", text=["one", "three"], sampling_params=params):
        texts[event["index"]] = (event["text"], event["meta_info"]["prompt_tokens"])
        assert event["meta_info"]["prompt_tokens"] == (3, 3, 5, 5)[event["index"]]  # in every event, not only the last
    assert texts == {0: (TEXT[:4], 3), 1: (TEXT[:4], 3), 2: (TEXT[:4], 5), 3: (TEXT[:4], 5)}


def test_cached_tokens(client: Client):
    client.engine.cached_tokens = 3
    assert client.post("/generate", text="hello").json()["meta_info"]["cached_tokens"] == 3


@pytest.mark.parametrize("prompt", [{"text": ["one", "three"]}, {"input_ids": [[1, 2, 3], [4, 5, 6, 7, 8]]}])
def test_lists_get_lists(client: Client, prompt):
    answers = client.post("/generate", sampling_params={"max_new_tokens": 4}, **prompt).json()
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [3, 5]
    assert [answer["text"] for answer in answers] == [TEXT[:4]] * 2
    assert isinstance(client.post("/generate", text=["one"]).json(), list)


def test_each_prompt_may_have_its_own_parameters(client: Client):
    each = [{"max_new_tokens": 4, "temperature": 0.5, "n": 2}, {"max_new_tokens": 6, "n": 2}]
    answers = client.post("/generate", text=["one", "three"], sampling_params=each).json()
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [4, 4, 6, 6]
    assert [params.temperature for params in client.engine.params] == [0.5, 0.5, 1.0, 1.0]


def test_streams_are_cumulative(client: Client):
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 33, "stop": "lazy"}}
    whole = client.post("/generate", **body).json()
    events = client.events("/generate", **body)
    for before, after in itertools.pairwise(events):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
        assert before["meta_info"]["completion_tokens"] == len(before["output_ids"])
    assert len(events) > 10
    assert all("�" not in event["text"] for event in events)
    assert {key: events[-1][key] for key in ("text", "output_ids")} == {key: whole[key] for key in ("text", "output_ids")}
    assert events[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]


def test_streams_repeat_a_bounded_number_of_log_probabilities(client: Client, monkeypatch):
    monkeypatch.setattr(api, "MAX_REPEATED", 150)
    body = {"text": "hello", "return_logprob": True, "top_logprobs_num": 2}
    for stream, tokens, status in ((True, 10, 200), (True, 11, 400), (False, 20, 200)):
        response = client.post("/generate", **body, stream=stream, sampling_params={"max_new_tokens": tokens})
        assert response.status_code == status
        if status == 400:
            assert "would repeat 181 log probabilities" in response.json()["error"]["message"]


def test_the_prompt_alone(client: Client):
    """How SGLang's clients score a text."""
    body = {"text": ["hello", "ab"], "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    first, second = client.post("/generate", **body).json()
    assert (first["text"], first["output_ids"], first["meta_info"]["completion_tokens"]) == ("", [], 0)
    assert first["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert first["meta_info"]["output_token_logprobs"] == []
    assert [len(each["meta_info"]["input_token_logprobs"]) for each in (first, second)] == [5, 2]
    client.engine.cached_tokens = 4
    cached = client.post("/generate", text="hello", sampling_params={"max_new_tokens": 0}).json()  # SGLang's cache_prefix
    assert (cached["text"], cached["output_ids"], cached["meta_info"]["prompt_tokens"]) == ("", [], 5)
    assert (cached["meta_info"]["completion_tokens"], cached["meta_info"]["cached_tokens"]) == (0, 4)
    refused = client.post("/generate", **body, stream=True)
    assert refused.status_code == 400 and "max_new_tokens must be at least 1, or 0 without stream" in refused.text
