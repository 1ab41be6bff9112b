"""Failures of the device: which requests they end, and how the engine continues without them.

A failed launch or an unreadable result ends the requests of that program. The state was donated to it and may be gone, so the next
step begins with empty caches. Requests that were running start over from the tokens that were read: with the same noise they
produce the same text.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from jaxspec.engine.launched import Launched
from jaxspec.engine.output import Output
from jaxspec.engine.pages import IntegrityError
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.engine.scheduler import Scheduler
from jaxspec.engine.stats import EngineStats
from jaxspec.engine.trees import TreeChoice

logger = logging.getLogger(__name__)


class Recovery:
    """Keeps an engine running after failures. The engine declares which requests it is working on; a failure ends those."""

    def __init__(self, runner: Runner, scheduler: Scheduler, trees: TreeChoice, output: Output, counts: EngineStats):
        self._runner, self._scheduler, self._trees, self._output, self._counts = runner, scheduler, trees, output, counts
        self._state_is_lost = False
        self._unread: list[Launched] = []
        self._blamed: list[Request] = []
        """Requests that end if the step fails now."""
        self._unreported: list[Request] = []
        """Requests with chunks that were launched since the last program with a result."""

    @contextmanager
    def step(self, unread: list[Launched]) -> Iterator[None]:
        """One step of the engine. A failure inside a `blame` block ends the step and the blamed requests; others are raised.

        `unread`: the programs that the step before launched. It is emptied if the state was lost, as they have no results.

        Raises:
            IntegrityError: the bookkeeping of pages is wrong, so no result can be trusted.
        """
        self._unread = unread
        try:
            if self._state_is_lost:
                self._restart()
            yield
            self._counts.failed_steps = 0
        except IntegrityError:
            raise
        except Exception as error:
            self._counts.failed_steps += 1
            self._state_is_lost = True
            if not self._blamed:  # no request owns the failing code, so retrying would fail again
                raise
            logger.exception("an engine step failed; its %d requests end with an error", len(self._blamed))
            for request in self._blamed:
                self._output.fail(request, error)
        except BaseException:  # Ctrl-C may arrive in the middle of a launch
            self._state_is_lost = True
            raise
        finally:
            self._blamed = []

    @contextmanager
    def blame(self, requests: Sequence[Request]) -> Iterator[None]:
        """A failure inside this block ends these requests."""
        self._blamed = list(requests)
        yield
        self._blamed = []

    @contextmanager
    def blame_launch(self, requests: Sequence[Request], launched: Sequence[Launched]) -> Iterator[None]:
        """Like `blame`, for a launch, which also fails if an earlier program failed: then that program's requests end instead.

        `launched`: the programs with a result that this step launched before.
        """
        with self.blame(requests):
            try:
                yield
            except Exception:
                self._blamed = self._first_unreadable([*self._unread, *launched]) or [*self._unreported, *requests]
                raise

    def to_read(self, launched: Launched) -> list[Launched]:
        """The program if it has a result, else nothing. Chunks without one are blamed with the next program that has one."""
        if not launched.reports:
            self._unreported += launched.requests
            return []
        launched, self._unreported = launched._replace(unreported=self._unreported), []
        return [launched]

    def _first_unreadable(self, programs: Sequence[Launched]) -> list[Request]:
        """Requests of the first of these programs whose result can't be read."""
        for program in programs:
            try:
                self._runner.read(program)
            except Exception:
                return [*program.requests, *program.unreported]
        return []

    def _restart(self) -> None:
        """Restarts with empty caches."""
        self._runner.reset()
        self._scheduler.lose_device_state()
        self._unread.clear()
        self._unreported = []
        self._trees.forget_launched()
        for request in self._scheduler.unfinished:
            request.in_flight = request.in_flight_tokens = 0
        self._state_is_lost = False
