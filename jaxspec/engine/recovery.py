"""Failures of the device: which requests they end, and how the engine continues without them.

A failed launch or an unreadable result ends the requests of that program. The state was donated to it and may be gone, so the next
step begins with empty caches. Requests that were running start over from the tokens that were read: with the same noise they
produce the same text.
"""

import logging
from collections.abc import Sequence

from jaxspec.engine.host_group import ALONE
from jaxspec.engine.launched import Launched
from jaxspec.engine.output import Output
from jaxspec.engine.pages import IntegrityError
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.engine.scheduler import Scheduler
from jaxspec.engine.stats import EngineStats
from jaxspec.engine.trees import TreeChoice

logger = logging.getLogger(__name__)


class ProgramFailed(Exception):
    """A program can't be launched or its result can't be read: `requests` end. The cause is the exception itself."""

    def __init__(self, requests: Sequence[Request]):
        super().__init__(f"a program failed; its {len(requests)} requests end with an error")
        self.requests = requests


class Recovery:
    """Keeps an engine running after failures, unless other processes run it, too: what they have launched can't be taken back."""

    def __init__(self, runner: Runner, scheduler: Scheduler, trees: TreeChoice, output: Output, counts: EngineStats):
        self._runner, self._scheduler, self._trees, self._output, self._counts = runner, scheduler, trees, output, counts
        self.is_due = False
        """The state is lost: the next step must begin with `restart`."""
        self.unreported: list[Request] = []
        """Requests with chunks that were launched since the last program with a result."""

    def with_unreported(self, program: Launched) -> Launched:
        """The program, whose result tells about the chunks without one that were launched before it."""
        program, self.unreported = program._replace(unreported=self.unreported), []
        return program

    def failed_launch(self, requests: Sequence[Request], launched: Sequence[Launched]) -> ProgramFailed:
        """The failure of a launch for these requests. A launch also fails if an earlier program failed: then that program's
        requests end instead.

        `launched`: the programs with a result that were launched before and not read.
        """
        return ProgramFailed(self._first_unreadable(launched) or [*self.unreported, *requests])

    def after(self, error: BaseException) -> None:
        """What ended a step: if it was a program, its requests end and the engine continues; everything else is raised again.

        Raises:
            IntegrityError: the bookkeeping of pages is wrong, so no result can be trusted.
            BaseException: whatever no program's request is to blame for, so retrying would fail again; in a group of processes
                everything; and Ctrl-C, which may arrive in the middle of a launch.
        """
        if isinstance(error, IntegrityError):
            raise error
        self.is_due = True
        if isinstance(error, Exception):
            self._counts.failed_steps += 1
        if not isinstance(error, ProgramFailed):
            raise error
        if self._runner.group is not ALONE:
            raise error.__cause__ or error
        logger.error("an engine step failed; its %d requests end with an error", len(error.requests), exc_info=error.__cause__)
        for request in error.requests:
            self._output.fail(request, error.__cause__ or error)

    def restart(self, unread: list[Launched]) -> None:
        """Restarts with empty caches. `unread`: the programs that the step before launched; it is emptied, as they have no
        results."""
        self._runner.reset()
        self._scheduler.lose_device_state()
        unread.clear()
        self.unreported = []
        self._trees.forget_launched()
        for request in self._scheduler.unfinished:
            request.in_flight = request.in_flight_tokens = 0
        self.is_due = False

    def _first_unreadable(self, programs: Sequence[Launched]) -> list[Request]:
        """Requests of the first of these programs whose result can't be read."""
        for program in programs:
            try:
                self._runner.read(program)
            except Exception:
                return [*program.requests, *program.unreported]
        return []
