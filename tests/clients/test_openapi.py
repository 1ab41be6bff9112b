"""schemathesis against the real server: for requests that /openapi.json allows or forbids, the responses are as it documents."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import numbers
from tests.clients.grammar import send
from tests.clients.test_load import resident_bytes

SETUP = Path(__file__).parent / "openapi"
GENERATING = ("/v1/completions", "/v1/chat/completions", "/generate")
TRANSLATED = ("/v1/responses", "/v1/messages")
"""A schema says less of their items and blocks: more of the requests are refused."""


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
    few = {path: count for path in TRANSLATED if (count := after.get((path, kind), 0) - before.get((path, kind), 0)) < 20}
    assert not few


def test_whatever_is_sent_is_answered_or_refused_and_nothing_is_kept(server, requests=3000):
    """A tenth of the requests warm up; memory is compared with what it is then."""
    statuses = send(server.url, requests // 10, seed=0)
    sizes = [resident_bytes(server)]
    statuses += send(server.url, requests - requests // 10, seed=100)
    sizes.append(resident_bytes(server))
    print(f"{dict(statuses)}, {[size >> 20 for size in sizes]} MiB")
    assert statuses[200] > requests / 20 and statuses[400] > requests / 5, statuses
    assert sizes[1] < 1.1 * sizes[0], [f"{size / 2**20:.0f} MiB" for size in sizes]


def answered(server) -> dict[tuple[str, str], float]:
    """How many requests got an answer, by path and class of status."""
    counts = {}
    for sample, count in numbers(server, "http_requests_total").items():
        found = re.search(r'path="(.*?)",status="(.*?)"', sample)
        assert found, sample
        counts[found[1], found[2]] = count
    return counts
