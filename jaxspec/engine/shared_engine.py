"""One engine, many threads: callers take turns to step it, and each step serves the requests of all of them."""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from jaxspec.config import TreeLike
from jaxspec.engine.request import Update
from jaxspec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxspec.engine.engine import Engine

CLOSED = "this LLM is closed: create a new one"


def check_process(creator: int) -> None:
    """Raises RuntimeError unless this process is the creator of the engine."""
    if os.getpid() != creator:
        raise RuntimeError(
            f"this LLM belongs to process {creator} and can't be used in a forked one, as JAX does not survive a fork: "
            "create the LLM in the new process, or use multiprocessing's start method 'spawn'"
        )


class Turns:
    """A lock that threads get in the order in which they asked. (A plain Lock lets one busy thread starve the others.)"""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._line: deque[object] = deque()
        """The first entry holds the lock."""

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Waits for the lock."""
        ticket = object()
        with self._changed:
            self._line.append(ticket)
            try:
                self._changed.wait_for(lambda: self._line[0] is ticket)
            except BaseException:  # Ctrl-C while waiting
                self._line.remove(ticket)
                self._changed.notify_all()
                raise
        try:
            yield
        finally:
            self._leave()

    def try_turn(self, action: Callable[[], None]) -> bool:
        """Runs the action if the lock is free. Never waits, so a garbage collector may call it at any time."""
        if not self._changed.acquire(blocking=False):
            return False
        try:
            if self._line:
                return False
            self._line.append(object())
        finally:
            self._changed.release()
        try:
            action()
        finally:
            self._leave()
        return True

    def _leave(self) -> None:
        with self._changed:
            self._line.popleft()
            self._changed.notify_all()


class Task(NamedTuple):
    """One completion to compute."""

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    """With n = 1: see SamplingParams.copies."""
    label: str = ""
    """Its prefix in error messages, such as "prompt 3: "."""
    tree: TreeLike | None = None
    """None: the engine chooses."""


@dataclass(eq=False)
class Inbox:
    """The updates for the requests of one call. Any thread's step may add to it."""

    request_ids: tuple[str, ...] = ()
    unfinished: set[str] = field(default_factory=set)
    updates: deque[Update] = field(default_factory=deque)


class SharedEngine:
    """Guards an engine, which is not thread-safe. Every public method may be called from any thread of this process."""

    def __init__(self, engine: "Engine"):
        self._engine = engine
        self._turns = Turns()
        self._inboxes: dict[str, Inbox] = {}
        """By the id of an unfinished request."""
        self._abandoned: deque[Inbox] = deque()
        """Calls that ended early; the next turn aborts their requests."""
        self._process = os.getpid()
        self._is_closed = False

    @contextlib.contextmanager
    def turn(self) -> Iterator["Engine"]:
        """The engine, for one thread at a time.

        Raises:
            RuntimeError: the engine is closed, or this process is a fork of the one that created it.
        """
        check_process(self._process)
        try:
            with self._turns.turn():
                if self._is_closed:
                    raise RuntimeError(CLOSED)
                self._abort_abandoned()
                yield self._engine
        finally:
            self._sweep()

    def submit(self, tasks: Sequence[Task]) -> Inbox:
        """Queues all tasks or, if the engine refuses one, none.

        Raises:
            ValueError: the engine can't serve a task; the message names it.
            QueueFull: max_waiting_requests wait already.
        """
        with self.turn() as engine:
            ids: list[str] = []
            try:
                for task in tasks:
                    try:
                        ids.append(engine.add(task.prompt_token_ids, task.params, tree=task.tree).id)
                    except ValueError as error:
                        raise ValueError(f"{task.label}{error}") from None
            except BaseException:
                for request_id in ids:
                    engine.abort(request_id)
                raise
            inbox = Inbox(tuple(ids), set(ids))
            self._inboxes.update((request_id, inbox) for request_id in ids)
        return inbox

    def updates(self, inbox: Inbox) -> Iterator[Update]:
        """The updates of a call until all its requests have finished. Leaving early aborts the others.

        Raises:
            RuntimeError: the engine is closed, or it lost a request (a bug in the engine).
        """
        try:
            while inbox.unfinished or inbox.updates:
                if not inbox.updates:
                    with self.turn() as engine:
                        if inbox.unfinished and not inbox.updates:  # nor has another thread stepped while this one waited
                            self._step(engine, inbox)
                while inbox.updates:
                    yield inbox.updates.popleft()
        finally:  # also after Ctrl-C in the middle of a step, from which the engine recovers
            self._abandoned.append(inbox)
            self._sweep()

    def close(self) -> bool:
        """Aborts everything and drops the engine. Later calls, and calls that still wait, raise RuntimeError.

        Returns False if it was closed before.
        """
        check_process(self._process)
        with self._turns.turn():
            if self._is_closed:
                return False
            for request_id in self._inboxes:
                self._engine.abort(request_id)
            self._inboxes.clear()
            self._drain(self._engine)
            self._is_closed = True
            del self._engine
        return True

    def _step(self, engine: "Engine", inbox: Inbox) -> None:
        if not engine.has_work:
            raise RuntimeError(f"the engine lost {len(inbox.unfinished)} requests: please report this bug")
        for update in engine.step():
            owner = self._inboxes.get(update.request_id)
            if owner is None:  # the request was not added here
                continue
            owner.updates.append(update)
            if update.output is not None:
                owner.unfinished.discard(update.request_id)
                del self._inboxes[update.request_id]

    def _sweep(self) -> None:
        """Aborts the requests of calls that ended early, unless another thread has the turn, which then does it."""
        while self._abandoned and os.getpid() == self._process and self._turns.try_turn(self._abort_abandoned):
            pass

    def _abort_abandoned(self) -> None:
        if not self._abandoned or self._is_closed:
            self._abandoned.clear()
            return
        while self._abandoned:
            for request_id in self._abandoned.popleft().request_ids:
                if self._inboxes.pop(request_id, None) is not None:
                    self._engine.abort(request_id)
        if not self._inboxes:
            self._drain(self._engine)

    @staticmethod
    def _drain(engine: "Engine") -> None:
        """Reads the results of programs launched for requests that have ended."""
        while engine.has_work:
            engine.step()
