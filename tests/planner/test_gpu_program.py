"""The GPU program, proven without a GPU: real models with their heads, compiled for an H100 by XLA's compiler.

The targets are cut to eight layers. A layer's launches don't depend on how many there are (every layer is
compared with the next), nor do graph, spills and temporaries, which are those of the logits. So only compile time is saved.
"""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest

from jaxspec.config import FP8
from jaxspec.decoding.sampling import NODES_AT_ONCE
from jaxspec.decoding.settings import SamplingKind
from jaxspec.decoding.top import FEW
from jaxspec.planner.compile import CompiledCycle, CycleShape, Quantizations, compile_cycles
from jaxspec.planner.estimate import pair
from jaxspec.planner.models import read_head, read_target
from jaxspec.tree_shape import PLAIN, TreeShape
from tests.planner.configs import (
    DFLASH_QWEN3_8B,
    EAGLE3_LLAMA_8B,
    EAGLE3_QWEN3_8B,
    EAGLE_LLAMA_2_7B,
    LLAMA_2_7B,
    LLAMA_8B,
    MIMO_7B,
    QWEN3_8B,
    config_file,
)
from tests.sets import exhaustive

CONTEXT, LAYERS, HIDDEN, INTERMEDIATE = 4096, 8, 4096, 14336
FEW_LAYERS = 7
"""An EAGLE-3 head taps the target's layers 2, 3 and 4 of so many."""
TREES = (TreeShape(5, 4, 8), TreeShape(5, 8, 32))
CHAINS = (TreeShape(3, 1, 4), TreeShape(7, 1, 8))
MOST_LAUNCHES = {str(PLAIN): (108, 114), "3/1/4": (179, 225), "5/4/8": (255, 330), "7/1/8": (257, 350)}
"""Of a greedy cycle, and of one with top_p, top_k or min_p; batch 1."""
KERNELS = {
    *("rms_norm", "norm_pair", "add_norm", "rotate_qkv", "tree_attention_split", "tree_attention_merge", "cache_write"),
    *("cutoff_pieces", "cutoff_count", "cutoff_search", "topk"),
}
"""All of them ours but the last, which is XLA's."""


KEPT_NOISE = 2.2 if jax.__version_info__ >= (0, 12) else 3.2
"""Copies of a cycle's noise that XLA keeps at once. jax 0.11.2 has one more."""


class Case(NamedTuple):
    """A model, its head, and the cycles to compile."""

    target: dict[str, Any]
    head: dict[str, Any] | None
    dtype: str
    shapes: list[CycleShape]


IN_8_BITS = CycleShape(TreeShape(5, 4, 8), 8, CONTEXT, kv_cache_dtype=FP8)
CASES = {
    "Llama-3.1-8B": Case(
        LLAMA_8B, EAGLE3_LLAMA_8B, "bfloat16", [CycleShape(tree, 1, CONTEXT) for tree in (TREES[0], CHAINS[0], PLAIN)]
    ),
    "MiMo-7B": Case(MIMO_7B, MIMO_7B, "bfloat16", [CycleShape(TreeShape(1, 1, 2), 1, CONTEXT)]),
    "Qwen3-8B": Case(QWEN3_8B, EAGLE3_QWEN3_8B, "bfloat16", [CycleShape(TreeShape(3, 1, 4), 8, CONTEXT)]),
}
MORE_CASES = {
    "Llama-3.1-8B, more": Case(
        LLAMA_8B,
        EAGLE3_LLAMA_8B,
        "bfloat16",
        [*(CycleShape(tree, batch, CONTEXT) for tree, batch in ((TREES[0], 8), (TREES[1], 8), (CHAINS[1], 1))), IN_8_BITS],
    ),
    "Llama-2-7B": Case(LLAMA_2_7B, EAGLE_LLAMA_2_7B, "float16", [CycleShape(TreeShape(7, 1, 8), 1, CONTEXT - 8)]),
}
"""For the exhaustive set. A cycle takes 35 CPU seconds, however many layers there are."""


def named(cases: dict[str, Case]) -> dict[str, tuple[str, CycleShape]]:
    """Model and cycle by a test's name."""
    return {
        f"{model} {shape.tree} batch {shape.batch}{', 8-bit cache' * (shape.kv_cache_dtype == FP8)}": (model, shape)
        for model, case in cases.items()
        for shape in case.shapes
    }


NAMES = named(CASES | MORE_CASES)


def compile_case(directory: Path, case: Case, layers: int = LAYERS, **how: Any) -> list[CompiledCycle]:
    """Compiles a model's cycles in one process. A kernel that spills registers would make the compiler fail."""
    target = config_file(directory / "config.json", case.target | {"num_hidden_layers": layers})
    head = target if case.head is case.target else case.head and config_file(directory / "head.json", case.head)
    return compile_cycles(target, head, case.shapes, **{"gpu": "h100", "dtype": case.dtype, "refuse_spills": True, **how})


