"""One conversation, and one answer, in three notations: chat completions', the Responses API's and Anthropic's."""

import json
from typing import Any, NamedTuple

from hypothesis import strategies as st

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
FUNCTIONS = [
    {"name": "weather", "description": "Tells.", "parameters": WEATHER},
    {"name": "time", "description": "Now.", "parameters": {"type": "object", "properties": {}}},
]
CHAT_TOOLS = [{"type": "function", "function": each} for each in FUNCTIONS]
FLAT_TOOLS = [{"type": "function", **each} for each in FUNCTIONS]
ANTHROPIC_TOOLS = [
    {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]} for each in FUNCTIONS
]


class Said(NamedTuple):
    """A user's turn: its texts."""

    texts: list[str]


class Answered(NamedTuple):
    """An assistant's turn, in the order of its parts."""

    thinking: str
    text: str | None
    calls: list[tuple[str, str, dict]]
    """Ids, names and arguments."""


class Results(NamedTuple):
    """What tools said, by the ids of calls."""

    results: list[tuple[str, str]]


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=8)
IDS = st.sampled_from(["call_1", "call_2"])
ANY = st.one_of(WORDS, st.integers(), st.none(), st.lists(WORDS, max_size=2))
ARGUMENTS = st.dictionaries(st.sampled_from(["city", "day"]), ANY)
CALLS = st.lists(st.tuples(IDS, st.sampled_from(["weather", "time"]), ARGUMENTS), max_size=3)
ANSWERS = st.builds(Answered, WORDS, st.none() | WORDS, CALLS).filter(lambda each: each.calls or each.text is not None)
SAID = st.builds(Said, st.lists(WORDS, min_size=1, max_size=3))
RESULTS = st.builds(Results, st.lists(st.tuples(IDS, WORDS), min_size=1, max_size=3))
CONVERSATIONS = st.lists(st.tuples(SAID | RESULTS, ANSWERS), max_size=3).flatmap(
    lambda turns: st.builds(lambda last: [*(each for pair in turns for each in pair), last], SAID | RESULTS)
)


def chat_messages(turns: list[Any]) -> list[dict]:
    found: list[dict] = []
    for turn in turns:
        match turn:
            case Said(texts):
                found.append({"role": "user", "content": [{"type": "text", "text": text} for text in texts]})
            case Answered(thinking, text, calls):
                functions = [
                    {"id": name, "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}
                    for name, tool, arguments in calls
                ]
                message = {"role": "assistant", "content": text, "tool_calls": functions or None}
                found.append(message | ({"reasoning_content": thinking} if thinking else {}))
            case Results(results):
                found += [{"role": "tool", "tool_call_id": name, "content": text} for name, text in results]
    return found


def input_items(turns: list[Any]) -> list[dict]:
    found: list[dict] = []
    for turn in turns:
        match turn:
            case Said(texts):
                found.append({"role": "user", "content": [{"type": "input_text", "text": text} for text in texts]})
            case Answered(thinking, text, calls):
                if thinking:
                    content = [{"type": "reasoning_text", "text": thinking}]
                    found.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": content})
                if text is not None:
                    content = [{"type": "output_text", "text": text, "annotations": []}]
                    found.append({"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content})
                for name, tool, arguments in calls:
                    call = {"type": "function_call", "call_id": name, "name": tool, "arguments": json.dumps(arguments)}
                    found.append(call)
            case Results(results):
                found += [{"type": "function_call_output", "call_id": name, "output": text} for name, text in results]
    return found


def anthropic_messages(turns: list[Any]) -> list[dict]:
    found: list[dict] = []
    for turn in turns:
        match turn:
            case Said(texts):
                found.append({"role": "user", "content": [{"type": "text", "text": text} for text in texts]})
            case Answered(thinking, text, calls):
                blocks: list[dict] = [{"type": "thinking", "thinking": thinking, "signature": ""}] if thinking else []
                blocks += [] if text is None else [{"type": "text", "text": text}]
                blocks += [{"type": "tool_use", "id": name, "name": tool, "input": given} for name, tool, given in calls]
                found.append({"role": "assistant", "content": blocks})
            case Results(results):
                blocks = [{"type": "tool_result", "tool_use_id": name, "content": text} for name, text in results]
                found.append({"role": "user", "content": blocks})
    return found


@st.composite
def answer_texts(draw: st.DrawFn) -> str:
    """What a model with Hermes' calls may write, and sometimes nearly so."""
    thinking, text, calls = draw(ANSWERS.filter(lambda each: not {*"<>"} & {*each.thinking}))
    pieces = [f"<think>\n{thinking}\n</think>\n\n" if thinking else "", text or ""]
    for _, tool, arguments in calls:
        pieces.append(f'<tool_call>\n{{"name": "{tool}", "arguments": {json.dumps(arguments)}}}\n</tool_call>{draw(WORDS)}')
    return "".join(pieces)


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TWO_CALLS = """<think>hm</think>Wait.
<tool_call>
{"name": "weather", "arguments": {"city": "Paris"}}
</tool_call>
<tool_call>
{"name": "time", "arguments": {}}
</tool_call> So."""


class Outcome(NamedTuple):
    """What every notation must tell of an answer."""

    thinking: str
    text: str
    calls: list[tuple[str, str]]
    """Names, and arguments as text."""
    is_complete: bool
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int


def of_chat(answer: dict) -> Outcome:
    [choice] = answer["choices"]
    message, usage = choice["message"], answer["usage"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return Outcome(
        message.get("reasoning_content", ""),
        message["content"] or "",
        calls,
        choice["finish_reason"] != "length",
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["completion_tokens"],
    )
