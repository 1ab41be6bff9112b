"""The engine behind asyncio: one thread steps it, coroutines wait for updates.

The engine is not thread safe, so its thread is the only one that touches it. Coroutines hand it commands through a
queue that it empties between two steps; updates go back through a queue per generation. Neither side waits for the other:
a slow reader only lets its own queue grow, to at most max_tokens entries.
"""

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from jaxspec.config import TreeLike
from jaxspec.engine.pages import IntegrityError
from jaxspec.engine.request import FAILED, GenerationOutput, Update
from jaxspec.engine.scheduler import QueueFull
from jaxspec.engine.shared_engine import check_process
from jaxspec.engine.stats import EngineStats
from jaxspec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxspec.engine.engine import Engine

MAX_FAILED_STEPS = 3
"""After this many failed steps in a row the engine counts as unhealthy. It keeps trying."""
BROKEN = "the engine has failed and takes no more requests: restart the server"

logger = logging.getLogger(__name__)


class EngineError(RuntimeError):
    """The engine failed while it worked on a request; the request itself was not at fault."""


class EngineClosed(EngineError):
    """The engine takes no more requests and has dropped those it had."""

    def __init__(self, message: str = "the server is shutting down"):
        super().__init__(message)


@runtime_checkable
class Observer(Protocol):
    """Watches the engine. Called in the engine's thread, so it must be quick."""

    def after_step(self, stats: EngineStats, idle: bool) -> None:
        """After every step: the engine's counters, and whether the work has just run out."""

    def finished(self, output: GenerationOutput) -> None:
        """A request has ended, for any reason."""


class AsyncRequest(NamedTuple):
    """One completion for the engine to compute."""

    id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    """With n = 1: see SamplingParams.copies."""
    priority: int = 0
    """Larger is more urgent."""
    timeout: float | None = None
    """Seconds after which it ends with finish_reason "timeout". None: never."""
    tree: TreeLike | None = None
    wants_trees: bool = False
    """The last four as in Engine.add."""


