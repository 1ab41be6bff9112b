"""Tools and thinking in chats over HTTP: what the model reads, what it may write, and what clients get of it."""

import json
from typing import Any

import pytest

from jaxspec.text.answer_parser import REASONING_FORMATS
from jaxspec.text.tool_formats import TOOL_FORMATS
from tests.server.conftest import CHAT, MESSAGES, RESPONSES, USER, Client, served
from tests.server.fakes import TOOL_TEMPLATE, byte_tokenizer
from tests.server.notations import ANTHROPIC_TOOLS, CHAT_TOOLS, FLAT_TOOLS, FUNCTIONS, WEATHER
from tests.server.test_bad_input import refusal

TOOL = CHAT_TOOLS[0]
TIME = {"type": "function", "function": {"name": "time"}}
STRICT = {"type": "function", "function": {**FUNCTIONS[0], "strict": True}}
CALLED = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
NAMED = {"type": "function", "function": {"name": "weather"}}
CALLS = (
    'Wait.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)


@pytest.fixture
def client(caller: Client) -> Client:
    return caller


def ask(client: Client, text: str, **body: Any) -> dict[str, Any]:
    """The choice of an answer that ends after this text."""
    client.engine.text = text + "\x00"
    response = client.post(CHAT, **{"messages": USER, "stop": ["\x00"], **body})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def streamed(client: Client, text: str, **body: Any) -> tuple[dict[str, Any], str]:
    """The same as a stream: the message that the deltas make, and the finish_reason."""
    client.engine.text = text + "\x00"
    message: dict[str, Any] = {}
    for event in client.events(CHAT, messages=USER, stop=["\x00"], **body):
        [choice] = event["choices"]
        for name, value in choice["delta"].items():
            if name != "tool_calls":
                message[name] = message.get(name, "") + value
                continue
            [piece] = value
            calls = message.setdefault("tool_calls", [])
            if piece["index"] == len(calls):
                calls.append({"id": piece["id"], "type": piece["type"], "function": piece["function"]})
                assert piece["function"]["name"] and piece["function"]["arguments"] == ""
            else:
                assert set(piece) == {"index", "function"} and set(piece["function"]) == {"arguments"}
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return message, choice["finish_reason"]


def functions(message: dict[str, Any]) -> list[tuple[str, str]]:
    assert len({call["id"] for call in message["tool_calls"]}) == len(message["tool_calls"])
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


def test_calls_whole_and_streamed(client: Client):
    choice = ask(client, CALLS, tools=[TOOL, TIME])
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Wait.", "tool_calls")
    assert functions(choice["message"]) == [("weather", '{"city": "Paris"}'), ("time", "{}")]
    message, reason = streamed(client, CALLS, tools=[TOOL, TIME])
    assert (message["content"], reason, functions(message)) == ("Wait.", "tool_calls", functions(choice["message"]))
    assert client.engine.params[0].constraint is None


def test_nothing_but_calls_has_no_content(client: Client):
    assert ask(client, CALLS.removeprefix("Wait.\n"), tools=[TOOL, TIME])["message"]["content"] is None


def test_without_tools_or_with_none_calls_are_content(client: Client):
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        choice = ask(client, CALLS, **fields)
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALLS, "stop")
        assert "tool_calls" not in choice["message"]


def test_one_call_if_there_shall_be_one(client: Client):
    fields = {"tools": [TOOL, TIME], "parallel_tool_calls": False}
    for message in (ask(client, CALLS, **fields)["message"], streamed(client, CALLS, **fields)[0]):
        assert functions(message) == [("weather", '{"city": "Paris"}')]


def test_a_call_that_was_cut_off_has_the_reason_of_its_end(client: Client):
    client.engine.text = CALLS
    response = client.post(CHAT, messages=USER, tools=[TOOL], max_tokens=CALLS.index('is"')).json()["choices"][0]
    assert response["finish_reason"] == "length" and functions(response["message"]) == [("weather", '{"city": "Par')]


