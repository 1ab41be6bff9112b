"""Models that lack a part: without a tokenizer there are token ids, without a chat template there is no chat."""

import httpx
from transformers import PreTrainedTokenizerFast

from jaxspec.config import SpecConfig
from jaxspec.server.model import ServedModel
from tests.server.conftest import serving
from tests.server.fakes import CONTEXT, TEXT, FakeEngine, byte_tokenizer

USER = [{"role": "user", "content": "hi"}]


def answers(tokenizer: PreTrainedTokenizerFast | None, spec: SpecConfig, *requests: tuple[str, dict]) -> list[httpx.Response]:
    with serving(FakeEngine(), ServedModel("bare", CONTEXT, spec, tokenizer)) as url:
        return [httpx.post(url + path, json=body) for path, body in requests]


def test_without_a_tokenizer():
    *refused, taken = answers(
        None,
        SpecConfig(),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/completions", {"prompt": [1]}),
        ("/v1/chat/completions", {"messages": USER}),
        ("/generate", {"text": "x"}),
        ("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 3}}),
    )
    assert [response.status_code for response in refused] == [400] * 4
    assert [response.json()["error"]["param"] for response in refused] == ["prompt", "prompt", "messages", "text"]
    assert all("no tokenizer" in response.json()["error"]["message"] for response in refused)
    assert taken.json()["output_ids"] == list(TEXT[:3].encode())


def test_without_a_chat_template():
    chat, completion = answers(
        byte_tokenizer(chat_template=None),
        SpecConfig(),
        ("/v1/chat/completions", {"messages": USER}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 3}),
    )
    error = chat.json()["error"]
    assert (chat.status_code, error["param"]) == (400, "messages")
    assert "chat template" in error["message"] and "/v1/completions" in error["message"]
    assert completion.status_code == 200


def test_plain_decoding_has_no_speculation_metrics():
    [completion] = answers(byte_tokenizer(), SpecConfig(num_steps=0), ("/v1/completions", {"prompt": "x"}))
    assert completion.status_code == 200 and "metrics" not in completion.json()


def test_adaptive_metrics_leave_out_what_depends_on_the_tree():
    model = ServedModel("bare", CONTEXT, SpecConfig(), byte_tokenizer(), adaptive=True)
    with serving(FakeEngine(), model) as url:
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 10}).json()
    assert set(answer["metrics"]["speculative_decoding"]) == {
        "mean_acceptance_length", "num_spec_steps", "num_accepted_draft_tokens"
    }  # fmt: skip


def test_a_request_that_can_never_fit_the_queue_is_refused_for_good():
    model = ServedModel("bare", CONTEXT, SpecConfig(), byte_tokenizer(), max_completions=3)
    with serving(FakeEngine(), model) as url:
        bodies = [{"prompt": ["a"] * 4}, {"prompt": ["a", "b"], "n": 2}, {"prompt": ["a"] * 3}]
        answers = [httpx.post(f"{url}/v1/completions", json=body) for body in bodies]
    assert [answer.status_code for answer in answers] == [400, 400, 200]
    assert [answer.json()["error"]["param"] for answer in answers[:2]] == ["prompt", "n"]


def test_an_answer_of_too_many_logprobs_is_refused():
    """They are held until the answer is sent, whatever their number."""
    model = ServedModel("long", 2**17, SpecConfig(), byte_tokenizer())
    engine = FakeEngine()
    with serving(engine, model) as url:
        scoring = {"prompt": [1] * 120_000, "max_tokens": 1, "echo": True}
        answers = [
            httpx.post(f"{url}/v1/completions", json={**scoring, "logprobs": 20}),
            httpx.post(f"{url}/v1/completions", json={"prompt": [1] * 9, "n": 128, "max_tokens": 1000, "logprobs": 20}),
            httpx.post(f"{url}/generate", json={
                "input_ids": [[1] * 9] * 20, "return_logprob": True, "top_logprobs_num": 20,
                "sampling_params": {"max_new_tokens": 5000},
            }),
        ]  # fmt: skip
    assert [answer.status_code for answer in answers] == [400] * 3
    assert [answer.json()["error"]["param"] for answer in answers] == ["logprobs", "logprobs", "top_logprobs_num"]
    assert engine.params == []


def test_templates_run_in_a_sandbox():
    template = "{{ ''.__class__.__mro__ }}"
    [chat] = answers(byte_tokenizer(template), SpecConfig(), ("/v1/chat/completions", {"messages": USER}))
    assert chat.status_code == 400
    assert "unsafe" in chat.json()["error"]["message"]


def test_what_users_write_is_no_template():
    [chat] = answers(
        byte_tokenizer(), SpecConfig(), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "{{ 7 * 7 }}"}]})
    )
    assert chat.json()["usage"]["prompt_tokens"] == len("user: {{ 7 * 7 }}\n")
