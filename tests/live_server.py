"""The real server on the built-in model as a process of its own, as users run it."""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

START_SECONDS = 1800
"""Compiling on a busy machine."""
END_SECONDS = 90
"""Running requests have 30 s to finish after SIGTERM."""
FLAGS = ("--max-running-requests", "2", "--speculative-request-trees", "0 3/1/4")


@dataclass(frozen=True)
class LiveServer:
    """A server process that answers."""

    url: str
    pid: int
    log: Path


@contextlib.contextmanager
def running_server(
    folder: Path, *flags: str, usual: tuple[str, ...] = FLAGS, optimized: bool = True, module: str = "jaxspec.serve"
) -> Iterator[LiveServer]:  # fmt: skip
    """Starts a server with the usual flags and more; yields it when it is ready. Afterwards it must end in order, and its log may
    hold no traceback.

    optimized: False: its programs compile in half the time, and run at half the speed. module: what runs it.
    """
    log = folder / "server.log"
    command = [sys.executable, "-m", module, "--port", "0", *usual, *flags]
    environment = (optimizing() if optimized else dict(os.environ)) | {"PYTHONUNBUFFERED": "1"}
    with log.open("w") as sink, subprocess.Popen(command, stderr=sink, env=environment) as process:
        try:
            yield LiveServer(url_in(log, process), process.pid, log)
            process.terminate()
            status = process.wait(END_SECONDS)
        finally:
            process.kill()
    assert status == 0, f"the server ended with status {status}:\n{end_of(log)}"
    assert "Traceback" not in log.read_text(), f"something failed in the server: see {log}"


def wait_for_programs(server: LiveServer) -> None:
    """Waits until each tree that requests may ask for has its programs: until then they get the engine's own tree."""
    deadline = time.monotonic() + START_SECONDS
    while (programs := httpx.get(f"{server.url}/server_info", timeout=60).json()["programs"])["ready"] < programs["total"]:
        assert time.monotonic() < deadline, f"after {START_SECONDS} s, compiled are {programs}"
        time.sleep(0.1)


def optimizing() -> dict[str, str]:
    """The environment of a process whose programs run long: without the flags of tests/conftest.py."""
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}


def url_in(log: Path, process: subprocess.Popen) -> str:
    """Where the server listens, once its log says so. Fails if it ends before, or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        if found := re.search(r"is ready at (http://\S+)", log.read_text()):
            return found[1]
        assert not ended, f"the server ended with status {process.returncode}:\n{end_of(log)}"
        time.sleep(0.1)
    raise AssertionError(f"the server was not ready within {START_SECONDS} s:\n{end_of(log)}")


def end_of(log: Path) -> str:
    """The last lines, for messages."""
    return "\n".join(log.read_text().splitlines()[-20:])
