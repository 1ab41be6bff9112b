"""Requests of a coroutine: their updates as an async iterator."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from jaxspec.engine.driver import EngineThread
from jaxspec.engine.request import FAILED, EngineError, GenerationRequest, RefusedRequest, RequestError, Update


class Generation:
    """The updates of requests that were started together, as an async iterator.

    It ends when every request has finished. Leaving the `with` block earlier aborts what is unfinished. If the engine
    fails on one of the requests, iterating raises EngineError and the others are aborted.
    """

    def __init__(self, engine: EngineThread, requests: Sequence[GenerationRequest], request_ids: Sequence[str], came: float):
        """`came`: when, by the engine's clock."""
        self.request_ids = tuple(request_ids)
        self._engine = engine
        self._unfinished = set(request_ids)
        self._items: asyncio.Queue[Update | EngineError] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self._ticket = engine.submit(requests, self._items.put_nowait, names=self.request_ids, loop=loop, came=came)

    @classmethod
    async def start(cls, engine: EngineThread, requests: Sequence[GenerationRequest], request_ids: Sequence[str]) -> "Generation":
        """Admits all requests, by these ids, or none. Raises RefusedRequest or QueueFull if the engine refuses one, and
        EngineClosed."""
        came, grammars = engine.clock(), []
        places = {constraint: place for place, each in enumerate(requests) if (constraint := each.params.constraint)}
        with engine.starting(request_ids):
            for constraint, place in places.items():
                compiled = asyncio.wrap_future(engine.compile(constraint))
                compiled.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, if this one is cancelled
                await asyncio.wait([compiled])  # others may wait, too: a caller that is cancelled must not cancel it
                engine.check_open()  # closing cancels it
                try:
                    grammars.append(compiled.result())  # held until the engine has the requests
                except ValueError as error:
                    raise RefusedRequest(error, place) from None
            generation = cls(engine, requests, request_ids, came)
        try:
            await asyncio.wrap_future(generation._ticket.admitted)
        except asyncio.CancelledError:
            generation.abort()
            raise
        except ValueError as error:
            raise RefusedRequest(error, len(generation._ticket.ids)) from None
        return generation

    def abort(self) -> None:
        """Aborts unfinished requests within one engine step. Undelivered updates are dropped."""
        if self._unfinished:
            self._engine.drop(self._ticket)
            self._unfinished.clear()

    def __aiter__(self) -> AsyncIterator[Update]:
        return self

    async def __anext__(self) -> Update:
        if not self._unfinished:
            raise StopAsyncIteration
        item = await self._items.get()
        if isinstance(item, EngineError):
            self.abort()
            raise item
        if item.output is not None:
            self._unfinished.discard(item.request_id)
            if item.output.finish_reason == "error":
                self.abort()
                raise RequestError(item.output.error) if item.output.is_own_fault else EngineError(FAILED)
        return item

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.abort()
