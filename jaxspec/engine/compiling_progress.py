"""How far compiling has come: a bar on a terminal, elsewhere a line in the log now and then."""

import logging
import sys
import time
from collections.abc import Callable
from typing import Self

from tqdm import tqdm

INTERVAL = 30.0
"""Seconds between two lines."""
BAR = "{desc}: {n_fmt} of {total_fmt} programs |{bar}| {elapsed} gone, about {remaining} left{postfix}"

logger = logging.getLogger(__name__)


class CompilingProgress:
    """To be told of every program that is ready. Says nothing unless `shown`."""

    def __init__(self, total: int, *, shown: bool, clock: Callable[[], float] = time.monotonic):
        on_terminal = shown and sys.stderr.isatty()
        self._bar = tqdm(total=total, desc="compiling", bar_format=BAR, leave=False, disable=not on_terminal)
        self._logs, self._total, self._clock = shown and not on_terminal, total, clock
        self._ready = self._from_cache = 0
        self._started = self._last_line = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, *, from_cache: bool) -> None:
        """One more program is ready."""
        self._ready += 1
        self._from_cache += from_cache
        self._bar.set_postfix_str(f"{self._from_cache} from the cache", refresh=False)
        self._bar.update()
        now, left = self._clock(), self._total - self._ready
        if self._logs and left and now - self._last_line >= INTERVAL:
            self._last_line = now
            seconds = (now - self._started) / self._ready * left
            logger.info("%d of %d programs are ready, about %.0f s left", self._ready, self._total, seconds)
