"""openai-python, both majors that are in use, against the real server: see scripts/openai_checks.py for what is asked."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.clients.install import CLIENTS

SCRIPT = Path(__file__).parent / "scripts/openai_checks.py"


@pytest.mark.parametrize("major", [2, 3])
def test_openai_python(server, client, major):
    python = client(f"openai{major}", "python")
    ended = subprocess.run([python, SCRIPT, server.url], capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert f"openai=={report['version']}" in CLIENTS[f"openai{major}"]
    assert len(report["checks"]) >= 12
    failures = [f"{name}:\n{problem}" for name, problem in report["checks"].items() if problem is not None]
    assert not failures, "\n".join(failures)
