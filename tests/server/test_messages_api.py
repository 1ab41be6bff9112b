"""/v1/messages: the same as a chat completion, in Anthropic's words, whole and streamed."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxspec.server.errors import ApiError
from jaxspec.server.messages.answers import arguments_of
from jaxspec.server.messages.input import AnthropicMessage, InputBlock
from jaxspec.server.settings import ServerSettings
from jaxspec.text.answer_parser import REASONING_FORMATS
from tests.server.conftest import CHAT, MESSAGES, USER, Client, served
from tests.server.fakes import CHAT_TEMPLATE, TEXT
from tests.server.notations import (
    ANTHROPIC_TOOLS,
    CALL,
    CHAT_TOOLS,
    CONVERSATIONS,
    TWO_CALLS,
    WEATHER,
    Outcome,
    answer_texts,
    anthropic_messages,
    chat_messages,
    of_chat,
)
from tests.server.test_bad_input import refusal

COUNT = f"{MESSAGES}/count_tokens"


def of_message(message: dict, texts: list[str] | None = None) -> Outcome:
    """What it tells; fails for what is not in order. `texts`: the arguments of calls, if they came as text."""
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "fake")
    found: dict[str, Any] = {"thinking": "", "text": ""}
    calls = []
    for block in message["content"]:
        if block["type"] == "tool_use":
            calls.append((block["name"], block["input"] if texts is None else texts[len(calls)]))
        else:
            found[block["type"]] += block[block["type"]]
    usage = message["usage"]
    cached = usage["cache_read_input_tokens"]
    counts = usage["input_tokens"] + cached, cached, usage["output_tokens"]
    reason = message["stop_reason"]
    assert reason in ("max_tokens", "tool_use" if calls else "end_turn") and message["stop_sequence"] is None
    return Outcome(found["thinking"], found["text"], calls, reason != "max_tokens", *counts)


def put_together(events: list[dict]) -> tuple[dict, list[str]]:
    """The message that the events make, and the arguments of its calls as text."""
    first, *middle, delta, last = events
    assert (first["type"], delta["type"], last) == ("message_start", "message_delta", {"type": "message_stop"})
    message, arguments = first["message"], []
    assert (message["content"], message["stop_reason"]) == ([], None)
    is_open = False
    for event in middle:
        assert event["index"] == len(message["content"]) - (event["type"] != "content_block_start")
        match event["type"]:
            case "content_block_start":
                assert not is_open
                message["content"].append(event["content_block"])
                if event["content_block"]["type"] == "tool_use":
                    arguments.append("")
            case "content_block_stop":
                assert is_open
            case "content_block_delta":
                block, piece = message["content"][-1], event["delta"]
                if piece["type"] == "input_json_delta":
                    arguments[-1] += piece["partial_json"]
                else:
                    assert piece["type"] == f"{block['type']}_delta"
                    block[block["type"]] += piece[block["type"]]
        is_open = event["type"] != "content_block_stop"
    assert not is_open
    return message | delta["delta"] | {"usage": delta["usage"]}, arguments


@given(
    CONVERSATIONS,
    st.none() | st.just("Be kind."),
    st.sampled_from([(None, None), ("auto", "auto"), ("none", "none"), ("any", "required")]),
)
@settings(max_examples=40)
def test_the_model_reads_what_it_reads_in_a_chat(shared_tools: Client, turns: list, system: str | None, choices: tuple):
    engine = shared_tools.engine
    engine.text, start = "\x00", len(engine.params)
    shared = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 7, "max_tokens": 50}
    said = [] if system is None else [{"role": "system", "content": system}]
    choice = None if choices[0] is None else {"type": choices[0], "disable_parallel_tool_use": True}
    body = {"messages": said + chat_messages(turns), "tools": CHAT_TOOLS, "tool_choice": choices[1], "stop": ["x"]}
    assert shared_tools.post(CHAT, **body, **shared, parallel_tool_calls=choice is None).status_code == 200
    body = {"messages": anthropic_messages(turns), "tools": ANTHROPIC_TOOLS, "tool_choice": choice}
    answer = shared_tools.post(MESSAGES, **body, **shared, system=system, stop_sequences=["x"])
    assert answer.status_code == 200, answer.text
    first, second = engine.prompts[start:]
    assert first == second and engine.params[start] == engine.params[start + 1]
    assert shared_tools.post(COUNT, **body, system=system).json() == {"input_tokens": len(first)}


@given(answer_texts(), st.integers(1, 120))
@example(TWO_CALLS, 500)
@settings(max_examples=60)
def test_an_answer_is_that_of_a_chat_whole_and_streamed(shared_tools: Client, text: str, most: int):
    shared_tools.engine.text = text + "\x00"
    chat = of_chat(shared_tools.post(CHAT, messages=USER, tools=CHAT_TOOLS, max_tokens=most).json())
    body = {"messages": USER, "tools": ANTHROPIC_TOOLS, "max_tokens": most}
    whole = shared_tools.post(MESSAGES, **body).json()
    streamed, arguments = put_together(shared_tools.events(MESSAGES, **body))
    assert chat == of_message(whole, [text for _, text in chat.calls]) == of_message(streamed, arguments)
    for (_, text), (_, given_) in zip(chat.calls, of_message(whole).calls, strict=True):
        if chat.is_complete:
            assert json.loads(text) == given_


def test_a_call_that_was_cut_off_has_what_came_of_it(caller: Client):
    caller.engine.text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "day": "Mon'
    body = {"messages": USER, "tools": ANTHROPIC_TOOLS, "max_tokens": len(caller.engine.text)}
    answer = caller.post(MESSAGES, **body).json()
    assert (answer["stop_reason"], answer["content"][0]["input"]) == ("max_tokens", {"city": "Paris"})


def test_an_answer_can_be_sent_back_as_it_is(caller: Client):
    caller.engine.text = f"<think>hm</think>Wait.{CALL}\x00"
    answer = caller.post(MESSAGES, messages=USER, tools=ANTHROPIC_TOOLS, max_tokens=200).json()
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": answer["content"][-1]["id"], "content": [{"type": "text", "text": "9"}]},
        {"type": "tool_result", "tool_use_id": "x", "is_error": True},
        {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
    ]
    turns = [*USER, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results}]
    assert caller.post(MESSAGES, messages=turns, max_tokens=9, system=[{"type": "text", "text": "Be kind."}]).status_code == 200
    prompt = 'system:Be kind.|user:hi|assistant:(hm)Wait.weather{"city": "Paris"}|tool:9|tool:|user:So?|assistant:'
    assert bytes(caller.engine.prompts[-1]).decode() == prompt


def test_the_answer_continues_an_assistants_message(caller: Client):
    caller.engine.text = "fine.\x00"
    turns = [*USER, {"role": "assistant", "content": "I am "}]
    answer = caller.post(MESSAGES, messages=turns, max_tokens=9).json()
    assert bytes(caller.engine.prompts[-1]).decode() == "user:hi|assistant:I am "
    assert answer["content"] == [{"type": "text", "text": "fine."}]


@pytest.mark.parametrize("system", [None, "", []])
def test_an_empty_system_prompt_is_none(client: Client, system: Any):
    assert client.post(MESSAGES, messages=USER, max_tokens=2, system=system).status_code == 200
    assert bytes(client.engine.prompts[-1]).decode() == "user: hi\n"


def test_a_stop_sequence_is_told(client: Client):
    answer = client.post(MESSAGES, messages=USER, max_tokens=30, stop_sequences=["x", "quick"]).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "quick")
    assert answer["content"] == [{"type": "text", "text": TEXT[: TEXT.index("quick")]}]
    *_, delta, _ = client.events(MESSAGES, messages=USER, max_tokens=30, stop_sequences=["quick"])
    assert delta["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "quick"}


def test_cached_tokens_are_no_input_tokens(client: Client):
    client.engine.cached_tokens = 4
    expected = {"input_tokens": 5, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4, "output_tokens": 2}
    assert client.post(MESSAGES, messages=USER, max_tokens=2).json()["usage"] == expected
    start, *_, delta, _ = client.events(MESSAGES, messages=USER, max_tokens=2)
    assert delta["usage"] == expected and start["message"]["usage"]["input_tokens"] == 9


def test_a_schema_is_a_constraint(client: Client):
    form = {"type": "json_schema", "schema": {"type": "array"}}
    assert client.post(MESSAGES, messages=USER, max_tokens=2, output_config={"format": form}).status_code == 200
    assert client.engine.params[-1].constraint == ("json_schema", '{"type": "array"}')


def test_strict_tools_and_one_tool_by_name(caller: Client):
    caller.engine.text = CALL + "\x00"
    for more in ({"tool_choice": {"type": "tool", "name": "weather"}}, {"tools": [ANTHROPIC_TOOLS[0] | {"strict": True}]}):
        body = {"messages": USER, "tools": ANTHROPIC_TOOLS, "max_tokens": 200} | more
        assert caller.post(MESSAGES, **body).json()["stop_reason"] == "tool_use"
        constraint = caller.engine.params[-1].constraint
        assert constraint is not None and json.dumps(WEATHER) in constraint[1]


THINKS = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking %}<think>{% elif enable_thinking is false %}no{% endif %}"
)


def test_thinking_is_the_templates():
    with served(template=THINKS, reasoning=REASONING_FORMATS["qwen3"]) as client:
        for thinking, prompt in (
            (None, "hi"),
            ({"type": "adaptive", "block_binding": {}}, "hi"),
            ({"type": "enabled", "budget_tokens": 1024}, "hi<think>"),
            ({"type": "disabled"}, "hino"),
        ):
            body = {"messages": USER, "max_tokens": 2, "thinking": thinking}
            assert client.post(MESSAGES, **body).status_code == 200
            assert bytes(client.engine.prompts[-1]).decode() == prompt
        both = {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}}
        assert "chat_template_kwargs" in refusal(client.post(MESSAGES, **body | both), 400)["message"]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("", {}),
        ('{"a": "Paris", "b": "Mon', {"a": "Paris"}),
        ('{"a": "\\ud83d", "b": "\\ud83d\\ude00"}', {"a": "\ufffd", "b": "\U0001f600"}),
        ('{"a": "x\ny"}', {"a": "x\ny"}),
        ("[1", {}),
        ("{x", {}),
        ('{"a": ' + 300 * "[" + 300 * "]" + "}", {}),
    ],
)
def test_arguments_with_an_odd_character_are_not_lost(text: str, arguments: dict[str, Any]):
    assert arguments_of(text) == arguments


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content is required"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content must hold a block"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]}, "not tool_use"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
            "messages.0.content.0.type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "id": "1"}]}]}, "can't have id"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "needs tool_use_id"),
        (
            {"messages": [*USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
            "send their results",
        ),
        ({"system": [{"type": "image"}]}, "system.0.type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}]}, "tools.0.type is not supported"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema is required"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": 1.5}, "temperature"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "--reasoning-parser"),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported yet"),
        ({"thread": {"type": "create"}}, "thread is not supported"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"max_tokens": 60}, "messages has 9 tokens and max_tokens asks for 60 more"),
        ({"stream": True, "speculative": {"trace": True}}, "speculative.trace"),
        ({"frequency_penalty": 1}, "frequency_penalty is not a field of this endpoint"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_what_is_wrong_is_refused_by_name(client: Client, body: dict, said: str):
    error = refusal(client.post(MESSAGES, **({"messages": USER, "max_tokens": 9} | body)), 400)
    assert error["type"] == "invalid_request_error" and said in error["message"], error
    assert client.engine.params == []


def test_every_failure_has_anthropics_shape(client: Client):
    """Those of the engine: test_streaming.py."""
    body = {"messages": USER, "max_tokens": 9}
    kinds = {}
    for path in (MESSAGES, COUNT):
        kinds[path, 405] = client.http.get(path), "invalid_request_error"
        kinds[path, 415] = client.http.post(path, content=b"{}"), "invalid_request_error"
        kinds[path, 413] = client.http.post(path, content=b"x" * (2**21 + 1)), "request_too_large"
        kinds[path, 403] = client.http.post(path, json=body, headers={"origin": "http://evil"}), "permission_error"
    kinds[f"{MESSAGES}/batches", 404] = client.post(f"{MESSAGES}/batches"), "not_found_error"
    for (_, status), (response, kind) in kinds.items():
        assert refusal(response, status)["type"] == kind
    thread = refusal(client.post(MESSAGES, **body, thread={"type": "create"}), 400)
    assert thread["details"] == {"error_code": "thread_unsupported_request"}, "so clients know that they must do without"


def test_a_key_may_come_as_x_api_key():
    with served(ServerSettings(api_key="key"), template=CHAT_TEMPLATE) as client:
        for headers, status in (
            ({"x-api-key": "key"}, 200),
            ({"authorization": "Bearer key"}, 200),
            ({"x-api-key": "no"}, 401),
            ({}, 401),
        ):
            response = client.http.post(f"{MESSAGES}?beta=true", json={"messages": USER, "max_tokens": 2}, headers=headers)
            assert response.status_code == status
            if status == 401:
                assert refusal(response, 401)["type"] == "authentication_error"


def test_an_input_that_is_nested_deeply_ends_nothing(client: Client):
    for depth in (100, 900, 5000):
        nested = '{"a":' * depth + "1" + "}" * depth
        call = f'{{"type": "tool_use", "id": "1", "name": "f", "input": {nested}}}'
        body = (
            f'{{"max_tokens": 2, "messages": [{{"role": "assistant", "content": [{call}]}}, {{"role": "user", "content": "x"}}]}}'
        )
        assert client.post_text(MESSAGES, body).status_code in (200, 400)
    deepest: dict[str, Any] = {}
    for _ in range(100_000):
        deepest = {"a": deepest}
    block = InputBlock.model_construct(type="tool_use", id="1", name="f", input=deepest)
    with pytest.raises(ApiError, match=r"messages\.0: the input of a call is nested too deeply"):
        list(AnthropicMessage.model_construct(role="assistant", content=[block]).messages("messages.0"))
