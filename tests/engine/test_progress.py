"""What is said while programs compile, and the forecast, under a clock that the test moves."""

import io
import logging
import sys

import pytest

from jaxspec.engine.program_table import ProgramCount
from jaxspec.engine.progress import INTERVAL, CompilingProgress, Forecast


class Clock:
    """A clock that goes only when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_forecasts_are_corrected():
    """Ten steps of ten seconds each; then one that takes ten times as long: the forecast grows while it lasts."""
    clock = Clock()
    forecast, began, done, found = Forecast(clock=clock), clock.now, 0, []
    for ended, seconds in ((0, 0), (1, 10), (2, 20), (2, 25), (2, 120), (3, 120), (10, 190)):
        clock.now = began + seconds
        while done < ended:
            forecast.add()
            done += 1
        found.append(forecast.left(10 - done))
    assert found == [None, 90, 80, 75, 700, 280, None]


def test_steps_beside_the_next_one_are_half_done():
    """Three at a time, a minute each: the first ends early, two more follow at once."""
    clock = Clock()
    forecast = Forecast(3, clock)
    clock.now += 30
    forecast.add()
    assert forecast.left(3) == 30
    clock.now += 40  # a third of which would be a usual step
    assert forecast.left(3) == 10, "what is overdue takes as long again"
    clock.now -= 10
    assert forecast.left(3) == 1, "never less than a second"


def run(clock: Clock, seconds: float, programs: int = 4, *, shown: bool = True) -> None:
    """Compiles this many programs, each of which takes this many seconds, and looks every second."""
    with CompilingProgress(total=programs, shown=shown, clock=clock) as progress:
        for number in range(programs):
            for _ in range(int(seconds)):
                clock.now += 1
                left = progress.forecast.left(programs - number)
                progress.look(ProgramCount(number, programs, left), [f"cycle {number}", "admit"])
            progress.forecast.add()
            progress.look(ProgramCount(number + 1, programs, progress.forecast.left(programs - number - 1)))


def test_a_log_gets_one_line_in_ten_seconds_with_a_forecast_and_none_at_the_end(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "jaxspec"):
        run(Clock(), 16)
    assert INTERVAL == 10
    assert [record.message for record in caplog.records] == [
        "compiled 0 of 4 programs; now: cycle 0 (and 1 more)",
        "compiled 1 of 4 programs, about 44 s left; now: cycle 1 (and 1 more)",
        "compiled 1 of 4 programs, about 34 s left; now: cycle 1 (and 1 more)",
        "compiled 2 of 4 programs, about 24 s left; now: cycle 2 (and 1 more)",
        "compiled 3 of 4 programs, about 14 s left; now: cycle 3 (and 1 more)",
        "compiled 3 of 4 programs, about 4 s left; now: cycle 3 (and 1 more)",
    ]


def test_many_short_programs_share_a_line(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "jaxspec"):
        run(Clock(), 1, programs=35)
    assert len(caplog.records) == 3


@pytest.mark.parametrize(("shown", "seconds"), [(False, 60), (True, 1)])
def test_nothing_is_said_of_what_is_quick_or_not_asked_for(
    shown: bool, seconds: float, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture
):
    with caplog.at_level(logging.INFO, "jaxspec"):
        run(Clock(), seconds, shown=shown)
    assert not caplog.records and capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_with_the_same_forecast(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with caplog.at_level(logging.INFO, "jaxspec"):
        run(Clock(), 60)
    assert "compiling: 0 of 4 programs |" in terminal.getvalue() and "about 2 min left" in terminal.getvalue()
    assert not caplog.records
