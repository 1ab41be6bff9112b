"""A benchmark that can't run says what to install and exits with 2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (["benchmarks.report"], "matplotlib"),
        (["benchmarks.speculative", "--trees", "3/1/4"], "matplotlib"),
        (["benchmarks.serving", "--base-url", "http://127.0.0.1:9"], "aiohttp"),
        (["jaxspec", "bench", "report"], "matplotlib"),
    ],
)
def test_a_missing_package_is_one_line_that_says_what_to_install(arguments, missing, tmp_path):
    (tmp_path / f"{missing}.py").write_text("raise ImportError('not installed')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    run = subprocess.run([sys.executable, "-m", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 2, run.stderr
    assert missing in run.stderr and "pip install 'jaxspec-llm[bench]'" in run.stderr and "Traceback" not in run.stderr
