"""openai-python, both majors that are in use, against the real server: see scripts/openai_checks.py for what is asked."""

from pathlib import Path

import pytest

from tests.clients.conftest import reported
from tests.clients.install import CLIENTS

SCRIPT = Path(__file__).parent / "scripts/openai_checks.py"


@pytest.mark.parametrize("major", [2, 3])
def test_openai_python(server, client, major):
    report = reported(client(f"openai{major}", "python"), SCRIPT, server.url)
    assert f"openai=={report['version']}" in CLIENTS[f"openai{major}"]
    assert len(report["checks"]) >= 12
    failures = [f"{name}:\n{problem}" for name, problem in report["checks"].items() if problem is not None]
    assert not failures, "\n".join(failures)
