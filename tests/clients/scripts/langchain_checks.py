"""langchain_checks.py URL: langchain-openai's structured output, tools, and LangChain's agent."""

from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict
from shared import MOST_TOKENS, QUESTION, Calls, City, Place, run

calls = Calls()


class Where(BaseModel):
    """What the tool takes, and no more."""

    model_config = ConfigDict(extra="forbid")
    city: Place


WEATHER = tool("weather", description="The weather of a city", args_schema=Where)(calls.weather)


def chat(url: str, model: str, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=url, api_key="none", model=model, temperature=0, max_tokens=MOST_TOKENS, max_retries=0, **options)


def structured(url: str, model: str) -> None:
    """In chat completions and in responses."""
    for options in ({}, {"use_responses_api": True}):
        made = chat(url, model, **options)
        for method in ("json_schema", "function_calling"):
            for strict in (None, True):
                asked = made.with_structured_output(City, method=method, strict=strict)
                whole = asked.invoke(QUESTION)
                assert isinstance(whole, City), (method, whole)
                *_, last = asked.stream(QUESTION)
                assert last == whole, (method, last, whole)


def tools(url: str, model: str) -> None:
    """Whole, and put together from chunks."""
    asked = chat(url, model).bind_tools([WEATHER], tool_choice="any", parallel_tool_calls=False, strict=True)
    whole, chunks = asked.invoke(QUESTION), [*asked.stream(QUESTION)]
    joined = sum(chunks[1:], chunks[0])
    [call], [streamed] = whole.tool_calls, joined.tool_calls
    assert (call["name"], call["args"]) == (streamed["name"], streamed["args"]) and call["name"] == "weather", (call, streamed)


@wrap_model_call
def call_first(request: Any, handler: Any) -> Any:
    """The model must call once, and can't again: this one would."""
    is_first = request.messages[-1].type == "human"
    return handler(request.override(**{"tool_choice": "any"} if is_first else {"tools": []}))


def agents(url: str, model: str) -> None:
    """A call, its result, a city: by response_format, and by one more tool."""
    one = chat(url, model, model_kwargs={"parallel_tool_calls": False})
    made = create_agent(one, [WEATHER], middleware=[call_first], response_format=ProviderStrategy(City))
    answer = made.invoke({"messages": [("user", QUESTION)]}, {"recursion_limit": 12})
    assert isinstance(answer["structured_response"], City), answer
    calls.check()
    made = create_agent(one, [], response_format=ToolStrategy(City))
    assert isinstance(made.invoke({"messages": [("user", QUESTION)]})["structured_response"], City)


if __name__ == "__main__":
    run("langchain langchain-openai langgraph", structured, tools, agents)
