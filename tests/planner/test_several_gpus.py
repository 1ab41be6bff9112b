"""The program for eight GPUs, proven without them: a 70B's sizes, cut to eight layers, compiled for H100s that are described."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from jaxspec.config import PLAIN, TreeShape
from jaxspec.planner.compile import WITHOUT_GPU, CompiledCycle, CycleShape, compile_cycles
from tests.planner.configs import EAGLE3_LLAMA_8B, LLAMA_8B
from tests.planner.files import config_file

GPUS, LAYERS, CONTEXT, VOCABULARY = 8, 8, 4096, 128256
SIZES = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
SHAPES = [CycleShape(tree, batch, CONTEXT) for tree, batch in ((TreeShape(3, 1, 4), 1), (TreeShape(5, 4, 8), 8), (PLAIN, 1))]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("70b")
    target = config_file(directory / "target.json", LLAMA_8B | SIZES | {"num_hidden_layers": LAYERS})
    return target, config_file(directory / "head.json", EAGLE3_LLAMA_8B | SIZES)


def cycles(files: tuple[Path, Path], shapes: list[CycleShape], tp: int) -> list[CompiledCycle]:
    return compile_cycles(*files, shapes, gpu="h100", dtype="bfloat16", tp=tp)


@pytest.fixture(scope="module")
def of_eight(gpu_compiler, files) -> dict[CycleShape, CompiledCycle]:
    return dict(zip(SHAPES, cycles(files, SHAPES, GPUS), strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.tree} batch {shape.batch}")
def test_a_cycle_of_eight_gpus_is_one_graph(of_eight, shape):
    compiled, steps = of_eight[shape], shape.tree.num_steps
    assert compiled.is_one_graph
    expected = {"all-reduce": 2 * LAYERS + 1 + 3 * steps, "all-gather": steps + 2 if steps else 1}
    assert Counter(each.kind for each in compiled.collectives) == expected
    logits = 4 * shape.batch * shape.tree.num_draft_tokens * VOCABULARY
    assert max(each.nbytes for each in compiled.collectives) <= logits
    layers = Counter(launch.layer for launch in compiled.greedy_launches if launch.layer is not None)
    # Without drafts the output projection bears the last layer's name, too: XLA calls it after the norm that it reads.
    assert max(layers[layer] for layer in range(1, LAYERS if steps else LAYERS - 1)) <= 13, layers


def test_each_has_an_eighth(gpu_compiler, files, of_eight):
    for shape, one in zip((SHAPES[0], SHAPES[2]), cycles(files, [SHAPES[0], SHAPES[2]], 1), strict=True):
        eighth = of_eight[shape]
        assert eighth.argument_bytes <= 0.126 * one.argument_bytes
        assert eighth.temporary_bytes <= 1.3 * one.temporary_bytes


WITH_XLAS_GRAPHS = """
import json, sys
from dataclasses import fields
from pathlib import Path
from jaxspec.config import PLAIN
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