class Generation:
    """The updates of requests that were started together, as an async iterator.

    It ends when every request has finished. Leaving the `with` block earlier aborts what is unfinished. If the engine
    fails on one of the requests, iterating raises EngineError and the others are aborted.
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
        """Aborts unfinished requests within one engine step. Undelivered updates are dropped."""
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
    """Command: admit these requests, all or none, and report the result to the waiting coroutine."""

    requests: Sequence[AsyncRequest]
    generation: Generation
    admitted: asyncio.Future


@dataclass(frozen=True)
class _Abort:
    """Command: drop those of these requests that were admitted for this generation."""

    generation: Generation
    request_ids: Sequence[str]


@dataclass(frozen=True)
class _End:
    """Command: end these requests (None: all) with the output they have, and report how many there were."""

    request_ids: Sequence[str] | None
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future


@dataclass(frozen=True)
class _Flush:
    """Command: clear the prefix cache, and report when that is done."""

    loop: asyncio.AbstractEventLoop
    done: asyncio.Future


type _Command = _Start | _Abort | _End | _Flush


class AsyncEngine:
    """Runs engine.step() in a thread of its own for as long as there is work.

    A failure on the device ends the affected requests (see Engine.step), and the thread continues. An exception raised by the
    engine ends everything: its results can no longer be trusted.
    """

    def __init__(self, engine: "Engine", observers: Sequence[Observer] = ()):
        self._engine, self._observers = engine, observers
        self._stats = engine.stats()
        self._process = os.getpid()
        self._condition = threading.Condition()  # guards _commands and _closing
        self._commands: deque[_Command] = deque()
        self._in_progress: deque[_Command] = deque()  # taken from _commands; used by the thread only
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
        """The engine's counters after its last step or command."""
        return self._stats

    async def start(self, requests: Sequence[AsyncRequest]) -> Generation:
        """Admits all requests or none. Raises the engine's ValueError or QueueFull if it refuses one."""
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

    async def flush_cache(self) -> None:
        """Clears the prefix cache; running requests are not affected."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        if not self._post(_Flush(loop, done)):
            raise self._closed()
        await done

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """Ends requests (default: all). Their readers get the output so far, with finish_reason "abort".

        Returns how many there were; unknown ids don't count.
        """
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        if not self._post(_End(request_ids, loop, done)):
            raise self._closed()
        return await done

    def stop(self) -> None:
        """Ends the thread after its current step, without waiting for it; readers get an EngineError."""
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
        """Queues a command for the thread; False if it takes no more. Raises RuntimeError in a forked process."""
        check_process(self._process)
        with self._condition:
            if self._closing:
                return False
            self._commands.append(command)
            self._condition.notify()
            return True

    # Everything below runs in the engine's thread.

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception:
            self._broken = True
            logger.exception("the engine's state is corrupt: it ends, with its %d requests", len(self._generations))
        finally:  # no coroutine may wait forever
            with self._condition:
                self._closing = True
            for command in (*self._in_progress, *self._commands):
                if isinstance(command, _Start):
                    _call_in_loop(command.generation.loop, _resolve, command.admitted, self._closed())
                elif isinstance(command, (_Flush, _End)):
                    _call_in_loop(command.loop, _resolve, command.done, self._closed())
            self._end_all()

    def _turn(self) -> bool:
        """Runs queued commands, then one step; waits while there is nothing to do. False when the thread must end."""
        with self._condition:
            while not (self._commands or self._closing or self._should_step):
                self._condition.wait()
            if self._closing:
                return False
            self._in_progress, self._commands = self._commands, deque()
        if self._in_progress:
            while self._in_progress:
                self._execute(self._in_progress[0])
                self._in_progress.popleft()
            self._stats = self._engine.stats()
        if self._should_step:
            self._step()
        return True

    @property
    def _should_step(self) -> bool:
        """Also true without requests while results of launched programs wait to be read."""
        return bool(self._generations) or self._engine.has_work

    def _execute(self, command: _Command) -> None:
        if isinstance(command, _Start):
            refusal = self._admit(command.requests)
            if refusal is None:
                self._generations.update((request.id, command.generation) for request in command.requests)
            _call_in_loop(command.generation.loop, _resolve, command.admitted, refusal)
        elif isinstance(command, _Abort):
            self._forget(name for name in command.request_ids if self._generations.get(name) is command.generation)
        elif isinstance(command, _End):
            names = list(self._generations) if command.request_ids is None else command.request_ids
            ended = [update for name in names if name in self._generations and (update := self._engine.abort(name)) is not None]
            self._stats = self._engine.stats()  # before the caller is told, who may read them
            self._deliver(ended)
            _call_in_loop(command.loop, _resolve, command.done, None, len(ended))
        else:
            self._engine.flush_cache()
            _call_in_loop(command.loop, _resolve, command.done, None)

    def _admit(self, requests: Sequence[AsyncRequest]) -> Exception | None:
        """Admits all requests or none; returns the error in the second case."""
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
            logger.exception("the engine failed to admit a request")
            return EngineError("the engine failed to admit the request")
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
        """Aborts requests in the engine; unknown ids are ignored."""
        for request_id in request_ids:
            self._generations.pop(request_id, None)
            self._observe_end(self._engine.abort(request_id))

    def _observe_end(self, update: Update | None) -> None:
        if update is not None and update.output is not None:
            for observer in self._observers:
                observer.finished(update.output)

    def _end_all(self) -> None:
        """Ends every generation with an error. A broken engine is not touched again."""
        for generation in set(self._generations.values()):
            _call_in_loop(generation.loop, generation.put, EngineError(FAILED) if self._broken else EngineClosed())
        if not self._broken:
            self._forget(list(self._generations))


def _put_all(items: Sequence[tuple[Generation, Update | EngineError]]) -> None:
    for generation, item in items:
        generation.put(item)


def _resolve(done: asyncio.Future, refusal: Exception | None, result: int | None = None) -> None:
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
