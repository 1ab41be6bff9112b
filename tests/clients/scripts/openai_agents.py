"""openai_agents.py URL: OpenAI's agents SDK, over chat completions and over responses."""

from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from shared import MOST_TOKENS, QUESTION, Calls, City, run

calls = Calls()


def agent(kind: Any, url: str, model: str, **options: Any) -> Agent:
    """It must call first; the SDK then lets it choose."""
    set_tracing_disabled(disabled=True)
    made = kind(model=model, openai_client=AsyncOpenAI(base_url=url, api_key="none", max_retries=0))
    settings = ModelSettings(temperature=0, max_tokens=MOST_TOKENS, tool_choice="required", parallel_tool_calls=False)
    tools = [function_tool(calls.weather, is_enabled=lambda *_: not calls.places)]  # or this model calls again
    return Agent("guide", instructions="Be kind.", model=made, model_settings=settings, tools=tools, output_type=City, **options)


async def chat(url: str, model: str) -> None:
    await loops(agent(OpenAIChatCompletionsModel, url, model))


async def responses(url: str, model: str) -> None:
    await loops(agent(OpenAIResponsesModel, url, model))


async def loops(made: Agent) -> None:
    """Whole and streamed: a call, its result, a city."""
    whole = await Runner.run(made, QUESTION, max_turns=4)
    assert isinstance(whole.final_output, City), whole
    calls.check()
    streamed = Runner.run_streamed(made, QUESTION, max_turns=4)
    kinds = [event.data.type async for event in streamed.stream_events() if event.type == "raw_response_event"]
    assert streamed.final_output == whole.final_output, (streamed, whole)
    assert kinds.count("response.completed") == len(streamed.raw_responses) >= 2, kinds
    assert "response.function_call_arguments.delta" in kinds and "response.output_text.delta" in kinds, kinds
    calls.check()


if __name__ == "__main__":
    run("openai-agents", chat, responses)
