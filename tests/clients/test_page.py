"""docs/structured.md's examples, as they are, with SmolLM2 and a server on it."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live_server import optimizing, running_server
from tests.sets import needs_smollm2

ROOT = Path(__file__).parents[2]
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs/structured.md").read_text(), re.DOTALL)
URL = "http://127.0.0.1:30000"
"""The page's."""
SMALL = "--model-path smollm2 --max-running-requests 1 --context-length 1024 --chunked-prefill-size 256"
ENVIRONMENTS = {"jaxspec": None, "langchain_openai": "agents", "instructor": "frameworks", "agents": "agents"}
"""Where an example runs, by what it imports; None: in ours."""
pytestmark = needs_smollm2


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_server(tmp_path_factory.mktemp("smollm2"), *SMALL.split(), usual=()) as server:
        yield server.url


def test_the_page_has_these_examples():
    assert [[name for name in ENVIRONMENTS if name in imported(each)] for each in EXAMPLES] == [[each] for each in ENVIRONMENTS]


@pytest.mark.parametrize("library", ENVIRONMENTS)
def test_an_example(request, client, library):
    [example] = [each for each in EXAMPLES if library in imported(each)]
    environment = ENVIRONMENTS[library]
    if environment is not None:
        python, served = str(client(environment, "python")), request.getfixturevalue("url")
        assert URL in example
        example = example.replace(URL, served)
    else:
        python = sys.executable
    ended = subprocess.run(
        [python, "-c", example], cwd=ROOT, env=optimizing(), capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "Paris" in ended.stdout, ended.stdout
    assert ("inhabitants" in ended.stdout) == (library != "agents"), ended.stdout


def imported(example: str) -> set[str]:
    """The packages that an example imports."""
    nodes = [*ast.walk(ast.parse(example))]
    plain = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    return plain | {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
