"""/v1/responses: the same as a chat completion, in other words, whole and streamed."""

import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.server.conftest import CHAT, RESPONSES, USER, Client, wait_until
from tests.server.fakes import TEXT
from tests.server.notations import (
    CALL,
    CHAT_TOOLS,
    CONVERSATIONS,
    FLAT_TOOLS,
    TWO_CALLS,
    Outcome,
    answer_texts,
    chat_messages,
    input_items,
    of_chat,
)
from tests.server.test_bad_input import refusal
from tests.server.test_streaming import receive, send


def of_response(response: dict) -> Outcome:
    """What it tells; fails for what is not in order."""
    assert (response["object"], response["store"], response["error"]) == ("response", False, None)
    found: dict[str, Any] = {"reasoning": "", "message": "", "function_call": []}
    for item in response["output"]:
        assert item["status"] == "completed" or (item is response["output"][-1] and response["status"] == "incomplete")
        if item["type"] == "function_call":
            found["function_call"].append((item["name"], item["arguments"]))
        else:
            [content] = item["content"]
            assert content["type"] == {"reasoning": "reasoning_text", "message": "output_text"}[item["type"]]
            found[item["type"]] += content["text"]
    details = response["incomplete_details"]
    assert details == (None if response["status"] == "completed" else {"reason": "max_output_tokens"})
    usage = response["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    counts = usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]
    return Outcome(found["reasoning"], found["message"], found["function_call"], details is None, *counts)


def put_together(events: list[dict]) -> dict:
    """The last event's response; its items must be what the events before made."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, begun, *middle, last = events
    assert (created["type"], begun["type"]) == ("response.created", "response.in_progress")
    assert created["response"]["status"] == "in_progress" and created["response"]["output"] == []
    assert last["type"] == f"response.{last['response']['status']}"
    items: list[dict] = []
    texts: list[str] = []
    for event in middle:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == len(items) - (kind != "output_item.added")
        if kind == "output_item.added":
            assert event["item"]["status"] == "in_progress"
            items.append(event["item"])
            texts.append("")
        elif kind == "output_item.done":
            assert {name: event["item"][name] for name in ("id", "type")} == {name: items[-1][name] for name in ("id", "type")}
            items[-1] = event["item"]
        else:
            assert event["item_id"] == items[-1]["id"] and event.get("content_index", 0) == 0
        if kind.endswith(".delta"):
            assert event["delta"]
            texts[-1] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done", "function_call_arguments.done"):
            assert event.get("text", event.get("arguments")) == texts[-1]
    assert last["response"]["output"] == items
    assert [item.get("arguments", item.get("content", [{}])[0].get("text")) for item in items] == texts
    return last["response"]


@given(CONVERSATIONS, st.none() | st.just("Be kind."), st.sampled_from([None, "auto", "none", "required"]))
@settings(max_examples=40)
def test_the_model_reads_what_it_reads_in_a_chat(shared_tools: Client, turns: list, instructions: str | None, choice: str | None):
    engine = shared_tools.engine
    engine.text, start = "\x00", len(engine.params)
    shared = {"temperature": 0.5, "top_p": 0.9, "seed": 7, "tool_choice": choice, "parallel_tool_calls": False}
    system = [] if instructions is None else [{"role": "system", "content": instructions}]
    body = {"messages": system + chat_messages(turns), "tools": CHAT_TOOLS, "max_completion_tokens": 50}
    assert shared_tools.post(CHAT, **body, **shared).status_code == 200
    body = {"input": input_items(turns), "instructions": instructions, "tools": FLAT_TOOLS, "max_output_tokens": 50}
    answer = shared_tools.post(RESPONSES, **body, **shared)
    assert answer.status_code == 200, answer.text
    first, second = engine.prompts[start:]
    assert first == second and engine.params[start] == engine.params[start + 1]


@given(answer_texts(), st.none() | st.integers(1, 120))
@example(TWO_CALLS, None)
@settings(max_examples=60)
def test_an_answer_is_that_of_a_chat_whole_and_streamed(shared_tools: Client, text: str, most: int | None):
    shared_tools.engine.text = text + "\x00"
    chat = shared_tools.post(CHAT, messages=USER, tools=CHAT_TOOLS, max_completion_tokens=most).json()
    body = {"input": "hi", "tools": FLAT_TOOLS, "max_output_tokens": most}
    whole = shared_tools.post(RESPONSES, **body).json()
    streamed = put_together(shared_tools.events(RESPONSES, **body))
    assert of_chat(chat) == of_response(whole) == of_response(streamed)
    assert whole["usage"] == streamed["usage"] and whole["status"] == streamed["status"]


def test_an_answer_can_be_sent_back_as_it_is(caller: Client):
    caller.engine.text = f"<think>hm</think>Wait.{CALL}\x00"
    answer = caller.post(RESPONSES, input="hi", tools=FLAT_TOOLS).json()
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call"]
    _, text, call = answer["output"]
    text["content"][0]["parsed"] = None  # openai's helpers add these
    call |= {"parsed_arguments": {"city": "Paris"}, "async": False, "async_": None}
    items = [*USER, *answer["output"], {"type": "function_call_output", "call_id": call["call_id"], "output": "9"}]
    assert caller.post(RESPONSES, input=items).status_code == 200
    assert bytes(caller.engine.prompts[-1]).decode() == 'user:hi|assistant:(hm)Wait.weather{"city": "Paris"}|tool:9|assistant:'


def test_the_thinking_is_counted_in_tokens(caller: Client):
    for text, tokens in (("<think>hm</think>Yes.", 17), ("Yes.", 0), ("<think>hm", 9)):
        caller.engine.text = text + "\x00"
        details = caller.post(RESPONSES, input="hi").json()["usage"]["output_tokens_details"]
        assert details == {"reasoning_tokens": tokens}


def test_turns_are_kept_apart(caller: Client):
    """What one answer can't have in this order is another's. One that speaks after its calls is followed by their results."""
    call = {"type": "function_call", "call_id": "1", "name": "time", "arguments": ""}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    result = {"type": "function_call_output", "call_id": "1", "output": "9"}
    first, second = ({"role": "assistant", "content": text} for text in "ab")
    items = [first, call, second, result, second, first, thought, thought, call, call]
    assert caller.post(RESPONSES, input=items).status_code == 200
    turns = ["a\nbtime{}|tool:9", "b", "a", "(hm\nhm)time{}time{}"]
    assert bytes(caller.engine.prompts[-1]).decode() == "|".join(f"assistant:{turn}" for turn in [*turns, ""])


@pytest.mark.parametrize(
    ("form", "asked"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, '{"type": "object"}'),
        ({"type": "json_schema", "name": "n", "schema": {"type": "array"}, "strict": True}, '{"type": "array"}'),
    ],
)
def test_formats_are_constraints_and_come_back(client: Client, form: dict, asked: str | None):
    answer = client.post(RESPONSES, input="x", text={"format": form}, metadata={"a": "b"}, user="u", max_output_tokens=9).json()
    assert client.engine.params[-1].constraint == (None if asked is None else ("json_schema", asked))
    assert answer["text"] == {"format": form}
    assert (answer["metadata"], answer["user"], answer["max_output_tokens"]) == ({"a": "b"}, "u", 9)


def test_messages_speak_of_the_clients_fields(client: Client):
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "array"}}
    for form, named in (({"type": "json_object"}, "text.format"), (schema, "text.format.schema")):
        error = refusal(client.post(RESPONSES, input="x", text={"format": form}, regex="a"), 400)
        assert error["message"] == f"regex can't be given together with {named}: a text follows one grammar"
    error = refusal(client.post(RESPONSES, input="x", max_output_tokens=5, min_tokens=9), 400)
    assert error["message"] == "min_tokens (9) must not be more than max_output_tokens (5)"
    error = refusal(client.post(RESPONSES, input="hi", max_output_tokens=60), 400)
    assert error["message"].startswith("input has 9 tokens and max_output_tokens asks for 60 more")


def test_words_of_the_client_are_no_names_of_fields(caller: Client):
    choice = {"type": "function", "name": "response_format"}
    error = refusal(caller.post(RESPONSES, input="x", tools=FLAT_TOOLS, tool_choice=choice), 400)
    assert error["message"] == 'tool_choice names "response_format", which is none of the tools'
    for schema, said in (
        ({"properties": {"a": {"not": {}}}}, "can't be compiled: format.elements.1.json_schema: Unimplemented"),
        ("max_completion_tokens", "must be a JSON schema, an object, got 'max_completion_tokens'"),
    ):
        error = refusal(caller.post(RESPONSES, input="x", text={"format": {"type": "json_schema", "schema": schema}}), 400)
        assert error["param"] == "text.format.schema" and error["message"].startswith(f"text.format.schema {said}")


def test_logprobs_are_those_of_a_chat(client: Client):
    chat = client.post(CHAT, messages=USER, logprobs=True, top_logprobs=2, max_completion_tokens=20).json()
    entries = chat["choices"][0]["logprobs"]["content"]
    body = {"input": "hi", "top_logprobs": 2, "max_output_tokens": 20}
    for response in (client.post(RESPONSES, **body).json(), put_together(client.events(RESPONSES, **body))):
        assert response["output"][0]["content"][0]["logprobs"] == entries
    deltas = [event for event in client.events(RESPONSES, **body) if event["type"] == "response.output_text.delta"]
    assert [entry for event in deltas for entry in event["logprobs"]] == entries
    included = client.post(RESPONSES, input="hi", include=["message.output_text.logprobs"], max_output_tokens=3).json()
    assert included["output"][0]["content"][0]["logprobs"][0]["top_logprobs"] == []
    turns = [{"role": "user", "content": "hi"}, *included["output"], {"role": "user", "content": "and?"}]
    assert client.post(RESPONSES, input=turns).status_code == 200, "an answer can be sent back"


def test_log_probabilities_need_an_answer_of_text(caller: Client):
    error = refusal(caller.post(RESPONSES, input="hi", top_logprobs=1), 400)
    assert error["param"] == "top_logprobs" and "thinking" in error["message"]


def test_thinking_that_cannot_be_turned_off(caller: Client):
    error = refusal(caller.post(RESPONSES, input="hi", reasoning={"effort": "none"}), 400)
    assert error["param"] == "reasoning.effort" and "can't turn thinking off" in error["message"]


def test_an_aborted_answer_is_incomplete(client: Client):
    client.engine.ends_with = "abort"
    answer = client.post(RESPONSES, input="hi").json()
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "abort"})


def test_what_no_response_can_repeat_is_refused(client: Client):
    nested = '{"a":' * 400 + "1" + "}" * 400
    tool = f'{{"type": "function", "name": "f", "parameters": {nested}}}'
    for field, value in {"metadata": '{"a": "\\ud800"}', "user": '"\\ud800"', "tools": f"[{tool}]"}.items():
        body = f'{{"input": "x", "tool_choice": "none", "{field}": {value}}}'
        assert refusal(client.post_text(RESPONSES, body), 400)["param"].startswith(field)


def test_an_instruction_is_a_system_message_and_nothing_is_stored(client: Client):
    answer = client.post(RESPONSES, input="hi", instructions="Be kind.", store=True, max_output_tokens=9).json()
    assert bytes(client.engine.prompts[-1]).decode() == "system: Be kind.\nuser: hi\n"
    assert (answer["store"], answer["instructions"]) == (False, "Be kind.")
    assert answer["output"][0]["content"][0]["text"] == TEXT[:9]


def test_requests_have_names(client: Client):
    client.engine.allow(0)
    with send(client, RESPONSES, {"input": "hi", "request_id": "mine", "max_output_tokens": 2}) as connection:
        wait_until(lambda: client.engine.running == 1)
        assert refusal(client.post(RESPONSES, input="hi", request_id="mine"), 400)["param"] == "request_id"
        client.engine.allow(math.inf)
        assert b'"reason":"max_output_tokens"' in receive(connection, b'"user":null')
