"""docs/speculative_decoding.ipynb runs and prints what it shows. `python -m tests.test_notebook --write` renews that."""

import contextlib
import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.install import FOLDER
from tests.live_server import optimizing
from tests.sets import needs_smollm2

NOTEBOOK = Path(__file__).parents[1] / "docs/speculative_decoding.ipynb"
CLIENTS = [*FOLDER.glob("openai*/lib/python3*/site-packages")]
"""Where OpenAI's library is, if not among our own packages: the newest is the last."""
SECTIONS = (
    "EAGLE-2 decoding",
    "EAGLE-2 decoding with `torch.compile`",
    "EAGLE-2 decoding with FR-Spec",
    "EAGLE-3 decoding",
    "Multi-token prediction",
)
"""SGLang's."""


def test_it_has_the_sections_of_sglangs_document():
    """Each with a server, a client, and what the answer was."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    text = "".join(f"\n{''.join(cell['source'])}" + "".join(map(str, cell.get("outputs", ()))) for cell in cells)
    parts = dict(part.split("\n", 1) for part in text.split("\n## ")[1:])
    assert tuple(parts)[:5] == SECTIONS
    for name in SECTIONS:
        words = ("launch_server_cmd(", "wait_for_server(", "terminate_process(", "'stream'")
        assert all(word in parts[name] for word in words), name


@pytest.mark.variants
@needs_smollm2
@pytest.mark.skipif(
    importlib.util.find_spec("openai") is None and not CLIENTS, reason="python -m tests.clients.install gets openai"
)
def test_the_notebook_prints_what_it_shows():
    command = [sys.executable, "-m", "tests.test_notebook"]
    ended = subprocess.run(command, env=optimizing(), capture_output=True, text=True, timeout=1800)
    assert ended.returncode == 0, ended.stderr[-3000:]
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    for cell, printed in zip(cells, json.loads(ended.stdout.splitlines()[-1]), strict=True):
        assert printed == "".join(line for output in cell["outputs"] for line in output["text"])


def main() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    sys.path += [str(folder) for folder in CLIENTS[-1:]]
    names: dict = {}
    printed = []
    for cell in cells:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec("".join(cell["source"]), names)
        printed.append(out.getvalue())
    print(json.dumps(printed))
    if "--write" in sys.argv:
        for number, (cell, text) in enumerate(zip(cells, printed, strict=True), 1):
            lines = text.splitlines(keepends=True)
            cell |= {"execution_count": number}
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
        NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
