"""Agents' libraries, unchanged, against a server on the built-in model: structured output, tools and loops of them."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients import install
from tests.clients.conftest import reported
from tests.live_server import FLAGS, running_server

HERE = Path(__file__).parent
SCRIPTS = {
    "openai_agents.py": "agents",
    "langchain_checks.py": "agents",
    "pydantic_ai_checks.py": "agents",
    "instructor_checks.py": "frameworks",
    "litellm_checks.py": "frameworks",
    "llama_index_checks.py": "frameworks",
}
"""And the environments that they run in."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The built-in model knows no tools: a template tells it their names, and grammars do the rest."""
    tools = ("--tool-call-parser", "hermes", "--chat-template", str(HERE / "tools.jinja"))
    with running_server(tmp_path_factory.mktemp("server"), *tools, usual=FLAGS) as server:
        yield server.url


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_agents_library(client, url, script):
    environment = SCRIPTS[script]
    report = reported(client(environment, "python"), HERE / "scripts" / script, url)
    wanted = dict(each.replace("[openai]", "").split("==") for each in install.CLIENTS[environment])
    assert report["versions"].items() & wanted.items() and report["passed"]


def test_the_ai_sdk(url):
    """Wherever there is node, and npm's registry could be reached."""
    if not install.is_installed("ai_sdk"):
        pytest.skip(f"{', '.join(install.NODE_CLIENTS['ai_sdk'])} is not installed: {install.why_missing('ai_sdk')}")
    node = shutil.which("node")
    assert node is not None
    report = reported(node, HERE / "scripts/ai_sdk_checks.mjs", url, folder=install.FOLDER / "ai_sdk")
    assert f"ai@{report['versions']['ai']}" in install.NODE_CLIENTS["ai_sdk"]
