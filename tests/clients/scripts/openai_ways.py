"""openai-python's four ways to ask (sync or async, whole or as a stream) as one function. Runs where openai is installed."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import openai

SYNC, SYNC_STREAM, ASYNC, ASYNC_STREAM = WAYS = ("sync", "sync stream", "async", "async stream")
COMPLETIONS, CHAT = KINDS = ("completions", "chat")
TIMEOUT = 300.0
"""Seconds. Generous: the machine may be busy."""


@dataclass
class Answer:
    """What all ways must agree on; lists have an entry per choice."""

    texts: list[str]
    reasons: list[str | None]
    token_ids: list[list[int]]
    """Empty unless return_token_ids was asked for."""
    usage: tuple[int, int, int]
    """Tokens of prompt, completion, and together."""
    metrics: dict[str, Any] | None
    """vLLM's extra field, which openai-python keeps in model_extra."""


class Client:
    """A client of each kind, and one event loop for the asynchronous one."""

    def __init__(self, url: str):
        options = dict(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT)
        self.url = url
        self.blocking = openai.OpenAI(**options)
        self.asynchronous = openai.AsyncOpenAI(**options)
        self.runner = asyncio.Runner()
        [model] = self.blocking.models.list().data
        self.model = model.id

    def ask(self, way: str, kind: str, **body: Any) -> Answer:
        """Asks for the tokens' ids too."""
        body = {"model": self.model, **body}
        body["extra_body"] = {"return_token_ids": True, **body.get("extra_body", {})}
        if way in (SYNC_STREAM, ASYNC_STREAM):
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        client = self.blocking if way in (SYNC, SYNC_STREAM) else self.asynchronous
        create = client.completions.create if kind == COMPLETIONS else client.chat.completions.create
        if way == SYNC:
            return from_whole(kind, create(**body))
        if way == SYNC_STREAM:
            return from_chunks(kind, list(create(**body)))
        return self.runner.run(ask_async(create, way, kind, body))

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.blocking.close()
        self.runner.run(self.asynchronous.close())
        self.runner.close()


async def ask_async(create: Any, way: str, kind: str, body: dict[str, Any]) -> Answer:
    answer = await create(**body)
    return from_whole(kind, answer) if way == ASYNC else from_chunks(kind, [chunk async for chunk in answer])


def from_whole(kind: str, answer: Any) -> Answer:
    """Checks what every answer has."""
    assert [choice.index for choice in answer.choices] == list(range(len(answer.choices))), answer
    texts = [choice.text if kind == COMPLETIONS else choice.message.content for choice in answer.choices]
    assert kind == COMPLETIONS or all(choice.message.role == "assistant" for choice in answer.choices), answer
    assert answer.object == ("text_completion" if kind == COMPLETIONS else "chat.completion")
    reasons = [choice.finish_reason for choice in answer.choices]
    token_ids = [choice.model_extra["token_ids"] for choice in answer.choices]
    return Answer(texts, reasons, token_ids, counts(answer.usage), answer.model_extra.get("metrics"))


def from_chunks(kind: str, chunks: Sequence[Any]) -> Answer:
    """Puts a stream together, and checks what every stream has."""
    *pieces, last = chunks
    assert last.choices == [] and last.usage is not None, last
    assert all(len(piece.choices) == 1 and piece.usage is None for piece in pieces), pieces
    assert len({chunk.id for chunk in chunks}) == 1
    choices = 1 + max(piece.choices[0].index for piece in pieces)
    answer = Answer(
        [""] * choices, [None] * choices, [[] for _ in range(choices)], counts(last.usage), last.model_extra.get("metrics")
    )
    roles: list[list[str]] = [[] for _ in range(choices)]
    for piece in pieces:
        [choice] = piece.choices
        assert answer.reasons[choice.index] is None, "a choice went on after its finish_reason"
        answer.reasons[choice.index] = choice.finish_reason
        answer.token_ids[choice.index] += choice.model_extra.get("token_ids", [])
        if kind == CHAT and choice.delta.role:
            roles[choice.index].append(choice.delta.role)
        text = choice.text if kind == COMPLETIONS else choice.delta.content
        answer.texts[choice.index] += text or ""
    assert kind == COMPLETIONS or all(said == ["assistant"] for said in roles), roles
    return answer


def counts(usage: Any) -> tuple[int, int, int]:
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens
