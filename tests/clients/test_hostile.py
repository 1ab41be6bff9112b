"""Requests that know the API and mean no good, to a server whose model thinks and calls tools."""

import asyncio

import httpx
import pytest

from tests.clients.conftest import wait_until_idle
from tests.clients.hostile import send
from tests.clients.test_load import resident_bytes
from tests.live_server import running_server
from tests.server.fakes import TOOL_TEMPLATE

CANARY = {"prompt": "def f(x):\n", "max_tokens": 40, "temperature": 0}


@pytest.fixture(scope="module")
def of_tools(tmp_path_factory):
    folder = tmp_path_factory.mktemp("of_tools")
    template = folder / "tools.jinja"
    template.write_text(TOOL_TEMPLATE)
    flags = ("--chat-template", str(template), "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    with running_server(folder, *flags, optimized=False) as server:
        yield server


@pytest.mark.exhaustive
def test_each_request_has_its_answers_and_leaves_nothing(of_tools, requests=2000):
    """No 5xx, no hang, no answer to what is hidden after or in a request. (20,000: python -m tests.clients.hostile.)"""

    def canary() -> str:
        answer = httpx.post(f"{of_tools.url}/v1/completions", json=CANARY, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    text, sizes, statuses = canary(), [], []
    for seed in (1, 2):
        statuses.append(asyncio.run(send(of_tools.url, requests // 2, seed)))
        wait_until_idle(of_tools)
        assert canary() == text
        sizes.append(resident_bytes(of_tools))
    print(f"{[dict(found) for found in statuses]}, {[size >> 20 for size in sizes]} MiB")
    assert all(found[200] > requests / 20 and found[400] > requests / 8 for found in statuses), statuses
    assert sizes[1] < 1.1 * sizes[0], sizes