@pytest.fixture(scope="module")
def compiled(gpu_compiler, tmp_path_factory):
    """A cycle by name; a model's cycles are compiled once."""
    models = cache(lambda model: compile_case(tmp_path_factory.mktemp("model"), (CASES | MORE_CASES)[model]))

    def cycle(name: str) -> CompiledCycle:
        model, shape = NAMES[name]
        return models(model)[(CASES | MORE_CASES)[model].shapes.index(shape)]

    return cycle


def check_graph(cycle: CompiledCycle, kernels: set[str] = KERNELS) -> None:
    """Nothing from draft to extend waits for the host: no loop, no copy to it, no library, all is in command buffers. Nothing is
    sorted, no other kernels are called, and the caches are updated in place."""
    outside = [launch for launch in cycle.launches if not launch.in_graph]
    assert cycle.is_one_graph, (outside, cycle.touches_host, cycle.library_calls)
    assert set(cycle.kernel_calls) <= kernels and not cycle.sorts
    assert cycle.aliased_bytes >= cycle.cache_bytes > 0


@pytest.mark.parametrize("name", [*named(CASES), *map(exhaustive, named(MORE_CASES))])
class TestCycle:
    def test_is_one_graph_of_our_kernels(self, compiled, name):
        cycle = compiled(name)
        check_graph(cycle)
        assert cycle.kernel_calls["rotate_qkv"] >= LAYERS and cycle.cache_bytes > 0.1e9

    def test_copies_no_weights(self, compiled, name):
        """Temporaries are the logits and, one after the other, adjusted ones of some nodes with the noise of num_steps + 1
        positions, and what the cut-off copies, as many bytes as the logits, beside the nodes' keys, values and features. One weight
        of one layer, copied, would be 180 MB or more."""
        model, shape = NAMES[name]
        temporaries, nodes = compiled(name).temporary_bytes, shape.tree.num_draft_tokens
        vectors = 4 * shape.batch * (CASES | MORE_CASES)[model].target["vocab_size"]
        adjusted, noise = vectors * min(nodes, NODES_AT_ONCE), vectors * (shape.tree.num_steps + 1)
        if shape.batch == 1:
            assert temporaries - vectors * nodes < 64e6
        if model.startswith("Llama-3.1-8B"):
            of_nodes = 2 * shape.batch * nodes * (2 * LAYERS * 8 * 128 + 4 * HIDDEN)
            copies = 1.01 * vectors * nodes
            assert temporaries < vectors * nodes + max(copies + of_nodes, adjusted + KEPT_NOISE * noise) + 4e6

    def test_launches_little_per_layer(self, compiled, name):
        assert 9 <= in_layers(compiled(name)).count(1) <= 11

    def test_packs_the_mask_of_a_tree_once_and_that_of_a_chain_never(self, compiled, name):
        """A chain's is constant, so the compiler packs it. (Not looked at: 32 nodes, whose packing has
        another name, and plain decoding, whose mask XLA packs on the device if the batch is larger than 1.)"""
        spec = NAMES[name][1].tree
        scopes = [launch.scope for launch in compiled(name).greedy_launches if launch.stage == "verify"]
        packing = [scope for scope in scopes if "tree_attention" in scope and scope.endswith("reduce_sum")]
        if spec.num_steps and spec.num_draft_tokens <= 8:
            assert len(packing) == (spec.topk > 1)

    def test_every_layer_is_the_same(self, compiled, name):
        """What the count per layer rests on: the scopes are found, and no layer is fused with another."""
        found = in_layers(compiled(name))
        assert {found.count(layer) for layer in range(1, LAYERS - 1)} == {found.count(1)}


@pytest.mark.parametrize("name", [*named({"Llama-3.1-8B": CASES["Llama-3.1-8B"]}), exhaustive("Llama-3.1-8B, more 7/1/8 batch 1")])
def test_sampled_cycles_launch_little_more_than_greedy_ones(compiled, name):
    cycle = compiled(name)
    greedy, temperature, filtered, adjusted = (len(cycle.launches_of(kind)) for kind in SamplingKind)
    assert greedy < temperature < filtered < adjusted
    most_greedy, most_filtered = MOST_LAUNCHES[str(NAMES[name][1].tree)]
    assert greedy <= most_greedy and filtered <= most_filtered


def test_more_than_16_candidates_of_a_node_are_found_without_a_sort(gpu_compiler, tmp_path):
    """Nor does the branch of log probabilities, which wants 20, sort."""
    case = CASES["Llama-3.1-8B"]._replace(shapes=[CycleShape(TreeShape(2, 20, 32), 1, CONTEXT)])
    (found,) = compile_case(tmp_path, case, FEW_LAYERS, refuse_spills=False)
    assert found.is_one_graph and not [sort for sort in found.sorts if sort.size > FEW]


def test_a_prefill_is_one_graph(gpu_compiler, tmp_path):
    """A chunk of any size, of one prompt and of several: no loop and no conditional that the host runs, so that no launch waits."""
    shapes = [CycleShape(PLAIN, batch, CONTEXT, prefill_chunk=chunk) for chunk, batch in ((256, 1), (16, 8))]
    for found in compile_case(tmp_path, CASES["Llama-3.1-8B"]._replace(shapes=shapes)):
        check_graph(found)


