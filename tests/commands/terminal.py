"""A command of ours in a terminal of its own, typed at and read as a person would."""

import contextlib
import fcntl
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

CTRL_C, CTRL_D = "\x03", "\x04"
START = """
import fcntl, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C is a signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in what a shell runs in the background
from jaxspec.cli import main
sys.exit(main(sys.argv[1:]))
"""
SEQUENCES = re.compile(r"\x1b\[[?0-9;]*[a-zA-Z]")
"""What commands a terminal."""


class Terminal:
    """Its `text` is all that the command has shown since the last `expect`."""

    def __init__(self, process: subprocess.Popen, side: int):
        self.process, self._side, self.text = process, side, ""

    def type(self, keys: str) -> None:
        os.write(self._side, keys.encode())

    def line(self, text: str) -> None:
        """A line, once it is asked for."""
        self.expect("> ")
        self.type(f"{text}\n")
        self.expect(f"{text}\n")  # the terminal's echo

    def interrupt(self, line: str, wanted: str) -> None:
        """Ctrl-C after the beginning of a line, until this text is shown: Python notices a Ctrl-C that comes between the prompt
        and its wait for a key only with the next one."""
        for _ in range(6):
            self.type(line + CTRL_C)
            with contextlib.suppress(AssertionError):
                self.expect(wanted, seconds=10)
                return
        raise AssertionError(f"{wanted!r} did not come after Ctrl-C; there is {self.text!r}")

    def expect(self, wanted: str, seconds: float = 60) -> str:
        """What is shown up to this text, without colours; the text itself is taken off."""
        deadline = time.monotonic() + seconds
        while wanted not in (shown := SEQUENCES.sub("", self.text).replace("\r\n", "\n")):
            assert time.monotonic() < deadline, f"{wanted!r} did not come in {seconds} s; there is {self.text!r}"
            if select.select([self._side], [], [], 0.1)[0]:
                new = self._read()
                assert new, f"{wanted!r} did not come before the end; there is {self.text!r}"
                self.text += new
        before, _, self.text = shown.partition(wanted)
        return before

    def end(self, seconds: float = 60) -> int:
        """The exit status."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it did not end in {seconds} s; there is {self.text!r}"
            if select.select([self._side], [], [], 0.1)[0]:
                self.text += self._read()
        return self.process.returncode

    def _read(self) -> str:
        try:
            return os.read(self._side, 4096).decode(errors="replace")
        except OSError:  # Linux: the other side is closed
            return ""


@contextlib.contextmanager
def typed(*arguments: str, cwd: Path | None = None, **environment: str) -> Iterator[Terminal]:
    """`jaxspec` with these arguments in a terminal."""
    side, child_side = pty.openpty()
    fcntl.ioctl(side, 0x5414, b"\x32\0\xc8\0\0\0\0\0")  # TIOCSWINSZ: 50 lines of 200 characters
    settings = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"} | environment
    command = [sys.executable, "-c", START, *arguments]
    child_end = {"stdin": child_side, "stdout": child_side, "stderr": child_side, "start_new_session": True}
    with subprocess.Popen(command, env=settings, cwd=cwd, **child_end) as process:
        os.close(child_side)
        try:
            yield Terminal(process, side)
        finally:
            process.kill()
            os.close(side)
