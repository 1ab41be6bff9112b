"""Every kernel compiles for the GPUs that it is for, without spilling registers, in as many launches as it should take."""

import json
import os
import re
import subprocess
import sys

import pytest

from jaxspec.gpu_program.compiled import why_not

SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@pytest.fixture(scope="module", params=["h100", "a100"])
def compiled(request) -> tuple[dict[str, dict], str]:
    """What the compiler made of each kernel, and what it printed about Mosaic's."""
    if reason := why_not(request.param):
        pytest.skip(reason)
    environment = os.environ | {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "MOSAIC_GPU_DUMP_PTXAS": "1", "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "tests.pallas_kernels.gpu_compiler", request.param]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    return {answer["name"]: answer for answer in answers}, done.stdout + done.stderr


def test_all_compile_and_nothing_spills(compiled):
    kernels, printed = compiled
    assert {name: answer["error"] for name, answer in kernels.items() if "error" in answer} == {}
    assert all(found == ("0", "0") for found in SPILLS.findall(printed))
    assert bool(SPILLS.findall(printed)) == any(name.startswith("mosaic") for name in kernels)


def test_attention_takes_two_launches_and_one_to_pack_the_mask(compiled):
    for name, answer in compiled[0].items():
        if name.startswith("pallas_triton"):
            mine = [kernel for kernel in answer["launches"] if kernel.startswith("tree_attention")]
            assert 1 <= len(mine) <= 2 and len(answer["launches"]) - len(mine) <= 2, (name, answer)


def test_the_others_take_one(compiled):
    kernels = {name: answer["launches"] for name, answer in compiled[0].items() if "attention" not in name}
    assert len(kernels) == 8
    for name, launches in kernels.items():
        mine = [kernel for kernel in launches if kernel.startswith(name.split(",")[0])]
        assert len(mine) == {"cache_write, 32 layers": 2, "cache_write, 80 layers": 5}.get(name, 1), launches