HALVES_ADD = 3
"""Launches of the second half's verification beside a whole cycle's: the masks' bits are spread and cut off the logits, and the
nodes' places are added up."""


@pytest.mark.parametrize(
    ("tree", "batch"), [(TreeShape(2, 2, 4), 8), *(exhaustive(tree, batch) for tree in (*TREES, *CHAINS) for batch in (1, 8))]
)
def test_a_cycle_in_two_is_two_graphs(gpu_compiler, tmp_path, tree, batch):
    """Requests under grammars: nothing within a half waits for the host, which adds three launches, whatever the sampling."""
    shapes = [CycleShape(tree, batch, CONTEXT, half=half) for half in ("", "propose", "settle")]
    programs = compile_case(tmp_path, CASES["Llama-3.1-8B"]._replace(shapes=shapes), FEW_LAYERS)
    for program in programs:
        check_graph(program)
    cycle, propose, settle = programs
    assert propose.stages["draft"] and "verify" not in propose.stages and "draft" not in settle.stages
    for kind in SamplingKind if tree == TreeShape(2, 2, 4) else ():  # what else the host's tree costs was not measured
        whole, under = ([launch for launch in each.launches_of(kind) if launch.stage == "verify"] for each in (cycle, settle))
        assert len(under) <= len(whole) + HALVES_ADD, (kind, [launch.scope for launch in under])


def test_a_block_takes_few_launches(gpu_compiler, tmp_path):
    """DFlash with five layers, a block of 16 tokens and Qwen3-8B: one graph, and 0.7 times the launches of an EAGLE-3 head."""
    dflash = {"mask_token_id": 151669, "target_layer_ids": [0, 1, 3, 4, 5]}
    block = DFLASH_QWEN3_8B | {"num_target_layers": LAYERS, "dflash_config": dflash}
    levels, tree = ([CycleShape(each, 1, CONTEXT)] for each in (TreeShape(7, 1, 8), TreeShape(7, 4, 16)))
    (one_by_one,) = compile_case(tmp_path, Case(QWEN3_8B, EAGLE3_QWEN3_8B, "bfloat16", levels))
    (at_once,) = compile_case(tmp_path, Case(QWEN3_8B, block, "bfloat16", tree))
    check_graph(at_once)
    few, many = (sum(found.stages[stage] for stage in ("draft", "extend")) for found in (at_once, one_by_one))
    assert few <= 0.7 * many


@pytest.mark.parametrize("has_head", [True, exhaustive(False)])
def test_drafts_from_the_text_are_in_the_graph(gpu_compiler, tmp_path, has_head):
    """Alone, and merged with those of an EAGLE-3 head."""
    case = Case(QWEN3_8B, EAGLE3_QWEN3_8B if has_head else None, "bfloat16", [CycleShape(TREES[0], 1, CONTEXT, ngram=True)])
    (found,) = compile_case(tmp_path, case, FEW_LAYERS)
    check_graph(found)
    assert found.stages["find"] and ("merge" in found.stages) == has_head


QUANTISED = [("h100", "int4", 0.28), ("a100", "int8", 0.51), exhaustive("h100", "fp8", 0.51), exhaustive("a100", "fp8", 0.51)]
"""GPU, quantisation, and the most bytes of the layers beside those of bfloat16."""


@pytest.mark.parametrize(("gpu", "quantization", "share"), QUANTISED)
def test_weights_of_8_and_4_bits(gpu_compiler, tmp_path, gpu, quantization, share):
    """One graph of our kernels, which unpack what they read: nothing as large as a weight is written. Arguments are as planned."""
    case = CASES["Llama-3.1-8B"]._replace(shapes=[CycleShape(TREES[0], 1, CONTEXT)])
    (found,) = compile_case(tmp_path, case, gpu=gpu, quantization=Quantizations(quantization, quantization))
    check_graph(found, KERNELS | {"skinny_matmul"})
    assert found.kernel_calls["skinny_matmul"] >= 4 * LAYERS
    assert found.temporary_bytes < 20e6 < HIDDEN * INTERMEDIATE / 2  # the smallest of a layer's large matrices, in 4 bits
    model = read_target(tmp_path / "config.json", quantization)
    planned = pair(model, read_head(tmp_path / "head.json", model, quantization=quantization), "bfloat16")
    assert found.argument_bytes == pytest.approx(planned.weights + found.cache_bytes, rel=0.01)
    for size in (planned.target, planned.head):
        assert size.weights.layers <= share * size.dense.layers


def in_layers(cycle: CompiledCycle) -> list[int]:
    """The target's layer of each launch that belongs to one."""
    return [launch.layer for launch in cycle.greedy_launches if launch.stage == "verify" and launch.layer is not None]


def test_memory_is_what_the_plan_counts(compiled):
    """Arguments are weights and state: counted from the configs they agree within a percent."""
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    weights = 2 * (LAYERS * layer + 2 * 128256 * 4096 + 4096 + 424_689_664)
    found = compiled("Llama-3.1-8B 5/4/8 batch 1")
    assert found.argument_bytes == pytest.approx(weights + found.cache_bytes, rel=0.01)
