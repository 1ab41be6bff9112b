"""schemathesis against the real server: for requests that /openapi.json allows or forbids, the responses are as it documents."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import numbers

SETUP = Path(__file__).parent / "openapi"
GENERATING = ("/v1/completions", "/v1/chat/completions", "/generate")


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_answers_are_as_documented(server, client, tmp_path, mode):
    """No 5xx, only the statuses, types and shapes that are documented; what is wrong by the document is refused."""
    program = client("schemathesis", "schemathesis")
    before = answered(server)
    folder = shutil.copytree(SETUP, tmp_path / "openapi")  # it writes files where it runs
    command = [program, "--no-color", "run", f"{server.url}/openapi.json", "--mode", mode]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout[-10_000:] + ended.stderr[-2000:]
    after = answered(server)
    kind = "2xx" if mode == "positive" else "4xx"
    assert all(after[path, kind] - before.get((path, kind), 0) >= 50 for path in GENERATING)  # else it would show little


def answered(server) -> dict[tuple[str, str], float]:
    """How many requests got an answer, by path and class of status."""
    counts = {}
    for sample, count in numbers(server, "http_requests_total").items():
        found = re.search(r'path="(.*?)",status="(.*?)"', sample)
        assert found, sample
        counts[found[1], found[2]] = count
    return counts
