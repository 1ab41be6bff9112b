"""How far compiling is, and how long it will still take: for a terminal, for the log, and for the page (GET /server_info)."""

import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Self

from tqdm import tqdm

from jaxspec.engine.program_table import ProgramCount

logger = logging.getLogger(__name__)

INTERVAL = 10.0
"""Seconds between two lines of the log."""
BAR = "{desc}: {n_fmt} of {total_fmt} programs |{bar}| {elapsed} gone{postfix}"


class Forecast:
    """How long a number of similar steps will still take. Each look corrects it: also one that finds no progress."""

    def __init__(self, at_once: int = 1, clock: Callable[[], float] = time.monotonic):
        self._at_once, self._clock, self._done = at_once, clock, 0
        self._began = self._last = clock()

    def add(self) -> None:
        """One more step has ended."""
        self._done, self._last = self._done + 1, self._clock()

    def left(self, missing: int) -> int | None:
        """Seconds until the missing steps have ended, at least 1; None as long as none has ended, or if none is missing."""
        if not self._done or not missing:
            return None
        since = self._clock() - self._last
        under_way = min(missing, self._at_once - 1) / 2  # those that run at the same time as the next one are half done
        each = max((self._last - self._began) / (self._done + under_way), since / self._at_once)  # this one may be a long one
        left = each * (missing - under_way) - since
        return max(math.ceil(abs(left)), 1)  # what is overdue takes as long again


class CompilingProgress:
    """Tells how many programs are ready: with a bar on a terminal, else with a line in the log now and then. Silent unless
    `shown`; `has_bar` False: never a bar."""

    def __init__(
        self, at_once: int = 1, *, total: int = 0, shown: bool, has_bar: bool = True, clock: Callable[[], float] = time.monotonic
    ):
        on_terminal = shown and has_bar and sys.stderr.isatty()
        self._bar = tqdm(total=total, desc="compiling", bar_format=BAR, leave=False, disable=not on_terminal)
        self._logs, self._clock = shown and not on_terminal, clock
        self.forecast = Forecast(at_once, clock)
        self._last_line = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def look(self, count: ProgramCount, under_way: Sequence[object] = (), from_cache: int = 0) -> None:
        """Shows how far it is now."""
        left = "" if count.seconds_left is None else f"{in_words(count.seconds_left)} left, "
        self._bar.n = count.ready
        self._bar.set_postfix_str(f"{left}{from_cache} from the cache")
        if self._logs and count.ready < count.total and self._clock() - self._last_line >= INTERVAL:
            self._last_line = self._clock()
            logger.info("%s", progress_line(count, under_way))


def progress_line(count: ProgramCount, under_way: Sequence[object]) -> str:
    """In:  ProgramCount(3, 9, 40), ["cycle 3/1/4, batch 8", "admit"]
    Out: compiled 3 of 9 programs, about 40 s left; now: cycle 3/1/4, batch 8 (and 1 more)
    """
    left = "" if count.seconds_left is None else f", {in_words(count.seconds_left)} left"
    more = f" (and {len(under_way) - 1} more)" if len(under_way) > 1 else ""
    now = f"; now: {under_way[0]}{more}" if under_way else ""
    return f"compiled {count.ready} of {count.total} programs{left}{now}"


def in_words(seconds: int) -> str:
    return f"about {seconds} s" if seconds < 90 else f"about {round(seconds / 60)} min"
