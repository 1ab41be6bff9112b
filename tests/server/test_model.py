"""Models without a tokenizer (token ids still work), without a chat template, or with a hostile one; limits of prompts."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter, ValidationError
from tokenizers.processors import TemplateProcessing

from jaxspec.sampling_params import MAX_STOP_STRINGS
from jaxspec.server.errors import ApiError
from jaxspec.server.fields import TemplateOptions
from jaxspec.server.model import ServedModel
from jaxspec.text.chat_template import ChatTemplate
from jaxspec.tree_shape import PLAIN, TreeShape
from tests.server.conftest import USER, served
from tests.server.fakes import CONTEXT, TEXT, FakeEngine, byte_tokenizer, sentencepiece_tokenizer


def answers(*requests: tuple[str, dict], **model: Any) -> list[httpx.Response]:
    with served(**model) as client:
        return [client.post(path, **body) for path, body in requests]


def test_without_a_tokenizer():
    *refused, taken = answers(
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/completions", {"prompt": [1]}),
        ("/v1/chat/completions", {"messages": USER}),
        ("/generate", {"text": "x"}),
        ("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 3}}),
        tokenizer=None,
    )
    assert [response.status_code for response in refused] == [400] * 4
    assert [response.json()["error"]["param"] for response in refused] == ["prompt", "prompt", "messages", "text"]
    assert all("no tokenizer" in response.json()["error"]["message"] for response in refused)
    assert taken.json()["output_ids"] == list(TEXT[:3].encode())


def test_without_a_chat_template():
    chat, completion = answers(("/v1/chat/completions", {"messages": USER}), ("/v1/completions", {"prompt": "x", "max_tokens": 3}))
    error = chat.json()["error"]
    assert (chat.status_code, error["param"]) == (400, "messages")
    assert "chat template" in error["message"] and "/v1/completions" in error["message"]
    assert completion.status_code == 200


def test_a_request_that_can_never_fit_the_queue_is_refused_for_good():
    bodies = [{"prompt": ["a"] * 4}, {"prompt": ["a", "b"], "n": 2}, {"prompt": ["a"] * 3}]
    found = answers(*(("/v1/completions", body) for body in bodies), max_completions=3)
    assert [answer.status_code for answer in found] == [400, 400, 200]
    assert [answer.json()["error"]["param"] for answer in found[:2]] == ["prompt", "n"]


def test_an_answer_of_too_many_logprobs_is_refused():
    """All of them are held until the response is sent."""
    engine, native = FakeEngine(), {"return_logprob": True, "top_logprobs_num": 20, "sampling_params": {"max_new_tokens": 5000}}
    found = answers(
        ("/v1/completions", {"prompt": [1] * 120_000, "max_tokens": 1, "echo": True, "logprobs": 20}),
        ("/v1/completions", {"prompt": [1] * 9, "n": 128, "max_tokens": 1000, "logprobs": 20}),
        ("/generate", {"input_ids": [[1] * 9] * 20, **native}),
        engine=engine,
        context_length=2**17,
    )
    assert [answer.status_code for answer in found] == [400] * 3
    assert [answer.json()["error"]["param"] for answer in found] == ["logprobs", "logprobs", "top_logprobs_num"]
    assert engine.params == []


def test_templates_run_in_a_sandbox():
    template = "{{ ''.__class__.__mro__ }}"
    [chat] = answers(("/v1/chat/completions", {"messages": USER}), template=template)
    assert chat.status_code == 400
    assert "unsafe" in chat.json()["error"]["message"]


@pytest.mark.variants
def test_a_slow_template_does_not_delay_other_conversations():
    template = "{% for a in range(99999) if messages[0].role == 'system' %}{% for b in range(99999) %}{% endfor %}{% endfor %}fine"
    answered = []

    def chat(role: str) -> httpx.Response:
        answer = client.post("/v1/chat/completions", messages=[{"role": role, "content": "hi"}])
        answered.append(role)
        return answer

    with served(chat_template=ChatTemplate(template, {}, "test", seconds=3)) as client, ThreadPoolExecutor() as pool:
        slow, fast = pool.map(chat, ("system", "user"))
        health = client.http.get("/health")
        again = chat("user")
    error = slow.json()["error"]
    assert (slow.status_code, error["param"], error["type"]) == (400, "messages", "invalid_request_error")
    assert "more than 3 seconds" in error["message"]
    assert fast.status_code == again.status_code == health.status_code == 200
    assert answered == ["user", "system", "user"]


def test_a_format_by_name_ends_answers_where_its_turns_end():
    with served(chat_template=ChatTemplate("{{ messages[0].content }}", {}, "test", stop=("[END]",))) as client:
        client.engine.text = "abc[END]d"
        for stop, said in ((None, "abc"), ("c", "ab"), (["x"] * MAX_STOP_STRINGS, "abc")):
            [choice] = client.post("/v1/chat/completions", messages=USER, stop=stop).json()["choices"]
            assert (choice["message"]["content"], choice["finish_reason"]) == (said, "stop")
        [choice] = client.post("/v1/chat/completions", messages=USER, max_tokens=9, ignore_eos=True).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("abc[END]d", "length")
        assert "[END]" in client.post("/v1/completions", prompt="a").json()["choices"][0]["text"]
        for path, name in (("/v1/chat/completions", "stop"), ("/v1/messages", "stop_sequences")):
            refused = client.post(path, messages=USER, max_tokens=9, **{name: ["x"] * (MAX_STOP_STRINGS + 1)})
            assert refused.status_code == 400 and f"{name} takes up to {MAX_STOP_STRINGS} strings" in refused.text


THINKING = "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}{{ mark or '' }}"


def test_options_of_the_template():
    """vLLM's and SGLang's chat_template_kwargs; each is a variable that the template reads, or it is refused."""

    def chat(options: Any) -> tuple[str, dict]:
        return "/v1/chat/completions", {"messages": USER, "max_tokens": 1, "chat_template_kwargs": options}

    taken: list[tuple[Any, str]] = [
        (None, "hi"), ({}, "hi"), ({"enable_thinking": True}, "hi"), ({"enable_thinking": False}, "hi<no>"),
        ({"mark": "a" * 20, "enable_thinking": 0}, "hi<no>" + "a" * 20), ({"mark": 1.5}, "hi1.5"), ({"mark": 2**40}, f"hi{2**40}"),
    ]  # fmt: skip
    wrong: list[Any] = [
        {"enable_thinkin": False}, {"messages": 1}, {"tokenize": False}, {"bos_token": "x"}, {"__class__": 1}, {"": 1},
        {"mark": "a" * 201}, {"mark": None}, {"mark": [1]}, {"mark": {}}, [1], 5, "x",
        {"mark": 1} | {f"x{number}": 1 for number in range(16)}, {str(number): [] for number in range(20_000)},
    ]  # fmt: skip
    good = answers(*(chat(options) for options, _ in taken), template=THINKING)
    assert [answer.json()["usage"]["prompt_tokens"] for answer in good] == [len(text) for _, text in taken]
    for answer in answers(*map(chat, wrong), template=THINKING):
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template_kwargs")
        assert len(answer.json()["error"]["message"]) < 500


def test_too_many_options_are_not_checked_one_by_one():
    adapter, options = TypeAdapter(TemplateOptions), {str(number): [] for number in range(20_000)}
    started = time.thread_time()
    with pytest.raises(ValidationError):
        adapter.validate_python(options)
    assert time.thread_time() - started < 0.05  # each would cost four messages


def test_half_characters_in_a_chat_are_refused():
    """In a message, in an option, and from the template itself."""
    template = THINKING + r"{% if mark == 1 %}{{ '\ud800' }}{% endif %}"
    messages = '[{"role": "user", "content": "hi"}]'
    bodies = {
        f'{{"messages": {messages.replace("hi", chr(92) + "ud800")}}}': "messages",
        f'{{"messages": {messages}, "chat_template_kwargs": {{"mark": "\\ud800"}}}}': "chat_template_kwargs",
        f'{{"messages": {messages}, "chat_template_kwargs": {{"mark": 1}}}}': "messages",
    }
    with served(template=template) as client:
        for body, param in bodies.items():
            answer = client.post_text("/v1/chat/completions", body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
            assert ("not valid Unicode" in answer.text) == (param == "messages")


def test_the_template_writes_the_special_tokens():
    """The tokenizer must not put a second beginning of text in front, as it does with a plain prompt."""
    tokenizer = byte_tokenizer("{{ bos_token }}{{ messages[0].content }}")
    tokenizer.add_special_tokens({"bos_token": "a"})
    bos = tokenizer.convert_tokens_to_ids("a")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="a $A", pair=None, special_tokens=[("a", bos)])
    with ChatTemplate.of_model(tokenizer) as template:
        model = ServedModel("bos", CONTEXT, TreeShape(), tokenizer, template)
        ids = model.chat_token_ids(model.chat_text(USER))
    assert ids == [bos, *b"hi"] == tokenizer.apply_chat_template(USER, add_generation_prompt=True, return_dict=False)
    assert model.token_ids("hi", "prompt") == [bos, *b"hi"]


def test_a_conversation_counts_as_the_template_leaves_it():
    """Templates drop parts such as old reasoning, so more text than the context holds may be sent."""
    tokenizer = byte_tokenizer("{{ messages[-1].content }}")
    with ChatTemplate.of_model(tokenizer) as template:
        model = ServedModel("short", CONTEXT, TreeShape(), tokenizer, template)
        messages = [{"role": "user", "content": "long " * 10_000}, *USER]
        assert model.chat_token_ids(model.chat_text(messages)) == [*b"hi"]
        with pytest.raises(ApiError, match="has more than"):
            model.chat_token_ids(model.chat_text(messages[:1]))


def test_special_tokens_without_a_name_are_special():
    """As <|python_tag|> is in Llama 3.1: the text lacks it, and calls after it would be lost."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.add_special_tokens(["<|python_tag|>"])
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.add_tokens("<tool_call>")
    assert tokenizer.decode(tokenizer.encode("<s><|python_tag|><tool_call>"), skip_special_tokens=True) == "<tool_call>"
    model = ServedModel("m", CONTEXT, PLAIN, tokenizer)
    found = [model.has_special(*tags) for tags in (["<|python_tag|>"], ["a", "<s>"], ["<tool_call>", "a"], [])]
    assert found == [True, True, False, False]


def test_tokens_keep_the_space_in_front_of_them():
    tokenizer = sentencepiece_tokenizer()
    model = ServedModel("m", CONTEXT, PLAIN, tokenizer)
    the, joined = tokenizer.convert_tokens_to_ids(["▁the", "the"])
    assert [model.token_text(token) for token in (the, joined, the, 1 + ord("é".encode()[:1]), 0)] == [
        " the", "the", " the", "\N{REPLACEMENT CHARACTER}", "<unk>",
    ]  # fmt: skip
    assert ServedModel("m", CONTEXT, PLAIN, byte_tokenizer()).token_text(ord("x")) == "x"
