"""What the tests of clients share: the environments that they need, and a server that is idle again after each of them."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.clients import install
from tests.live_server import LiveServer

IDLE_SECONDS = 10
"""For the engine to drop what clients left behind. Mostly one cycle: some ten milliseconds."""
GAUGES = ("running_requests", "waiting_requests", "cache_used_pages")


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Callable[[str, str], Path]:
    """Finds a program of a client's environment, such as ("openai3", "python"); skips the test if the environment is missing."""

    def find(name: str, command: str) -> Path:
        if not install.is_installed(name):
            reason = f"{', '.join(install.CLIENTS[name])} is not installed: run python -m tests.clients.install"
            (pytest.fail if request.config.getoption("--require-clients") else pytest.skip)(reason)
        return install.program(name, command)

    return find


@pytest.fixture
def server(live_server: LiveServer) -> Iterator[LiveServer]:
    """The server of this run. Whatever a test does to it, afterwards it is idle, holds no pages, and counts no failed step."""
    yield live_server
    wait_until_idle(live_server)
    assert gauge(live_server, "failed_steps_in_a_row") == 0


def reported(*command: Path | str, folder: Path | None = None) -> dict:
    """What a client's script reports. Fails with what it printed last."""
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.splitlines()[-1])


def wait_until_idle(server: LiveServer, seconds: float = IDLE_SECONDS) -> float:
    """Waits until nothing runs or waits and all pages are back; returns how long that took."""
    began = time.monotonic()
    while busy := {name: value for name in GAUGES if (value := gauge(server, name))}:
        assert time.monotonic() < began + seconds, f"after {seconds} s the server still has {busy}"
        time.sleep(0.02)
    return time.monotonic() - began


def gauge(server: LiveServer, name: str) -> float:
    """One of our numbers in /metrics."""
    return sum(numbers(server, name).values())


def numbers(server: LiveServer, name: str) -> dict[str, float]:
    """A number of /metrics for each of its labels."""
    found, text = {}, httpx.get(f"{server.url}/metrics", timeout=60).text
    assert f"# TYPE jaxspec:{name} " in text
    for line in text.splitlines():
        sample, _, value = line.rpartition(" ")
        if sample.partition("{")[0] == f"jaxspec:{name}":
            found[sample] = float(value)
    return found
