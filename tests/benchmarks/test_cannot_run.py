"""A benchmark that can't run says what to install and exits with 2."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


CASES = {
    "benchmarks.report": "matplotlib",
    "benchmarks.speculative --trees 3/1/4": "matplotlib",
    "benchmarks.serving --base-url http://127.0.0.1:9": "aiohttp",
    "jaxspec bench report": "matplotlib",
}
"""Command lines after `python -m`, and the package that each misses first."""
RUN_EACH = """
import contextlib, io, json, runpy, sys, traceback
ended = {}
for line in sys.argv[1:]:
    for name in [name for name in sys.modules if name.split(".")[0] == "benchmarks"]:
        del sys.modules[name]
    sys.argv = line.split()
    status, said = 0, io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code
        except BaseException:
            traceback.print_exc()
            status = 1
    ended[line] = [status, said.getvalue()]
print(json.dumps(ended))
"""


class Ended(NamedTuple):
    """How a command ended."""

    status: int
    errors: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[str, Ended]:
    """All commands, one after the other in one process where neither package can be imported: starting one takes seconds."""
    folder = tmp_path_factory.mktemp("missing")
    for missing in CASES.values():
        (folder / f"{missing}.py").write_text("raise ImportError('not installed')")
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}
    command = [sys.executable, "-c", RUN_EACH, *CASES]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return {line: Ended(*how) for line, how in json.loads(run.stdout.splitlines()[-1]).items()}


@pytest.mark.variants
@pytest.mark.parametrize(("line", "missing"), CASES.items())
def test_a_missing_package_is_one_line_that_says_what_to_install(ended, line, missing):
    status, errors = ended[line]
    assert status == 2, errors
    assert missing in errors and "pip install 'jaxspec-llm[bench]'" in errors and "Traceback" not in errors