@pytest.mark.parametrize(
    ("stop", "reason", "arguments"),
    [("aris", "stop", '{"city": "P'), ("}", "stop", '{"city": "Paris"'), ("</tool_call>", "tool_calls", '{"city": "Paris"}')],
)
def test_a_stop_string_within_a_call_is_no_end_of_it(client: Client, stop: str, reason: str, arguments: str):
    """Clients that are told of calls run them."""
    client.engine.text = CALLS + "\x00"
    body = {"messages": USER, "tools": [TOOL], "stop": stop}
    [choice] = client.post(CHAT, **body).json()["choices"]
    assert (choice["finish_reason"], functions(choice["message"])) == (reason, [("weather", arguments)])
    assert client.events(CHAT, **body)[-1]["choices"][0]["finish_reason"] == reason
    status = "completed" if reason == "tool_calls" else "incomplete"
    items = client.post(RESPONSES, input="hi", tools=FLAT_TOOLS, stop=stop).json()["output"]
    assert [item["status"] for item in items] == ["completed", status]


@pytest.mark.parametrize(
    ("value", "reason", "stop_reason"), [('"P', "stop", "end_turn"), ("", "stop", "end_turn"), ("P}", "tool_calls", "tool_use")]
)
def test_a_call_that_the_model_breaks_off_is_none_and_a_malformed_one_is(client: Client, value: str, reason: str, stop_reason: str):
    client.engine.text = f'<tool_call>{{"name": "weather", "arguments": {{"city": {value}\x00'
    answer = client.post(CHAT, messages=USER, tools=[TOOL]).json()
    assert answer["choices"][0]["finish_reason"] == reason
    message = client.post(MESSAGES, messages=USER, tools=ANTHROPIC_TOOLS, max_tokens=99).json()
    assert message["stop_reason"] == stop_reason


def structure(client: Client) -> dict[str, Any]:
    """What the newest request's text must follow."""
    constraint = client.engine.params[-1].constraint
    assert constraint is not None and constraint[0] == "structural_tag"
    return json.loads(constraint[1])["format"]


THOUGHTLESS = {"chat_template_kwargs": {"closed": True}}


def test_required_and_named_calls_follow_their_schemas(client: Client):
    ask(client, CALLS, tools=[TOOL, TIME], tool_choice="required", **THOUGHTLESS)
    form = structure(client)
    assert (form["type"], len(form["tags"])) == ("tags_with_separator", 2)
    assert form["at_least_one"] is True and form["stop_after_first"] is False
    assert form["tags"][0]["content"]["json_schema"] == WEATHER and '"weather"' in form["tags"][0]["begin"]
    tool: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": ["object", "null"]}}}
    ask(client, CALLS, tools=[tool], tool_choice="required", **THOUGHTLESS)
    assert structure(client)["tags"][0]["content"]["json_schema"] == {"type": "object"}, "what a call has"
    ask(client, CALLS, tools=[TIME, TOOL], tool_choice=NAMED, **THOUGHTLESS)
    form = structure(client)
    assert form["stop_after_first"] and [tag["content"]["json_schema"] for tag in form["tags"]] == [WEATHER]


def test_strict_tools_are_constrained_where_a_call_begins(client: Client):
    ask(client, CALLS, tools=[STRICT, TIME], **THOUGHTLESS)
    form = structure(client)
    assert (form["type"], form["triggers"]) == ("triggered_tags", ["<tool_call>"])
    assert [tag["content"]["json_schema"] for tag in form["tags"]] == [WEATHER, {"type": "object"}]


def test_an_answer_with_a_schema_may_call_instead(client: Client):
    ask(client, CALLS, tools=[TOOL], response_format={"type": "json_object"}, **THOUGHTLESS)
    calls, own = structure(client)["elements"]
    assert calls["type"] == "tags_with_separator" and own == {"type": "json_schema", "json_schema": {"type": "object"}}


def test_a_grammar_begins_after_the_thinking(client: Client):
    for fields in ({"regex": "a+"}, {"structured_outputs": {"choice": ["a", "b"]}}, {"guided_json": {"type": "object"}}):
        ask(client, "a", **fields)
        thought, _ = structure(client)["elements"]
        assert thought["elements"][1]["elements"][0] == {
            "type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>",
        }  # fmt: skip
    ask(client, "a", regex="a+", **THOUGHTLESS)
    assert client.engine.params[-1].constraint == ("regex", "a+")


