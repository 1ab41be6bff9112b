"""anthropic_checks.py URL: what anthropic's own client must get from a server whose model thinks "hm", says "Wait." and calls
weather(city="Paris"). Prints one JSON object: the version, and what all ways agree on. Runs where anthropic is installed."""

import asyncio
import json
import sys
from typing import Any

import anthropic

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
TOOL = {"name": "weather", "description": "Tells.", "input_schema": SCHEMA}


@anthropic.beta_tool
def weather(city: str) -> str:
    """Tells."""
    return f"9 degrees in {city}"


def summary(message: Any) -> dict[str, Any]:
    """What an answer tells, without its ids."""
    thought, text, call = message.content
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "tool_use", None), message
    return {
        "types": [block.type for block in message.content],
        "thinking": thought.thinking,
        "text": text.text,
        "call": [call.name, call.input],
        "usage": [message.usage.input_tokens, message.usage.output_tokens],
    }


def ask_in_all_ways(url: str) -> list[dict[str, Any]]:
    """Whole and streamed, by the blocking client and the asynchronous one."""
    question = {"role": "user", "content": "hi"}
    body: dict[str, Any] = {"model": "fake", "messages": [question], "system": "Be kind.", "tools": [TOOL], "max_tokens": 500}
    options = {"base_url": url, "api_key": "none", "max_retries": 0}
    with anthropic.Anthropic(**options) as client:
        whole = client.messages.create(**body)
        events = [event.type for event in client.messages.create(stream=True, **body)]
        assert (events[0], events[-2:]) == ("message_start", ["message_delta", "message_stop"]), events
        with client.messages.stream(**body) as stream:
            assert "".join(stream.text_stream) == "Wait."
            final = stream.get_final_message()
        counted = client.messages.count_tokens(**{name: value for name, value in body.items() if name != "max_tokens"})
        assert counted.input_tokens == whole.usage.input_tokens, (counted, whole.usage)
        result = {"type": "tool_result", "tool_use_id": whole.content[-1].id, "content": "9 degrees"}
        turns = [question, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
        again = client.messages.create(**body | {"messages": turns, "tool_choice": {"type": "any"}})
        assert again.usage.input_tokens > whole.usage.input_tokens
        for stream in (False, True):  # the runner asks for a thread first, and must learn that it has to do without
            asked = body | {"tools": [weather], "stream": stream, "max_iterations": 2}
            ran = [each.get_final_message() if stream else each for each in client.beta.messages.tool_runner(**asked)]
            assert [each.stop_reason for each in ran] == ["tool_use"] * 2, ran
            assert ran[0].usage.input_tokens < ran[1].usage.input_tokens, "the second request has the first one's call"
        for wrong, said in (
            ({"max_tokens": 0}, "max_tokens"),
            ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
        ):
            try:
                client.messages.create(**body | wrong)
            except anthropic.BadRequestError as error:
                assert error.body["error"]["type"] == "invalid_request_error" and said in error.message, error
            else:
                raise AssertionError(f"{wrong} was taken")
    return [summary(each) for each in (whole, final, asyncio.run(asynchronous(options, body)))]


async def asynchronous(options: dict[str, Any], body: dict[str, Any]) -> Any:
    async with anthropic.AsyncAnthropic(**options) as client, client.messages.stream(**body) as stream:
        return await stream.get_final_message()


if __name__ == "__main__":
    first, *others = ask_in_all_ways(sys.argv[1])
    assert all(other == first for other in others), (first, others)
    print(json.dumps({"version": anthropic.__version__, "answer": first}))
