"""From a request's batch to its response, whole or as server-sent events, also if the client hangs up."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, ClassVar

from anyio import CancelScope
from anyio.lowlevel import checkpoint_if_cancelled
from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel
from starlette.types import Send

from jaxspec.engine.generation import Generation
from jaxspec.engine.request import EngineError, GenerationOutput, Update
from jaxspec.server.errors import ApiError, ClientDisconnected, from_engine
from jaxspec.server.running import RequestBatch, RunningRequests, check_in_time, collect, start, without_output
from jaxspec.server.sending import TypedEvent, json_response, to_json

logger = logging.getLogger(__name__)


class ResponseBuilder(ABC):
    """Builds the response to one HTTP request, whole or as the events of a stream."""

    stream_end: ClassVar[str] = "data: [DONE]\n\n"
    """What comes after the last event."""

    @abstractmethod
    def whole(self, outputs: Sequence[GenerationOutput]) -> BaseModel | Sequence[BaseModel]:
        """The response in one piece."""

    @abstractmethod
    def events(self, index: int, update: Update) -> Sequence[BaseModel]:
        """The events for an update of completion `index`."""

    def last_events(self) -> Sequence[BaseModel]:
        """The events after the last update."""
        return ()

    def failure(self, error: ApiError) -> BaseModel:
        """The event that tells of a failure, after which nothing comes."""
        return error.report


def encode(event: BaseModel) -> str:
    """One server-sent event."""
    kind = f"event: {event.type}\n" if isinstance(event, TypedEvent) else ""
    return f"{kind}data: {to_json(event)}\n\n"


class EventStream(StreamingResponse):
    """Server-sent events. However the response ends, requests that are still running are aborted."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, builder: ResponseBuilder):
        self._generation, self._builder = generation, builder
        self._index_of = {request_id: index for index, request_id in enumerate(generation.request_ids)}
        self._first: Sequence[BaseModel] = ()
        super().__init__(self._lines(), headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    @classmethod
    async def open(cls, generation: Generation, builder: ResponseBuilder) -> "EventStream":
        """Waits for the first events, so that a failure before them still gets a status of its own."""
        stream = cls(generation, builder)
        try:
            while not stream._first:
                stream._first = stream._events(await anext(generation))
        except BaseException:  # cancellation too
            generation.abort()
            raise
        return stream

    async def stream_response(self, send: Send) -> None:
        with self._generation:
            await super().stream_response(send)

    def _events(self, update: Update) -> Sequence[BaseModel]:
        if update.output is not None:
            check_in_time(update.output)
        return self._builder.events(self._index_of[update.request_id], update)

    async def _lines(self) -> AsyncGenerator[str]:
        """The events as lines. A failure becomes an event too, because the status was sent before."""
        try:
            for event in self._first:
                yield encode(event)
            async for update in self._generation:
                for event in self._events(update):
                    yield encode(event)
            for event in self._builder.last_events():
                yield encode(event)
        except Exception as error:
            if not isinstance(error, (ApiError, EngineError)):
                logger.exception("a stream failed")
            yield encode(self._builder.failure(from_engine(error)))
        if self._builder.stream_end:
            yield self._builder.stream_end


async def respond(
    running: RunningRequests,
    request: Request,
    prepare: Callable[[], RequestBatch],
    build: Callable[[RequestBatch], ResponseBuilder],
    *,
    stream: bool | None,
) -> Response:
    """Serves a request that generates: prepare it (tokenize, in a thread), start it, build the response."""

    async def work() -> Response:
        batch = await request.state.run(prepare)
        await checkpoint_if_cancelled()  # meanwhile the client may have hung up
        builder = build(batch)
        generation = await start(running, request, batch)
        if stream:
            return await EventStream.open(generation, builder)
        outputs = await collect(generation)
        if batch.prompt_only:
            outputs = [without_output(output) for output in outputs]
        return await run_in_threadpool(lambda: json_response(builder.whole(outputs)))

    return await unless_disconnected(request, work())


async def unless_disconnected[T](request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, which is cancelled as soon as the client hangs up. Threads can't be cancelled: they are waited for. A
    request keeps its turn and its share of the memory as long as its thread works."""
    disconnect = asyncio.ensure_future(_disconnect(request))
    try:
        with CancelScope() as scope:  # Task.cancel would not wait for threads
            disconnect.add_done_callback(lambda _: scope.cancel())
            return await work
        raise ClientDisconnected
    finally:
        disconnect.cancel()
        await asyncio.gather(disconnect, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    """Returns when the client has hung up. The body was read before, so nothing else can arrive."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
