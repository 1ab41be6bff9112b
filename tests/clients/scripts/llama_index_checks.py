"""llama_index_checks.py URL: LlamaIndex's structured prediction and its agent, over OpenAILike."""

from typing import Any

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from shared import MOST_TOKENS, QUESTION, Calls, City, run

calls, PROMPT = Calls(), PromptTemplate(QUESTION)


def chat(url: str, model: str, **options: Any) -> OpenAILike:
    known = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 1024, "max_retries": 0}
    return OpenAILike(model=model, api_base=url, api_key="none", temperature=0, max_tokens=MOST_TOKENS, **known, **options)


def predictions(url: str, model: str) -> None:
    """By a tool, and by response_format."""
    for options in ({}, {"should_use_structured_outputs": True}):
        made = chat(url, model, **options)
        whole = made.structured_predict(City, PROMPT)
        assert isinstance(whole, City), whole
        if options:  # in streams it does not look at calls
            *_, last = made.stream_structured_predict(City, PROMPT)
            assert last.model_dump() == whole.model_dump(), (last, whole)


async def agents(url: str, model: str) -> None:
    """It must call first, and may do as it likes then."""
    for streaming in (True, False):
        tools = [FunctionTool.from_defaults(calls.weather)]
        made = FunctionAgent(tools=tools, llm=chat(url, model), initial_tool_choice="weather", streaming=streaming)
        answer = await made.run(QUESTION, max_iterations=4)
        assert str(answer), answer
        calls.check()


if __name__ == "__main__":
    run("llama-index-core llama-index-llms-openai-like", predictions, agents)
