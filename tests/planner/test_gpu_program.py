"""The GPU program, proven without a GPU: Llama-3.1-8B with its EAGLE-3 head in bfloat16, compiled for an H100 by XLA's compiler."""

import pytest

from jaxspec.config import SpecConfig
from jaxspec.planner.compile import CompiledCycle, CycleShape, compile_cycles
from tests.planner.configs import EAGLE3_LLAMA_8B, LLAMA_8B
from tests.planner.files import config_file

CONTEXT, VOCABULARY, LAYERS = 4096, 128256, 32
PLAIN = SpecConfig(num_steps=0)
SHAPES = [CycleShape(spec, batch, CONTEXT) for spec in (SpecConfig(5, 4, 8), SpecConfig(5, 8, 32), PLAIN) for batch in (1, 8)]
NAMES = [f"{shape.spec} batch {shape.batch}" for shape in SHAPES]


@pytest.fixture(scope="module")
def cycles(gpu_compiler, tmp_path_factory) -> dict[str, CompiledCycle]:
    """All of them, compiled once, in one process. A kernel that spills registers would make the compiler fail."""
    directory = tmp_path_factory.mktemp("llama")
    target, head = config_file(directory / "config.json", LLAMA_8B), config_file(directory / "head.json", EAGLE3_LLAMA_8B)
    compiled = compile_cycles(target, head, SHAPES, gpu="h100", dtype="bfloat16", refuse_spills=True)
    return dict(zip(NAMES, compiled, strict=True))


@pytest.mark.parametrize("name", NAMES)
class TestCycle:
    def test_is_one_graph(self, cycles, name):
        """From draft to extend nothing waits for the host: no loop, no copy to it, all in command buffers."""
        assert cycles[name].is_one_graph, [launch for launch in cycles[name].launches if not launch.in_graph]

    def test_updates_the_caches_in_place(self, cycles, name):
        assert cycles[name].cache_bytes > 0.5e9
        assert cycles[name].aliased_bytes >= cycles[name].cache_bytes

    def test_copies_no_weights(self, cycles, name):
        """Temporaries are a few arrays as large as the logits: one weight of one layer, copied, would be 235 MB more."""
        shape = SHAPES[NAMES.index(name)]
        logits = 4 * shape.batch * shape.spec.num_draft_tokens * VOCABULARY
        assert cycles[name].temporary_bytes < 5 * logits + 4e6
        if shape.batch == 1:
            assert cycles[name].temporary_bytes - logits < 64e6

    def test_launches_little_per_layer(self, cycles, name):
        assert 9 < cycles[name].per_layer(LAYERS) <= 11

    def test_every_layer_is_the_same(self, cycles, name):
        """What the count per layer rests on: the scopes are found, and no layer is fused with another."""
        found = [launch.layer for launch in cycles[name].greedy_launches if launch.stage == "verify" and launch.layer is not None]
        assert {found.count(layer) for layer in range(1, LAYERS - 1)} == {found.count(1)}


def test_memory_is_what_the_plan_counts(cycles):
    """Arguments are weights and state: counted from the configs they agree within a percent."""
    weights = 2 * (8_030_261_248 + 424_689_664)
    found = cycles[NAMES[0]]
    assert found.argument_bytes == pytest.approx(weights + found.cache_bytes, rel=0.01)
