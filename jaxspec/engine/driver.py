"""The thread that owns an engine. All other threads, and event loops, hand it requests and get updates.

An engine is not thread-safe, so one thread alone runs it, step after step for as long as there is work. What others want is a
function in its inbox, which it empties between two steps; updates go out through the function that came with the requests. Neither
side waits for the other: a slow reader only lets its own queue grow, to at most max_tokens entries.
"""

import asyncio
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxspec.engine.pages import IntegrityError
from jaxspec.engine.request import FAILED, EngineClosed, EngineError, GenerationOutput, GenerationRequest, Update
from jaxspec.engine.scheduler import QueueFull
from jaxspec.engine.stats import EngineStats
from jaxspec.grammar.cache import Constraint, GrammarsBusy
from jaxspec.grammar.matcher import Grammar

if TYPE_CHECKING:
    from jaxspec.engine.engine import Engine

MAX_FAILED_STEPS = 3
"""After this many failed steps in a row the engine counts as unhealthy. It keeps trying."""
BROKEN = "the engine has failed and takes no more requests: restart the server"

logger = logging.getLogger(__name__)


class Observer:
    """Watches the engine. Subclasses define what they need. Called in the engine's thread, so it must be quick."""

    def after_step(self, stats: EngineStats, idle: bool) -> None:
        """After every step: the engine's counters, and whether the work has just run out."""

    def finished(self, output: GenerationOutput) -> None:
        """A request has ended, for any reason."""


type Deliver = Callable[[Update | EngineError], object]
"""Takes the updates of a ticket's requests; an EngineError is the last. It must not wait. If it raises in the engine's thread, its
requests end."""


@dataclass(eq=False)
class Ticket:
    """Requests that are submitted together."""

    requests: Sequence[GenerationRequest]
    deliver: Deliver
    names: Sequence[str | None]
    """The ids that they shall have. None: the engine chooses."""
    loop: asyncio.AbstractEventLoop | None
    """In whose thread `deliver` is called; None: in the engine's."""
    came: float | None = None
    """When they came, by the engine's clock. None: when they are admitted."""
    ids: list[str] = field(default_factory=list)
    """The ids of the admitted requests, in order; if the engine refuses one, of those before it."""
    admitted: "Future[None]" = field(default_factory=Future)
    """Done once all are admitted. Its exception says why one was refused: then none is admitted."""


class EngineThread:
    """Runs an engine in a thread of its own. Every method may be called from any thread of this process.

    A failure on the device ends the affected requests (see Engine.step), and the thread continues. An exception raised by the
    engine ends everything: its results can no longer be trusted.

    The thread ends with `close`, when nothing refers to this object any more, and before Python exits, which must not happen while
    a thread is inside XLA.
    """

    def __init__(
        self,
        engine: "Engine",
        observers: Sequence[Observer] = (),
        *,
        closed: str = "the server is shutting down",
        broken: str = BROKEN,
        failed: Callable[[Exception], object] = lambda _: None,
    ):
        """`closed` and `broken`: the messages for callers that come too late. `failed` is called, in the engine's thread, with what
        the engine raised."""
        self._work = _Work(engine, observers, closed, broken, failed)
        self._process = os.getpid()
        self._grammars, self.clock = engine.grammars, engine.clock
        self._lock = threading.Lock()
        self._starting = dict[str, bool]()
        """The ids of requests that are not submitted yet, and whether they were ended."""
        self._thread = threading.Thread(target=self._work.run, name="engine", daemon=True)
        self._thread.start()
        self._stop_at_exit = weakref.finalize(self, _stop_at_exit, self._work, self._thread, self._process)  # holds no self

    @property
    def is_healthy(self) -> bool:
        """False when the thread has ended or the last MAX_FAILED_STEPS steps all failed."""
        return self._thread.is_alive() and not self._work.is_closing and self.stats.failed_steps < MAX_FAILED_STEPS

    @property
    def stats(self) -> EngineStats:
        """The engine's counters after its last step or call."""
        return self._work.stats

    def submit(
        self,
        requests: Sequence[GenerationRequest],
        deliver: Deliver,
        *,
        names: Sequence[str] | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        came: float | None = None,
    ) -> Ticket:
        """Queues all requests or, if the engine refuses one, none: the ticket's `admitted` tells. Updates go to `deliver`, in the
        engine's thread or, if there is a `loop`, in that event loop. The rest is as in Ticket."""
        work, ticket = self._work, Ticket(requests, deliver, names or [None] * len(requests), loop, came)
        self._post(ticket.admitted, lambda _engine: work.admit(ticket))
        return ticket

    def drop(self, ticket: Ticket) -> None:
        """Ends unfinished requests of a ticket within one step. Nothing more is delivered. Never waits, so a garbage collector may
        call it at any time."""
        work = self._work
        if os.getpid() == self._process:
            ticket.admitted.cancel()
            with contextlib.suppress(EngineClosed):
                self._post(Future(), lambda _engine: work.drop([ticket]))

    def abort(self, request_ids: Sequence[str] | None = None) -> "Future[int]":
        """Ends requests (None: all) with the output they have, which is delivered with finish_reason "abort". The result is how
        many there were; unknown ids don't count. One that is `starting` ends when it has started."""
        work = self._work
        with self._lock:
            starting = [name for name in self._starting if request_ids is None or name in request_ids]
            self._starting |= dict.fromkeys(starting, True)
        return self._post(Future(), lambda _engine: len(starting) + work.abort(request_ids))

    @contextlib.contextmanager
    def starting(self, names: Sequence[str]) -> Iterator[None]:
        """Within this context requests with these ids are about to be submitted, and may be ended already. It may be nested."""
        with self._lock:
            own = [name for name in names if name not in self._starting]
            self._starting |= dict.fromkeys(own, False)
        try:
            yield
        finally:
            with self._lock:
                ended = [name for name in own if self._starting.pop(name)]
        if ended:
            self.abort(ended)

    def call[T](self, function: "Callable[[Engine], T]") -> "Future[T]":
        """The result of the function, which runs in the engine's thread between two steps."""
        return self._post(Future(), function)

    def compile(self, constraint: Constraint) -> "Future[Grammar]":
        """As Grammars.tried; requests with this constraint may be submitted as long as the result is held. Closing cancels it.
        Raises QueueFull, and what `check_open` raises."""
        self.check_open()
        try:
            return self._grammars.tried(constraint)
        except GrammarsBusy as error:
            raise QueueFull(str(error)) from None
        except RuntimeError:  # it was closed just now
            self.check_open()
            raise

    def check_open(self) -> None:
        """Raises RuntimeError in a forked process, and EngineClosed if the thread takes no more."""
        check_process(self._process)
        self._work.check_open()

    def stop(self) -> None:
        """Ends the thread after its current step, without waiting for it; readers get an EngineError."""
        self._work.stop()

    def close(self) -> None:
        """Ends the thread, and waits until it has ended and the engine has nothing left to do. May be called twice."""
        check_process(self._process)
        self._stop_at_exit()
        self._thread.join()

    def _post[T](self, result: "Future[T]", function: "Callable[[Engine], T]") -> "Future[T]":
        check_process(self._process)
        self._work.post(_Call(result, function))
        return result