def test_reasoning_is_separate_unless_the_client_minds(client: Client):
    text = "<think>\nhm\n</think>\n\nYes."
    for message in (ask(client, text)["message"], streamed(client, text)[0]):
        assert (message["reasoning_content"], message["content"]) == ("hm", "Yes.")
    for message in (ask(client, text, separate_reasoning=False)["message"], streamed(client, text, separate_reasoning=False)[0]):
        assert message["content"] == text and "reasoning_content" not in message
    for message in (ask(client, text, include_reasoning=False)["message"], streamed(client, text, include_reasoning=False)[0]):
        assert message["content"] == "Yes." and "reasoning_content" not in message
    assert ask(client, text, **THOUGHTLESS)["message"]["content"] == text


def test_thinking_that_is_left_out_is_not_in_log_probabilities(client: Client):
    body = {"messages": USER, "include_reasoning": False, "logprobs": True, "max_tokens": 9}
    assert refusal(client.post(CHAT, **body), 400)["param"] == "include_reasoning"
    assert client.post(CHAT, **body, **THOUGHTLESS).status_code == 200


def prompt_of(client: Client, messages: list[dict[str, Any]], **body: Any) -> str:
    answer = client.post("/tokenize", messages=messages, **body)
    assert answer.status_code == 200, answer.text
    return bytes(answer.json()["tokens"]).decode()


def test_the_template_gets_tools_calls_and_results(client: Client):
    parsed = {**CALLED, "function": {**CALLED["function"], "parsed_arguments": {"city": "Paris"}}}  # openai's helpers add these
    turns = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [parsed], "parsed": None},
        {"role": "tool", "tool_call_id": "1", "content": "9"},
    ]
    assert prompt_of(client, turns, tools=[TOOL]) == 'weather;user:hi|assistant:weather{"city": "Paris"}|tool:9|assistant:'


def test_the_last_message_can_be_continued(client: Client):
    turns = [*USER, {"role": "assistant", "content": "Well, "}]
    assert prompt_of(client, turns, continue_final_message=True) == "user:hi|assistant:Well, "
    assert prompt_of(client, turns, add_generation_prompt=False) == "user:hi|assistant:Well, |"
    client.engine.text = "x</think>y\x00"
    thinking = [*USER, {"role": "assistant", "content": "<think>a"}]
    answer = client.post(CHAT, messages=thinking, continue_final_message=True, add_generation_prompt=False, stop="\x00").json()
    assert answer["choices"][0]["message"]["reasoning_content"] == "x"


def test_an_empty_message_that_is_continued_thinks_as_the_prompt_says():
    """Also where the model always thinks: the template has closed the thinking."""
    template = "{% for m in messages %}{{ m.role }}:<think></think>{{ m.content }}{% endfor %}"
    with served(template=template, reasoning=REASONING_FORMATS["deepseek-r1"]) as own:
        turns = [*USER, {"role": "assistant", "content": ""}]
        message = ask(own, "Paris.", messages=turns, continue_final_message=True)["message"]
    assert (message["content"], message.get("reasoning_content")) == ("Paris.", None)


