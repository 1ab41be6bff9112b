"""The server's log: its format, and the line about decoding."""

import logging
from collections.abc import Callable
from time import perf_counter

from jaxspec.engine.driver import Observer
from jaxspec.engine.stats import EngineStats

INTERVAL = 5.0
"""Seconds between two lines while there is work."""
IDLE_INTERVAL = 1.0
"""The same when the work has run out, so that a single short request gets a line too."""

logger = logging.getLogger("jaxspec")


def configure_logging(level: str) -> None:
    """Logs to stderr in SGLang's format: our lines and uvicorn's from `level` on, warnings of other packages and of Python."""
    logging.basicConfig(level=logging.WARNING, format="[%(asctime)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S", force=True)
    for name in ("jaxspec", "uvicorn"):
        logging.getLogger(name).setLevel(level.upper())
    logging.captureWarnings(True)


class DecodeLog(Observer):
    """Logs SGLang's "Decode batch" line once per interval while there is work, for tools that parse SGLang's logs.

    Requests and cache use are those of the last step that left work behind; accept length and throughput are averages since
    the previous line.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter):
        self._clock = clock
        self._last_line = -INTERVAL
        self._last_step: float | None = None
        """When the last step ended; None while idle."""
        self._active = 0.0
        """Seconds of work since the previous line."""
        self._busy: EngineStats | None = None
        self._reported = EngineStats()

    def after_step(self, stats: EngineStats, idle: bool) -> None:
        now = self._clock()
        if self._last_step is not None:
            self._active += now - self._last_step
        self._last_step = None if idle else now
        if not idle:
            self._busy = stats
        due = now - self._last_line >= IDLE_INTERVAL if idle else self._active >= INTERVAL
        if due and stats.generated_tokens > self._reported.generated_tokens:
            logger.info("%s", decode_line(stats, self._busy or stats, self._reported, self._active))
            self._last_line, self._active, self._reported = now, 0.0, stats


def decode_line(now: EngineStats, gauges: EngineStats, before: EngineStats, seconds: float) -> str:
    """The line for the time between two counts."""
    done = now.since(before)
    throughput = done.generated_tokens / seconds if seconds > 0 else 0.0
    return (
        f"Decode batch, #running-req: {gauges.running}, #token: {gauges.used_tokens}, "
        f"token usage: {gauges.cache_usage:.2f}, accept len: {done.accept_length or 0.0:.2f}, "
        f"gen throughput (token/s): {throughput:.2f}, #queue-req: {gauges.waiting}"
    )
