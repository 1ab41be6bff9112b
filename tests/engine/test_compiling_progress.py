"""What is said while programs are compiled."""

import io
import logging
import sys

import pytest

from jaxspec.engine.compiling_progress import INTERVAL, CompilingProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(shown: bool, seconds: float, programs: int = 4) -> None:
    now = iter(range(1000))
    with CompilingProgress(programs, shown=shown, clock=lambda: seconds * next(now)) as progress:
        for number in range(programs):
            progress.add(from_cache=number == 1)


def test_a_log_gets_a_line_now_and_then_and_none_at_the_end(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "jaxspec"):
        run(shown=True, seconds=INTERVAL)
        assert [record.message for record in caplog.records] == [
            "1 of 4 programs are ready, about 90 s left",
            "2 of 4 programs are ready, about 60 s left",
            "3 of 4 programs are ready, about 30 s left",
        ]
        caplog.clear()
        run(shown=True, seconds=INTERVAL / 3, programs=9)
        assert len(caplog.records) == 2


@pytest.mark.parametrize(("shown", "seconds"), [(False, INTERVAL), (True, 0.1)])
def test_nothing_is_said_of_what_is_quick_or_not_asked_for(
    shown: bool, seconds: float, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture
):
    with caplog.at_level(logging.INFO, "jaxspec"):
        run(shown, seconds)
    assert not caplog.records and capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_with_an_estimate(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with caplog.at_level(logging.INFO, "jaxspec"):
        run(shown=True, seconds=INTERVAL)
    assert "compiling: 0 of 4 programs |" in terminal.getvalue() and "about ? left" in terminal.getvalue()
    assert not caplog.records
