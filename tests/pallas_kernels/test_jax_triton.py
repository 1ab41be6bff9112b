"""skinny_matmul in Triton itself: without its packages it is refused by name, with them it compiles and is captured in a graph."""

import importlib.util
import json
import os
import subprocess
import sys

import jax.numpy as jnp
import pytest

from jaxspec.planner.compile import why_not
from pallas_kernels.skinny_matmul import skinny_matmul


def test_without_its_packages_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    monkeypatch.delitem(sys.modules, "pallas_kernels.skinny_matmul.jax_triton", raising=False)
    with pytest.raises(ImportError, match=r"jax_triton needs jax-triton and triton: pip install 'jaxspec-llm\[jax-triton\]'"):
        skinny_matmul(jnp.ones((1, 8)), jnp.ones((8, 8)), implementation="jax_triton")


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("gpu", ["h100", "a100"])
def test_compiles_and_is_captured(gpu):
    if importlib.util.find_spec("jax_triton") is None:
        pytest.skip("jax-triton is not installed: pip install 'jaxspec-llm[jax-triton]'")
    if reason := why_not(gpu):
        pytest.skip(reason)
    environment = os.environ | {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "tests.pallas_kernels.gpu_compiler", gpu, "jax_triton"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    assert len(answers) == 6
    for answer in answers:
        assert answer.get("launches") == ["kCustomCall"] and answer["in_graph"], answer
