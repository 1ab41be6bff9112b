"""The log line per interval."""

import logging

import pytest

from jaxspec.engine.stats import EngineStats
from jaxspec.server.logs import IDLE_INTERVAL, INTERVAL, DecodeLog


def stats(generated: int = 0, running: int = 2, used_pages: int = 5, verify_count: int = 0, verified: int = 0) -> EngineStats:
    return EngineStats(
        running=running,
        waiting=3,
        used_pages=used_pages,
        total_pages=20,
        page_size=16,
        prefilled_tokens=0,
        generated_tokens=generated,
        verify_count=verify_count,
        verified_tokens=verified,
    )


class Clocked:
    """A log whose clock the test turns."""

    def __init__(self, caplog: pytest.LogCaptureFixture):
        caplog.set_level(logging.INFO, "jaxspec")
        self.now, self._caplog = 1000.0, caplog
        self.log = DecodeLog(lambda: self.now)

    def step(self, seconds: float, now: EngineStats, idle: bool = False) -> list[str]:
        """Another step ends so much later; returns what it logged."""
        self._caplog.clear()
        self.now += seconds
        self.log.after_step(now, idle)
        return [record.getMessage() for record in self._caplog.records]


@pytest.fixture
def clocked(caplog: pytest.LogCaptureFixture) -> Clocked:
    return Clocked(caplog)


def test_a_line_per_interval_about_that_interval(clocked: Clocked):
    assert clocked.step(0, stats()) == []
    assert clocked.step(INTERVAL - 0.1, stats(generated=90, verify_count=30, verified=90)) == []
    assert clocked.step(0.1, stats(generated=100, verify_count=40, verified=100)) == [
        "Decode batch, #running-req: 2, #token: 80, token usage: 0.25, accept len: 2.50, "
        "gen throughput (token/s): 20.00, #queue-req: 3"
    ]
    assert clocked.step(INTERVAL / 2, stats(generated=120, verify_count=45, verified=120)) == []
    [line] = clocked.step(INTERVAL / 2, stats(generated=150, verify_count=50, verified=150))
    assert "accept len: 5.00, gen throughput (token/s): 10.00" in line


def test_a_short_request_shows_up_when_it_ends(clocked: Clocked):
    clocked.step(0, stats(generated=1))
    [line] = clocked.step(0.5, stats(generated=11, running=0, used_pages=0, verify_count=4, verified=10), idle=True)
    assert "#running-req: 2, #token: 80" in line  # as it was while there was work
    assert "accept len: 2.50, gen throughput (token/s): 22.00" in line


def test_idle_time_is_no_activity(clocked: Clocked):
    clocked.step(0, stats(generated=0))
    assert len(clocked.step(2, stats(generated=10), idle=True)) == 1
    assert clocked.step(1000, stats(generated=11)) == []
    [line] = clocked.step(2, stats(generated=30), idle=True)
    assert "gen throughput (token/s): 10.00" in line


def test_many_short_requests_make_few_lines(clocked: Clocked):
    lines = []
    for number in range(100):
        lines += clocked.step(0.01, stats(generated=10 * number))
        lines += clocked.step(0.04, stats(generated=10 * number + 10), idle=True)
    assert len(lines) == pytest.approx(100 * 0.05 / IDLE_INTERVAL, abs=1)


def test_prefill_alone_is_no_line(clocked: Clocked):
    for _ in range(10):
        assert clocked.step(INTERVAL, stats()) == []