ASSISTANT = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[1"}}]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [TOOL] * 2}, "tools"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": [*USER, ASSISTANT]}, "messages.1.tool_calls.0.function.arguments"),
        ({"messages": [{**ASSISTANT, "role": "user", "content": "x"}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.function"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages.0.content"),
        ({"continue_final_message": True}, "continue_final_message"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_what_is_wrong_is_refused_by_name(client: Client, body: dict[str, Any], param: str):
    error = refusal(client.post(CHAT, **({"messages": USER} | body)), 400)
    assert error["param"] == param and param in error["message"]
    assert ("content is required" in error["message"]) == param.endswith("content"), error["message"]
    assert client.engine.params == []


def test_a_model_without_a_known_format_refuses_tools():
    for form, said in ((None, "--tool-call-parser"), (TOOL_FORMATS["hermes"], "does not take tools")):
        with served(template="{{ messages[-1].content }}", tool_format=form) as own:
            error = refusal(own.post(CHAT, messages=USER, tools=[TOOL]), 400)
            assert error["param"] == "tools" and said in error["message"]
            assert refusal(own.post(CHAT, messages=USER, include_reasoning=False), 400)["param"] == "include_reasoning"


def test_parameters_that_a_format_can_not_write_are_refused():
    tool: dict[str, Any] = {"type": "function", "function": {"name": "f", "strict": True}}
    with served(template=TOOL_TEMPLATE, tool_format=TOOL_FORMATS["pythonic"]) as own:
        for properties, said in (([1], "properties"), ({"z" * 5000: {"enum": 1}}, f"an enum of '{'z' * 59} that is not a list")):
            tool["function"]["parameters"] = {"properties": properties}
            error = refusal(own.post(CHAT, messages=USER, tools=[tool], tool_choice="required"), 400)
            assert error["param"] == "tools" and f"the parameters of f have {said}" in error["message"]


@pytest.mark.parametrize("value", ["Infinity", '"\\ud800"'])
def test_what_no_json_can_hold_is_the_fault_of_its_field(client: Client, value: str):
    """The grammar that is made of it is ours."""
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {{"const": {value}}}}}}}'
    for field, body in (
        ("tools", f'"tools": [{tool}], "tool_choice": "required"'),
        ("structured_outputs.json", f'"structured_outputs": {{"json": {{"const": {value}}}}}'),
    ):
        error = refusal(client.post_text(CHAT, f'{{"messages": {json.dumps(USER)}, {body}}}'), 400)
        assert error["param"] == field and error["message"].startswith(f"{field} can't be written as JSON: ")


def test_a_choice_that_is_no_tool_is_named_alone(client: Client):
    tools = [{"type": "function", "function": {"name": f"{'z' * 99}{number}"}} for number in range(9)]
    error = refusal(client.post(CHAT, messages=USER, tools=tools, tool_choice=NAMED), 400)
    assert error["message"] == 'tool_choice names "weather", which is none of the tools'


def test_a_structural_tag_beside_tools_must_have_a_format(client: Client):
    for wrong in (5, "abc", [["type", "any_text"]]):
        outputs = {"structural_tag": {"format": wrong}}
        error = refusal(client.post(CHAT, messages=USER, tools=[TOOL], structured_outputs=outputs), 400)
        assert error["param"] == "structured_outputs.structural_tag"


def test_calls_are_not_lost_in_a_template_for_answers_without_tools():
    tokenizer = byte_tokenizer()
    lacking = "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"
    tokenizer.chat_template = {"default": lacking, "tool_use": TOOL_TEMPLATE}
    turns = [*USER, {"role": "assistant", "tool_calls": [CALLED]}, *USER]
    with served(tokenizer=tokenizer, template=None, tool_format=TOOL_FORMATS["hermes"]) as own:
        assert "weather" in prompt_of(own, turns, tools=[TOOL])
        assert "does not write calls" in refusal(own.post(CHAT, messages=turns), 400)["message"]
        turns[1] = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}
        error = refusal(own.post(MESSAGES, messages=turns, system="Be kind.", max_tokens=9), 400)
        assert error["message"] == "messages: the model's chat template does not write calls"


def test_a_template_without_tools_gets_instructions():
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"
    with served(template=template, context_length=4096, tool_format=TOOL_FORMATS["smollm2"]) as own:
        turns = [{"role": "system", "content": "Be kind."}, *USER, {"role": "assistant", "tool_calls": [CALLED]}]
        prompt = prompt_of(own, turns, tools=[TOOL])
        assert prompt.startswith("system:Be kind.\n\nYou are an expert") and '<tools>[{"name": "weather"' in prompt
        assert prompt.endswith('assistant:<tool_call>[{"name": "weather", "arguments": {"city": "Paris"}}]</tool_call>|')
        assert prompt_of(own, USER, tools=[TOOL]).startswith("system:You are an expert")
