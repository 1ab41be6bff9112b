"""The engine behind asyncio: one thread steps it, any number of coroutines wait for what it produces.

The engine is not thread safe, so its thread is the only one that touches it. Coroutines hand it commands through a
queue that is emptied between two steps; updates go back through each event loop's own queue. Neither side ever waits
for the other: a client that reads slowly lets its own queue grow, to at most max_tokens entries.
"""

import asyncio
import logging
import threading
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxspec.config import SpecConfig
from jaxspec.engine.interfaces import Observer, StepEngine
from jaxspec.engine.pages import IntegrityError
from jaxspec.engine.request import FAILED, Update
from jaxspec.engine.scheduler import QueueFull
from jaxspec.engine.stats import EngineStats
from jaxspec.sampling_params import SamplingParams

MAX_FAILED_STEPS = 3
"""After this many failed steps in a row the engine counts as unhealthy; it goes on trying."""
BROKEN = "the engine has failed and takes no more requests: the server must be started again"

logger = logging.getLogger(__name__)


class EngineError(RuntimeError):
    """The engine failed while it worked on a request; the request itself was not at fault."""


class EngineClosed(EngineError):
    """The engine takes no more requests, and has given up those it had."""

    def __init__(self, message: str = "the server is shutting down"):
        super().__init__(message)


class AsyncRequest(NamedTuple):
    """One prompt on its way to the engine."""

    id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    """With n = 1: see SamplingParams.copies."""
    priority: int = 0
    """Larger is more urgent."""
    timeout: float | None = None
    """Seconds after which it ends with finish_reason "timeout". None: never."""
    tree: SpecConfig | None = None
    wants_trees: bool = False
    """The last four as in Engine.add."""


class Generation:
    """What the engine produces for requests that were started together: an async iterator of their updates, as they come.

    It ends when every request has finished. Leaving the `with` block earlier aborts what is unfinished. A request that the
    engine fails on raises EngineError and ends the others of the generation.
    """

    def __init__(self, request_ids: Sequence[str], abort: Callable[["Generation", Sequence[str]], object]):
        self.request_ids = tuple(request_ids)
        self.loop = asyncio.get_running_loop()
        self._abort = abort
        self._unfinished = set(request_ids)
        self._items: asyncio.Queue[Update | EngineError] = asyncio.Queue()

    def put(self, item: Update | EngineError) -> None:
        """Hands over the next item; in the event loop's thread only."""
        self._items.put_nowait(item)

    def abort(self) -> None:
        """Stops what is unfinished, within one engine step; the updates of it that are on their way are dropped."""
        if self._unfinished:
            self._abort(self, tuple(self._unfinished))
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
        return item

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.abort()


@dataclass(frozen=True)
class _Start:
    """Command: take these requests in, all or none, and tell the waiting coroutine how that went."""

    requests: Sequence[AsyncRequest]
    generation: Generation
    admitted: asyncio.Future


@dataclass(frozen=True)
class _Abort:
    """Command: forget these requests, as far as they were admitted for this generation."""

    generation: Generation
    request_ids: Sequence[str]


@dataclass(frozen=True)
class _End:
    """Command: end these requests (None: all) with what they have so far, and tell the waiting coroutine how many there were."""

    request_ids: Sequence[str] | None
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future


@dataclass(frozen=True)
class _Flush:
    """Command: forget the cached prefixes, and tell the waiting coroutine when that is done."""

    loop: asyncio.AbstractEventLoop
    done: asyncio.Future


type _Command = _Start | _Abort | _End | _Flush