def check_process(creator: int) -> None:
    """Raises RuntimeError unless this process is the creator of the engine."""
    if os.getpid() != creator:
        raise RuntimeError(
            f"this engine belongs to process {creator} and can't be used in a forked one, as JAX does not survive a fork: "
            "create the LLM in the new process, or use multiprocessing's start method 'spawn'"
        )


class _Call(NamedTuple):
    """A function for the engine's thread to call."""

    result: Future
    function: "Callable[[Engine], Any]"


class _Work:
    """What the thread does. It does not refer to the EngineThread, so that this one can be collected."""

    def __init__(
        self, engine: "Engine", observers: Sequence[Observer], closed: str, broken: str, failed: Callable[[Exception], object]
    ):
        self._engine, self._observers, self._closed, self._broken, self._failed = engine, observers, closed, broken, failed
        self.stats = engine.stats()
        self.is_closing = self._has_ended = False
        self._failure: Exception | None = None
        """What the engine raised."""
        self._inbox: SimpleQueue[_Call | None] = SimpleQueue()
        """None wakes the thread. A SimpleQueue, unlike a Condition, may be used by a garbage collector at any time."""
        self._tickets: dict[str, Ticket] = {}
        """By the id of an unfinished request; used by the thread only."""

    def check_open(self) -> None:
        if self.is_closing:
            raise self._refusal()

    def post(self, call: _Call) -> None:
        self.check_open()
        self._inbox.put(call)
        if self._has_ended:  # meanwhile, so the thread may not read the inbox again
            self._refuse_all()

    def stop(self) -> None:
        self.is_closing = True
        self._inbox.put(None)

    # Everything below runs in the engine's thread, except that `_refuse_all` may run in any.

    def run(self) -> None:
        """Steps the engine until it is stopped or fails."""
        try:
            while not self.is_closing:
                while not self.is_closing and (not self._inbox.empty() or not (self._tickets or self._engine.has_work)):
                    self._answer(self._inbox.get())
                if not self.is_closing:
                    self._step()
        except Exception as error:
            self._failure = error
            self._failed(error)
            logger.exception("engine state is corrupt; stopping and failing %d requests", len(self._tickets))
        finally:  # no caller may wait forever
            self.is_closing = self._has_ended = True
            self._refuse_all()
            self._end_all()
            self._engine.grammars.close()
            self._engine.runner.programs.stop()
            del self._engine

    def _answer(self, call: _Call | None) -> None:
        if call is None or not call.result.set_running_or_notify_cancel():
            return
        try:
            result = call.function(self._engine)
        except IntegrityError as error:
            self._failure = error
            call.result.set_exception(self._refusal())
            raise
        except Exception as error:
            call.result.set_exception(error)
        else:
            self.stats = self._engine.stats()  # before the caller is told: it may read them
            call.result.set_result(result)

    def admit(self, ticket: Ticket) -> None:
        try:
            for request, name in zip(ticket.requests, ticket.names, strict=True):
                ticket.ids.append(self._engine.add(request, name, came=ticket.came).id)
        except Exception as error:
            if isinstance(error, IntegrityError):
                raise
            for request_id in ticket.ids:
                self._engine.withdraw(request_id)
            if isinstance(error, (ValueError, QueueFull)):
                raise
            logger.exception("the engine failed to admit a request")
            raise EngineError("the engine failed to admit the request") from error
        self._tickets |= dict.fromkeys(ticket.ids, ticket)

    def drop(self, tickets: Iterable[Ticket]) -> None:
        """Ends the requests of these tickets; their readers have left."""
        for ticket in tickets:
            for request_id in ticket.ids:
                if self._tickets.get(request_id) is ticket:
                    del self._tickets[request_id]
                    self._observe_end(self._engine.abort(request_id))

    def abort(self, request_ids: Sequence[str] | None) -> int:
        names = list(self._tickets) if request_ids is None else request_ids
        ended = [update for name in names if name in self._tickets and (update := self._engine.abort(name)) is not None]
        self._deliver(ended)
        return len(ended)

    def _step(self) -> None:
        updates = self._engine.step()
        self.stats = self._engine.stats()
        self._deliver(updates)
        # Only observers must know at once; a request that was lost shows in the next step, which has no updates.
        is_idle = bool(self._observers or not updates) and not self._engine.has_work
        for observer in self._observers:
            observer.after_step(self.stats, is_idle)
        if is_idle and self._tickets:
            raise RuntimeError(f"the engine lost {len(self._tickets)} requests: please report this bug")

    def _deliver(self, updates: Iterable[Update]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Deliver, Update | EngineError]]] = {}
        for update in updates:
            ticket = self._tickets.get(update.request_id)
            if update.output is not None:
                self._tickets.pop(update.request_id, None)
                self._observe_end(update)
            if ticket is None:  # aborted while the step that made this update was in flight
                continue
            if ticket.loop is None:
                if not _delivered(ticket.deliver, update):
                    self.drop([ticket])
            else:
                by_loop.setdefault(ticket.loop, []).append((ticket.deliver, update))
        for loop, items in by_loop.items():  # one wake-up per event loop and step, however many requests run
            if not _wake(loop, items):
                self.drop({ticket for ticket in self._tickets.values() if ticket.loop is loop})

    def _observe_end(self, update: Update | None) -> None:
        if update is not None and update.output is not None:
            for observer in self._observers:
                observer.finished(update.output)

    def _refusal(self) -> EngineClosed:
        return EngineClosed(self._closed if self._failure is None else self._broken)

    def _refuse_all(self) -> None:
        """Refuses what is in the inbox."""
        with contextlib.suppress(Empty):
            while True:
                call = self._inbox.get_nowait()
                if call is not None and call.result.set_running_or_notify_cancel():
                    call.result.set_exception(self._refusal())

    def _end_all(self) -> None:
        """Ends every ticket with an error. A broken engine is not touched again; another one reads what it has launched."""
        tickets = set(self._tickets.values())
        if self._failure is None:
            self.drop(tickets)
            with contextlib.suppress(Exception):  # from the device: nobody would read its message, but readers wait below
                while self._engine.has_work:
                    self._engine.step()
                self.stats = self._engine.stats()
        for ticket in tickets:
            error = self._refusal() if self._failure is None else EngineError(FAILED)
            error.__cause__ = self._failure
            if ticket.loop is None:
                _delivered(ticket.deliver, error)
            else:
                _wake(ticket.loop, [(ticket.deliver, error)])


def _wake(loop: asyncio.AbstractEventLoop, items: Sequence[tuple[Deliver, Update | EngineError]]) -> bool:
    """Delivers the items in the event loop's thread, soon; False if that loop is closed."""
    try:
        loop.call_soon_threadsafe(_deliver_all, items)
    except RuntimeError:
        return False
    return True


def _deliver_all(items: Sequence[tuple[Deliver, Update | EngineError]]) -> None:
    for deliver, item in items:
        _delivered(deliver, item)


def _delivered(deliver: Deliver, item: Update | EngineError) -> bool:
    """Delivers an item. False: its reader raised, which is logged."""
    try:
        deliver(item)
    except Exception:
        logger.exception("the reader of a request has failed")
        return False
    return True


def _stop_at_exit(work: _Work, thread: threading.Thread, process: int) -> None:
    """Nothing refers to the EngineThread any more, or Python exits."""
    if os.getpid() == process:
        work.stop()
        if thread is not threading.current_thread():  # a garbage collector may run in any
            thread.join()
