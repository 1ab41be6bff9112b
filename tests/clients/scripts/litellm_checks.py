"""litellm_checks.py URL: litellm's completions and responses, with tools and schemas, whole and streamed."""

import json
from typing import Any

import litellm
from shared import MOST_TOKENS, QUESTION, City, run

PLACE = {"type": "string", "enum": ["Paris", "Rome"]}
SCHEMA = {"type": "object", "properties": {"city": PLACE}, "required": ["city"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells.", "parameters": SCHEMA, "strict": True}}
MESSAGES = [{"role": "user", "content": QUESTION}]
PROVIDERS = ("openai", "hosted_vllm")


def asked(provider: str, url: str, model: str, **more: Any) -> dict[str, Any]:
    body = {"model": f"{provider}/{model}", "messages": MESSAGES, "max_tokens": MOST_TOKENS, "temperature": 0}
    return body | {"api_base": url, "api_key": "none", "num_retries": 0, **more}


def schemas(url: str, model: str) -> None:
    for provider in PROVIDERS:
        body = asked(provider, url, model, response_format=City)
        whole = litellm.completion(**body).choices[0].message.content
        City.model_validate_json(whole)
        streamed = [part.choices[0].delta.content or "" for part in litellm.completion(stream=True, **body)]
        assert "".join(streamed) == whole and len(streamed) > 2, (streamed, whole)


def tools(url: str, model: str) -> None:
    """A call, and its result in the next request. (To hosted_vllm it sends schemas without additionalProperties.)"""
    body = asked("openai", url, model, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    answer = litellm.completion(**body)
    [call] = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls" and set(json.loads(call.function.arguments)) == {"city"}, answer
    parts = [*litellm.completion(stream=True, **body)]
    rebuilt = litellm.stream_chunk_builder(parts, messages=MESSAGES).choices[0].message.tool_calls[0]
    assert rebuilt.function.arguments == call.function.arguments, (rebuilt, call)
    result = {"role": "tool", "tool_call_id": call.id, "content": "9 degrees"}
    again = litellm.completion(**body | {"messages": [*MESSAGES, answer.choices[0].message, result], "tool_choice": "none"})
    assert again.choices[0].message.content and not again.choices[0].message.tool_calls, again


def responses(url: str, model: str) -> None:
    body = {"model": f"openai/{model}", "api_base": url, "api_key": "none", "input": QUESTION, "text_format": City}
    answer = litellm.responses(max_output_tokens=MOST_TOKENS, temperature=0, **body)
    City.model_validate_json(answer.output[-1].content[0].text)
    kinds = [event.type for event in litellm.responses(max_output_tokens=MOST_TOKENS, temperature=0, stream=True, **body)]
    assert kinds[-1] == "response.completed" and "response.output_text.delta" in kinds, kinds


if __name__ == "__main__":
    run("litellm", schemas, tools, responses)