class AsyncEngine:
    """Runs engine.step() in a thread of its own for as long as there is work.

    What fails on the device ends the requests concerned (Engine.step says which) and the thread goes on. An exception out of
    the engine ends everything: no result of it can be trusted any more.
    """

    def __init__(self, engine: StepEngine, observers: Sequence[Observer] = ()):
        self._engine, self._observers = engine, observers
        self._stats = engine.stats()
        self._condition = threading.Condition()  # guards _commands and _closing
        self._commands: deque[_Command] = deque()
        self._obeying: deque[_Command] = deque()  # taken from _commands; used by the thread only
        self._closing = self._broken = False
        self._generations: dict[str, Generation] = {}  # by request id; used by the thread only
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def is_healthy(self) -> bool:
        """False when the thread has ended or the last MAX_FAILED_STEPS steps all failed."""
        return self._thread.is_alive() and not self._closing and self._stats.failed_steps < MAX_FAILED_STEPS

    @property
    def stats(self) -> EngineStats:
        """What the engine counted up to its last step or command."""
        return self._stats

    async def start(self, requests: Sequence[AsyncRequest]) -> Generation:
        """Takes requests in, all of them or none. Raises the engine's ValueError or QueueFull for one that it refuses."""
        generation = Generation([request.id for request in requests], lambda owner, ids: self._post(_Abort(owner, ids)))
        admitted = generation.loop.create_future()
        if not self._post(_Start(requests, generation, admitted)):
            raise self._closed()
        try:
            await admitted
        except asyncio.CancelledError:
            generation.abort()
            raise
        return generation

    async def stream(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, request_id: str | None = None
    ) -> AsyncIterator[Update]:
        """The updates of one request. Closing the iterator early, or cancelling its task, aborts the request."""
        with await self.start([AsyncRequest(request_id or uuid.uuid4().hex, prompt_token_ids, params)]) as generation:
            async for update in generation:
                yield update

    async def flush_cache(self) -> None:
        """Forgets every cached prefix; running requests are not touched."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        if not self._post(_Flush(loop, done)):
            raise self._closed()
        await done

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """Ends requests, all of them by default: whoever waits for one gets what it has, with finish_reason "abort". Returns how
        many there were; ids that are not there don't count."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        if not self._post(_End(request_ids, loop, done)):
            raise self._closed()
        return await done

    def stop(self) -> None:
        """Ends the thread after its current step, without waiting; whoever still waits for updates gets an EngineError."""
        with self._condition:
            self._closing = True
            self._condition.notify()

    def close(self) -> None:
        """Ends the thread and waits until it has ended. May be called twice."""
        self.stop()
        self._thread.join()

    def _closed(self) -> EngineClosed:
        return EngineClosed(BROKEN) if self._broken else EngineClosed()

    def _post(self, command: _Command) -> bool:
        """Queues a command for the thread; False if it takes no more."""
        with self._condition:
            if self._closing:
                return False
            self._commands.append(command)
            self._condition.notify()
            return True

    # What follows runs in the engine's thread.

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception:
            self._broken = True
            logger.exception("the engine can't be trusted any more: it ends, and its %d requests too", len(self._generations))
        finally:  # nobody may wait for ever
            with self._condition:
                self._closing = True
            for command in (*self._obeying, *self._commands):
                if isinstance(command, _Start):
                    _call_in_loop(command.generation.loop, _settle, command.admitted, self._closed())
                elif isinstance(command, (_Flush, _End)):
                    _call_in_loop(command.loop, _settle, command.done, self._closed())
            self._end_all()

    def _turn(self) -> bool:
        """Commands, then a step; waits if there is neither. False once the thread shall end."""
        with self._condition:
            while not (self._commands or self._closing or self._should_step):
                self._condition.wait()
            if self._closing:
                return False
            self._obeying, self._commands = self._commands, deque()
        if self._obeying:
            while self._obeying:
                self._obey(self._obeying[0])
                self._obeying.popleft()
            self._stats = self._engine.stats()
        if self._should_step:
            self._step()
        return True

    @property
    def _should_step(self) -> bool:
        """Also without requests: what was launched for them may still have to be read."""
        return bool(self._generations) or self._engine.has_work

    def _obey(self, command: _Command) -> None:
        if isinstance(command, _Start):
            refusal = self._take_in(command.requests)
            if refusal is None:
                self._generations.update((request.id, command.generation) for request in command.requests)
            _call_in_loop(command.generation.loop, _settle, command.admitted, refusal)
        elif isinstance(command, _Abort):
            self._forget(name for name in command.request_ids if self._generations.get(name) is command.generation)
        elif isinstance(command, _End):
            names = list(self._generations) if command.request_ids is None else command.request_ids
            ended = [update for name in names if name in self._generations and (update := self._engine.abort(name)) is not None]
            self._deliver(ended)
            _call_in_loop(command.loop, _settle, command.done, None, len(ended))
        else:
            self._engine.flush_cache()
            _call_in_loop(command.loop, _settle, command.done, None)

    def _take_in(self, requests: Sequence[AsyncRequest]) -> Exception | None:
        """All or none: why not, if none."""
        taken: list[str] = []
        try:
            for request in requests:
                if request.id in self._generations or request.id in taken:
                    raise ValueError(f"request_id {request.id!r} is in use")
                self._engine.add(
                    request.prompt_token_ids,
                    request.params,
                    request.id,
                    priority=request.priority,
                    timeout=request.timeout,
                    tree=request.tree,
                    wants_trees=request.wants_trees,
                )
                taken.append(request.id)
        except IntegrityError:
            raise
        except Exception as error:
            self._forget(taken)
            if isinstance(error, (ValueError, QueueFull)):
                return error
            logger.exception("the engine failed to take a request in")
            return EngineError("the engine failed to take the request in")
        return None

    def _step(self) -> None:
        updates = self._engine.step()
        self._stats = self._engine.stats()
        self._deliver(updates)
        for observer in self._observers:
            observer.after_step(self._stats, not self._engine.has_work)

    def _deliver(self, updates: Iterable[Update]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Generation, Update | EngineError]]] = {}
        for update in updates:
            self._observe_end(update)
            generation = self._generations.get(update.request_id)
            if generation is None:  # aborted while the step that made this update was in flight
                continue
            if update.output is not None:
                del self._generations[update.request_id]
            failed = update.output is not None and update.output.finish_reason == "error"
            by_loop.setdefault(generation.loop, []).append((generation, EngineError(FAILED) if failed else update))
        for loop, items in by_loop.items():  # one wake-up per event loop and step, however many requests run
            if not _call_in_loop(loop, _put_all, items):
                self._forget([request_id for request_id, generation in self._generations.items() if generation.loop is loop])

    def _forget(self, request_ids: Iterable[str]) -> None:
        """Aborts requests in the engine; ids that it no longer knows are fine."""
        for request_id in request_ids:
            self._generations.pop(request_id, None)
            self._observe_end(self._engine.abort(request_id))

    def _observe_end(self, update: Update | None) -> None:
        if update is not None and update.output is not None:
            for observer in self._observers:
                observer.finished(update.output)

    def _end_all(self) -> None:
        """Whoever waits gets an error. An engine that is broken is not touched any more."""
        for generation in set(self._generations.values()):
            _call_in_loop(generation.loop, generation.put, EngineError(FAILED) if self._broken else EngineClosed())
        if not self._broken:
            self._forget(list(self._generations))


def _put_all(items: Sequence[tuple[Generation, Update | EngineError]]) -> None:
    for generation, item in items:
        generation.put(item)


def _settle(done: asyncio.Future, refusal: Exception | None, result: int | None = None) -> None:
    if done.done():  # its coroutine was cancelled
        return
    if refusal is None:
        done.set_result(result)
    else:
        done.set_exception(refusal)


def _call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> bool:
    """Runs the function in the event loop's thread, soon; False if that loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        return False
    return True
