"""The program for eight GPUs, proven without them: a 70B's sizes, cut to eight layers, compiled for H100s that are described."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from jaxspec.planner.compile import WITHOUT_GPU, CompiledCycle, CycleShape, compile_cycles
from jaxspec.tree_shape import PLAIN, TreeShape
from tests.planner.configs import EAGLE3_LLAMA_8B, LLAMA_8B, config_file
from tests.sets import exhaustive

GPUS, LAYERS, CONTEXT, VOCABULARY = 8, 8, 4096, 128256
SIZES = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
CHAIN, WIDE = TreeShape(3, 1, 4), TreeShape(5, 4, 8)
SHAPES, MORE = (
    [CycleShape(tree, batch, CONTEXT) for tree, batch in each]
    for each in (((CHAIN, 1), (WIDE, 8), (PLAIN, 1)), ((CHAIN, 8), (WIDE, 1), (PLAIN, 8)))
)


def named(shape: CycleShape) -> str:
    return f"{shape.tree} batch {shape.batch}"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("70b")
    target = config_file(directory / "target.json", LLAMA_8B | SIZES | {"num_hidden_layers": LAYERS})
    return target, config_file(directory / "head.json", EAGLE3_LLAMA_8B | SIZES)


@pytest.fixture(scope="module")
def compiled_for(gpu_compiler, files) -> Callable[[CycleShape, int], CompiledCycle]:
    """A cycle for so many GPUs, compiled once: that takes a minute."""
    return cache(lambda shape, tp: compile_cycles(*files, [shape], gpu="h100", dtype="bfloat16", tp=tp)[0])


@pytest.mark.parametrize("shape", [*SHAPES, *map(exhaustive, MORE)], ids=named)
def test_a_cycle_of_eight_gpus_is_one_graph(compiled_for, shape):
    compiled, steps = compiled_for(shape, GPUS), shape.tree.num_steps
    assert compiled.is_one_graph and not compiled.touches_host and not compiled.library_calls
    expected = {"all-reduce": 2 * LAYERS + 1 + 3 * steps, "all-gather": steps + 2 if steps else 1}
    assert Counter(each.kind for each in compiled.collectives) == expected
    logits = 4 * shape.batch * shape.tree.num_draft_tokens * VOCABULARY
    assert max(each.nbytes for each in compiled.collectives) <= logits
    layers = Counter(launch.layer for launch in compiled.greedy_launches if launch.layer is not None)
    # Without drafts the output projection bears the last layer's name, too: XLA calls it after the norm that it reads.
    assert max(layers[layer] for layer in range(1, LAYERS if steps else LAYERS - 1)) <= 13, layers


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], *map(exhaustive, (SHAPES[1], *MORE))], ids=named)
def test_each_has_an_eighth(compiled_for, shape):
    eighth, one = (compiled_for(shape, gpus) for gpus in (GPUS, 1))
    print(named(shape), eighth.argument_bytes / one.argument_bytes, eighth.temporary_bytes / one.temporary_bytes)
    assert eighth.argument_bytes <= 0.126 * one.argument_bytes
    assert eighth.temporary_bytes <= 1.3 * one.temporary_bytes


WITH_XLAS_GRAPHS = """
import json, sys
from dataclasses import fields
from pathlib import Path
from jaxspec.tree_shape import PLAIN
from jaxspec.placement import Placement
from jaxspec.planner import worker
from jaxspec.planner.compile import CycleShape

class Default(worker.Described):
    def compiler_options(self, **_):
        return Placement().compiler_options(platform="cuda")

model, scratch = map(Path, sys.argv[1:])
two = worker.gpus("h100", 2)
placement = Default(**{field.name: getattr(two, field.name) for field in fields(two)})
shape = CycleShape(PLAIN, 1, 64)
found = worker.compile_cycle(
    worker.read_target(model), None, "bfloat16", placement, shape, refuse_spills=False, scratch=str(scratch)
)
(scratch / "outside.json").write_text(json.dumps([kind for kind, _, _, in_graph, *_ in found["launches"] if not in_graph]))
"""


def test_with_xlas_own_graphs_the_proof_fails(gpu_compiler, tmp_path):
    """Sums between GPUs are not in its list of what a graph may contain."""
    model = config_file(tmp_path / "target.json", LLAMA_8B | {"num_hidden_layers": 1})
    command = [sys.executable, "-c", WITH_XLAS_GRAPHS, str(model), str(tmp_path)]
    subprocess.run(command, check=True, env=os.environ | WITHOUT_GPU, timeout=600)
    assert "kAllReduce" in json.loads((tmp_path / "outside.json").read_text())
