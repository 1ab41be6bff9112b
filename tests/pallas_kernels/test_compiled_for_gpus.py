"""Every kernel compiles for the GPUs that it is for, without spilling registers, in as many launches as it should take."""

import json
import os
import re
import subprocess
import sys
from collections import Counter

import pytest

from jaxspec.planner.compile import why_not
from pallas_kernels.cutoff.pallas_triton import BLOCK, COUNTED, FEW, PIECES, TILE
from tests.pallas_kernels.issue_cycles import Loop, Program
from tests.sets import exhaustive

pytestmark = pytest.mark.gpu_compiler

SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@pytest.fixture(scope="module", params=["h100", exhaustive("a100")])
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


VOCAB, BEFORE = 128256, 1.63e6
"""A row's tokens, and the cycles of the kernel with one thread block per row, which read it 50 times (25 November 2026, H100)."""
MULTIPROCESSORS = 132
"""Of an H100, whose cycles those before are."""
BITS, ID_BITS = 32, 17
"""Passes of a search among the copied tokens for a logit, and then for one of equal tokens."""


def phase(program: Program, loop: Loop) -> str:
    """What a loop of cutoff_search does: each phase uses something that no other does."""
    if loop.has("st.global"):
        return "copy ids" if loop.has("shfl") else "copy bits and shares"  # of which only the first sums before each token
    if str(VOCAB) in loop.words:
        return "search the row itself"  # the only loops that compare ids with the size of the vocabulary
    if program.is_nested(loop):
        return "passes for bits" if loop.has("ex2") else "passes for equal tokens"  # of which only the first need a probability
    return "a pass over copies" if loop.has("ld.global") else "number of equal tokens"


@pytest.mark.parametrize("copied", [8192, 16384])
@pytest.mark.parametrize("rows", [1, 32])
def test_a_cut_off_issues_a_tenth_of_what_fifty_passes_did(compiled, rows, copied):
    """On the busiest multiprocessor, with the passes for equal tokens, if a sixteenth of the row is copied or an eighth."""
    programs = {}
    for name, (instructions, loops, warps) in compiled[0]["cutoff, 8 rows"]["programs"].items():
        programs[name] = Program(instructions, [Loop(*each) for each in loops], warps)
    pieces, count, search = (programs[f"cutoff_{part}"] for part in ("pieces", "count", "search"))
    assert (len(pieces.loops), len(count.loops)) == (0, 1)
    assert Counter(phase(search, loop) for loop in search.loops) == {
        "copy ids": 1,
        "copy bits and shares": 1,
        "search the row itself": 6,
        "passes for bits": 1,
        "passes for equal tokens": 1,
        "a pass over copies": 4,  # one in each of these, and two for the tokens above the found one and from it
        "number of equal tokens": 2,
    }
    rounds = {"copy ids": -(-VOCAB // BLOCK), "search the row itself": 0, "passes for bits": BITS}
    rounds |= dict.fromkeys(("copy bits and shares", "a pass over copies"), copied // FEW)
    rounds |= dict.fromkeys(("number of equal tokens", "passes for equal tokens"), ID_BITS)
    cycles = [
        -(-rows * PIECES // MULTIPROCESSORS) * pieces.cycles(),
        -(-rows * -(-VOCAB // COUNTED) // MULTIPROCESSORS) * count.cycles(lambda _: COUNTED // TILE),
        search.cycles(lambda loop: rounds[phase(search, loop)]),
    ]
    assert sum(cycles) <= BEFORE / 10, cycles


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
