"""The time model: the figures of the review that it was taken from, and the parts by hand."""

import pytest

from jaxspec.planner.compile import CompiledCycle, Launch
from jaxspec.planner.estimate import cycle_cost, pair
from jaxspec.planner.gpus import GPUS
from jaxspec.planner.models import read_head, read_target
from jaxspec.planner.time_model import EXCHANGE, Kind, LaunchCounts, counts_of, time_model
from jaxspec.tree_shape import PLAIN, TreeShape
from tests.planner.configs import DFLASH_QWEN3_8B, QWEN3_8B, config_file

CHAIN = TreeShape(3, 1, 4)
REVIEWED = LaunchCounts(products=4, attention=2, norms=2, rotations=1, sums=4, level=29, extension=27, tree=12, other=39)
"""The program that the review counted."""


@pytest.mark.parametrize(
    ("gpu", "spec", "milliseconds"),
    [
        ("h200", PLAIN, 4.85),
        ("h200", CHAIN, 5.6),
        ("h200", TreeShape(7, 1, 8), 6.6),
        ("h100", PLAIN, 6.5),
        ("h100", CHAIN, 7.5),
        ("h100", TreeShape(7, 1, 8), 8.9),
    ],
)
def test_the_review_s_table(llama, gpu, spec, milliseconds):
    """Batch 1, 1k context. (Numbers of a model: no GPU was used for them.)"""
    assert sum(time_model(llama, spec, 1, 1024, GPUS[gpu], REVIEWED).values()) == pytest.approx(milliseconds, rel=0.02)


def test_plain_by_hand(llama):
    parts = time_model(llama, PLAIN, 1, 1024, GPUS["h200"], copy_speed=4e12)
    layer = 2 * (4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336) + 2 * 4096)
    assert parts["target: weights"] == pytest.approx(1e3 * (32 * layer + 2 * 4096 * 128257) / (0.93 * 4e12))
    assert parts["target: ramp and tail of products"] == pytest.approx(129 * 0.002)
    assert parts["target: attention"] == pytest.approx(32 * 0.008 + 1e3 * 1024 * 131072 / 4e12)
    assert (parts["target: norms"], parts["target: rotation"]) == (pytest.approx(65 * 0.002), pytest.approx(32 * 0.002))
    assert not any(part.startswith(("head", "tree")) for part in parts)


def test_launches_are_parameters(llama):
    def modelled(spec: TreeShape, **changes: float) -> float:
        return sum(time_model(llama, spec, 1, 1024, GPUS["h200"], LaunchCounts(**changes)).values())

    assert modelled(PLAIN, sums=4) - modelled(PLAIN, sums=2) == pytest.approx(64 * 0.002)
    assert modelled(CHAIN, level=29) - modelled(CHAIN, level=15) == pytest.approx(2 * 14 * 0.002)
    assert modelled(PLAIN) == modelled(PLAIN, level=15)


def test_a_block_costs_one_forward_at_any_depth(tmp_path):
    """Launches of one more forward of five layers, and exchanges of that forward."""
    target = read_target(config_file(tmp_path / "target.json", QWEN3_8B))
    models = pair(target, read_head(config_file(tmp_path / "head.json", DFLASH_QWEN3_8B), target), "bfloat16", 2)
    flat, deep = (time_model(models, TreeShape(steps, 1), 1, 1024, GPUS["h200"]) for steps in (3, 7))
    assert deep["head: attention"] == flat["head: attention"]
    assert deep["head: launches of the levels"] < 0.002 * (LaunchCounts.level + 4 * LaunchCounts().layer)
    assert deep["exchanges between GPUs"] - flat["exchanges between GPUs"] < 1e3 * EXCHANGE


