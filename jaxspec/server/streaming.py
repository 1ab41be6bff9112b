"""From a running generation to an HTTP response: server-sent events, or one answer, and what happens if the client hangs up."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Send

from jaxspec.engine.async_engine import EngineError, Generation
from jaxspec.server.errors import ApiError, ClientDisconnected, from_engine

logger = logging.getLogger(__name__)

Event = dict[str, Any]


class EventStream(StreamingResponse):
    """Server-sent events. However the response ends, what is unfinished of the generation is aborted."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, first: Event, rest: AsyncIterator[Event]):
        super().__init__(encode_events(first, rest), headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._generation = generation

    @classmethod
    async def open(cls, generation: Generation, events: AsyncIterator[Event]) -> "EventStream":
        """Waits for the first event, so that whatever fails before it still gets a status of its own."""
        try:
            return cls(generation, await anext(events), events)
        except BaseException:  # cancellation too
            generation.abort()
            raise

    async def stream_response(self, send: Send) -> None:
        with self._generation:
            await super().stream_response(send)


async def encode_events(first: Event, rest: AsyncIterator[Event]) -> AsyncGenerator[str]:
    """The events as `data:` lines. A failure becomes an event too: the status line is long gone."""
    yield encode(first)
    try:
        async for event in rest:
            yield encode(event)
    except Exception as error:
        if not isinstance(error, (ApiError, EngineError)):
            logger.exception("a stream failed")
        yield encode(from_engine(error).body)
    yield "data: [DONE]\n\n"


def encode(event: Event) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def unless_disconnected[T](request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, which is cancelled at once when the client hangs up."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        for each in (task, disconnect):
            each.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    """Returns when the client has hung up. The body was read before: there is nothing else to receive."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
