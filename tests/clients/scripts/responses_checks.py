"""responses_checks.py URL: what openai-python, whatever its major, must get of the Responses API from a server whose model thinks
"hm", says "Wait." and calls weather(city="Paris"). Prints one JSON object: the version, and what all ways agree on. Runs where
openai is installed."""

import asyncio
import json
import sys
from typing import Any

import openai

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
TOOL = {"type": "function", "name": "weather", "description": "Tells.", "parameters": PARAMETERS, "strict": True}


def summary(response: Any) -> dict[str, Any]:
    """What an answer tells, without its ids."""
    thought, _, call = response.output
    assert response.status == "completed" and response.store is False, response
    return {
        "types": [item.type for item in response.output],
        "thinking": thought.content[0].text,
        "text": response.output_text,
        "call": [call.name, json.loads(call.arguments)],
        "usage": [response.usage.input_tokens, response.usage.output_tokens, response.usage.output_tokens_details.reasoning_tokens],
    }


def ask_in_all_ways(url: str) -> list[dict[str, Any]]:
    """Whole and streamed, by the blocking client and the asynchronous one."""
    body: dict[str, Any] = {"model": "fake", "input": "hi", "instructions": "Be kind.", "tools": [TOOL], "max_output_tokens": 500}
    options = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    with openai.OpenAI(**options) as client:
        whole = client.responses.create(**body)
        events = list(client.responses.create(stream=True, **body))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Wait."
        with client.responses.stream(**body) as stream:
            helped = [event.type for event in stream]
            final = stream.get_final_response()
        assert helped[-1] == "response.completed" and "response.function_call_arguments.delta" in helped, helped
        for items in (whole.output, final.output, [item.to_dict() for item in final.output], [dict(item) for item in final.output]):
            result = {"type": "function_call_output", "call_id": dict(items[-1])["call_id"], "output": "9 degrees"}
            again = client.responses.create(**body | {"input": [{"role": "user", "content": "hi"}, *items, result]})
            assert again.usage.input_tokens > whole.usage.input_tokens
        try:
            client.responses.create(previous_response_id=whole.id, **body)
        except openai.BadRequestError as error:
            assert error.param == "previous_response_id" and "not supported" in error.message, error
        else:
            raise AssertionError("nothing is stored")
    return [summary(each) for each in (whole, events[-1].response, final, asyncio.run(asynchronous(options, body)))]


async def asynchronous(options: dict[str, Any], body: dict[str, Any]) -> Any:
    async with openai.AsyncOpenAI(**options) as client, client.responses.stream(**body) as stream:
        return await stream.get_final_response()


if __name__ == "__main__":
    first, *others = ask_in_all_ways(sys.argv[1])
    assert all(other == first for other in others), (first, others)
    print(json.dumps({"version": openai.__version__, "answer": first}))