def test_levels_that_are_left_to_n_grams_cost_nothing_of_the_head(llama):
    """But that it absorbs one token more per level. With no level it reads its weights once, for these, and computes no logits."""
    full, shallow, limited, none = (
        time_model(llama, TreeShape.of(tree), 1, 1024, GPUS["h200"], kind=1) for tree in ("7/4/8", "3/4/8", "7/4/8/3", "7/4/8/0")
    )
    of_head = [name for name in full if name.startswith("head: ")]
    assert [limited[name] for name in of_head] == pytest.approx([shallow[name] for name in of_head], rel=0.01)
    assert sum(none.values()) < sum(shallow.values()) < sum(full.values()) and none["head: launches of the levels"] == 0
    costs = [cycle_cost(llama, TreeShape.of(tree), 1, 1024).moved for tree in ("7/4/8/0", "1/4/5")]
    assert costs[0]["head weights"] == costs[1]["head weights"] and costs[0]["head logits' weights"] == 0


def test_many_rows_take_the_time_of_their_arithmetic(llama):
    few, many = (time_model(llama, TreeShape(5, 8, 32), batch, 1024, GPUS["h200"])["target: weights"] for batch in (1, 64))
    assert few == time_model(llama, PLAIN, 1, 1024, GPUS["h200"])["target: weights"] and many > 4 * few


def test_a_filtered_cycle_takes_at_most_8_percent_more(llama):
    def modelled(tree: TreeShape, kind: int) -> float:
        return sum(time_model(llama, tree, 1, 1024, GPUS["h200"], kind=kind).values())

    for tree in (PLAIN, CHAIN, TreeShape(5, 4, 8), TreeShape(7, 1, 8)):
        greedy, temperature, filtered, adjusted = (modelled(tree, kind) for kind in range(4))
        assert greedy < temperature < filtered < adjusted and filtered <= 1.08 * greedy


def test_a_host_that_launches_every_kernel_is_waited_for(llama):
    """5 us for each of a layer's 109 launches."""
    many = LaunchCounts(sums=100)
    with_graph, without = (time_model(llama, PLAIN, 1, 1024, GPUS["h200"], many, in_graph=each) for each in (True, False))
    assert sum(without.values()) == pytest.approx(1e3 * 5e-6 * (32 * 109 + 2 + 23)) and "launches by the host" in list(without)[-1]
    assert sum(without.values()) > sum(with_graph.values())


def launch(kernel: str, scope: str) -> Launch:
    return Launch("kCustomKernel", kernel, f"jit(cycle)/{scope}/x", in_graph=True)


def test_counts_of_a_compiled_cycle():
    layer = ["rms_norm", "gemm_fusion_dot_1", "rotate_qkv", "tree_attention_split", "tree_attention_merge", "loop_add_fusion"]
    launches = [launch(kernel, f"verify/layer_{number}") for number in range(2) for kernel in ["once"] * (number == 0) + layer]
    launches += (
        [launch("x", "draft/y")] * 6 + [launch("x", "extend")] * 5 + [launch("x", "build_tree")] * 4 + [launch("x", "accept")] * 3
    )
    launches += [launch("rms_norm", "verify"), launch("gemm_fusion_dot_2", "verify"), launch("y", "advance")]
    found = counts_of(CompiledCycle(1.0, 0, 0, 0, 0, False, tuple(launches), {}, (), {}), CHAIN)
    assert found == LaunchCounts(1, 2, 1, 1, 1, level=3, extension=5, tree=7, other=2, kinds=(Kind(0, 0, 0),) * 4)


def test_counts_of_kinds():
    greedy = [launch("x", scope) for scope in ("verify/layer_0", "verify/layer_1", "verify")]
    more = {"draft/y": 6, "verify/choose": 5, "learn": 4}
    sampled = [launch("x", scope)._replace(kinds=(2,)) for scope, number in more.items() for _ in range(number)]
    compiled = CompiledCycle(1.0, 0, 0, 0, 0, False, (*greedy, *sampled), {}, (), {})
    assert counts_of(compiled, CHAIN).kinds == (Kind(0, 0, 0), Kind(0, 0, 0), Kind(5, 2, 4), Kind(0, 0, 0))
