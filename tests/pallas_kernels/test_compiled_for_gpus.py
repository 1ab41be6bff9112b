"""Every kernel compiles for the GPUs that it is for, without spilling registers, in as many launches as it should take."""

import json
import os
import re
import subprocess
import sys
from statistics import mode

import pytest

from jaxspec.planner.compile import why_not
from tests.pallas_kernels.issue_cycles import SCHEDULERS, Program

pytestmark = pytest.mark.gpu_compiler

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


def test_attention_takes_one_or_two_launches_and_as_many_to_pack_the_mask(compiled):
    """Two where the keys of a sequence are split: always at batch 1, unless many rows fill the GPU."""
    for name, answer in compiled[0].items():
        if name.startswith("pallas_triton"):
            mine = [kernel for kernel in answer["launches"] if kernel.startswith("tree_attention")]
            rows = int(re.search(r", (\d+) x", name)[1])
            assert len(mine) == 2 or (len(mine) == 1 and (rows >= 256 or "batch 8" in name)), (name, answer)
            assert len(answer["launches"]) - len(mine) in ((1,) if rows <= 32 else (1, 2)), (name, answer)


BEFORE = 1.63e6
"""Cycles of the kernel with one thread block per row, which read a row of 128,256 fifty times (25 November 2026)."""
PASSES, WHOLE_PASS = 35, 100
"""Over the copied tokens: one for their shares, 32 for bits, two for ties, none of which is cut. And what ends each."""


def test_a_cut_off_issues_a_tenth_of_what_fifty_passes_did(compiled):
    """On the busiest of 132 multiprocessors, if 8192 tokens are copied: twice what one of 17 equal ranges has."""
    programs = {name: Program(*each) for name, each in compiled[0]["cutoff, 8 rows"]["programs"].items()}
    pieces, count, search = (programs[f"cutoff_{part}"] for part in ("pieces", "count", "search"))
    lengths = [last - first + 1 for first, last in search.loops]  # the row is copied in the first; those over copies are short
    copying, usual = lengths[0], mode(length for length in lengths if length < 100)
    for rows in (1, 32):
        cycles = -(-rows * 16 // 132) * pieces.cycles([]) + -(-rows * 63 // 132) * count.cycles([16])
        cycles += (search.instructions + 63 * copying + PASSES * (WHOLE_PASS + 8 * usual)) * search.warps / SCHEDULERS
        assert cycles <= BEFORE / 10, (rows, cycles)


def test_the_others_take_one(compiled):
    kernels = {name: answer["launches"] for name, answer in compiled[0].items() if "attention" not in name}
    assert len(kernels) == 50
    several = {
        "32 layers, 8 KV heads": 2,
        "80 layers, 8 KV heads": 5,
        "32 layers, 32 KV heads": 8,
        "40 layers, 40 KV heads": 20,
        "cutoff": 3,
    }
    for name, launches in kernels.items():
        mine = [kernel for kernel in launches if kernel.startswith(name.split(",")[0])]
        assert len(mine) == next((count for what, count in several.items() if what in name), 1), (name, launches)
        product = "product" in name or "add_norm" in name
        if "cache_write" not in name:  # whose caches are copied, as this program does not own them
            assert len(launches) <= len(mine) + product, (name, launches)
