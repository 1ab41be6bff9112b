"""pydantic_ai_checks.py URL: pydantic-ai's kinds of output, tools and streaming, over chat completions and over responses."""

from typing import Any

from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from shared import MOST_TOKENS, QUESTION, Calls, City, run

calls = Calls()


def agent(kind: Any, url: str, model: str, output: Any, **options: Any) -> Agent:
    made = kind(model, provider=OpenAIProvider(base_url=url, api_key="none"))
    return Agent(made, output_type=output, model_settings=ModelSettings(temperature=0, max_tokens=MOST_TOKENS), **options)


async def chat(url: str, model: str) -> None:
    await outputs(OpenAIChatModel, url, model)


async def responses(url: str, model: str) -> None:
    await outputs(OpenAIResponsesModel, url, model)


async def outputs(kind: Any, url: str, model: str) -> None:
    """By a tool and by response_format, whole and streamed."""
    for output in (ToolOutput(City), NativeOutput(City)):
        made = agent(kind, url, model, output)
        whole = await made.run(QUESTION)
        assert isinstance(whole.output, City), whole
        async with made.run_stream(QUESTION) as stream:
            parts = [part async for part in stream.stream_output(debounce_by=None)]
        assert parts[-1] == whole.output, (parts, whole.output)


async def tools(url: str, model: str) -> None:
    """The model chooses between the city and a call, until it has called: then only the city is left."""
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        made = agent(kind, url, model, [calls.weather])
        assert "degrees in" in (await made.run(QUESTION)).output
        calls.check()


if __name__ == "__main__":
    run("pydantic-ai-slim", chat, responses, tools)
