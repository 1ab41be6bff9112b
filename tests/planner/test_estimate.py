"""Memory and cycles: the sums by hand, and what must hold whatever the sizes."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.planner.estimate import Memory, cycle_cost, pair
from jaxspec.planner.gpus import GPUS
from jaxspec.testing import random_eagle, random_head, tiny_target
from jaxspec.tree_shape import TreeShape

PLAIN = TreeShape(num_steps=0)
SIZES = st.integers(1, 64)


def test_a_plain_step_by_hand(llama):
    step = cycle_cost(llama, PLAIN, batch=2, context=1000)
    matrices = 2 * (8_030_261_248 - 128256 * 4096)  # the embedding is not read
    assert step.moved == {"target weights": matrices, "target cache": 2 * 1000 * 128 * 1024, "logits": 2 * 4 * 2 * 128256}
    attention = 4 * 1000 * 32 * 4096  # queries with keys, weights with values
    assert step.operations == pytest.approx(2 * (matrices + attention), rel=0.001)


def test_a_cycle_by_hand(llama):
    step = cycle_cost(llama, TreeShape(3, 2, 6), batch=1, context=1000)
    layer = 2 * ((4096 + 2 * 1024) * 2 * 4096 + 4096 * 4096 + 3 * 4096 * 14336)
    head = 3 * layer + 2 * 3 * 4096 * 4096  # levels 2 and 3 and the extension; fc in the extension only
    assert step.moved["head weights"] == pytest.approx(head, rel=0.001)
    assert step.moved["head logits' weights"] == 3 * 2 * 32000 * 4096  # levels 1, 2 and 3
    assert step.moved["head cache"] == 3 * 1000 * 4096
    assert step.moved["target cache"] == 1000 * 128 * 1024  # once for all six nodes
    assert step.moved["logits"] == 2 * 4 * (6 * 128256 + 5 * 32000)  # rows of levels 1, 2, 3: one, two, two
    assert sum(step.moved.values()) == pytest.approx(15.01e9 + 1.46e9 + 0.79e9 + 0.15e9, rel=0.03)


def test_the_limits_are_the_data_sheet_s(llama):
    step, gpu = cycle_cost(llama, PLAIN, 1, 1), GPUS["h100"]
    assert step.seconds(gpu) == step.memory_seconds(gpu) == sum(step.moved.values()) / 3.35e12
    many = cycle_cost(llama, TreeShape(5, 8, 32), 64, 1)
    assert many.seconds(gpu) == many.arithmetic_seconds(gpu) > many.memory_seconds(gpu)


def test_a_head_without_an_output_reads_the_target_s():
    target = tiny_target()
    models = pair(target.config, random_eagle(target.config).config, "float32")
    step = cycle_cost(models, TreeShape(2, 1, 3), 1, 0)
    assert step.moved["head logits' weights"] == 2 * 4 * target.config.vocab_size * target.config.hidden_size


def test_a_cache_of_8_bits_takes_half():
    target = tiny_target()
    head = random_eagle(target.config).config
    wide, narrow, mixed = (
        pair(target.config, head, "bfloat16", **kinds)
        for kinds in ({}, {"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8_e4m3", "draft_kv_cache_dtype": "auto"})
    )
    assert wide.target.cache == 2 * narrow.target.cache and narrow.weights == wide.weights
    assert wide.head.cache == 2 * narrow.head.cache == mixed.head.cache and mixed.target == narrow.target


def test_gpus_share_everything_evenly(llama):
    spread = replace(llama, tp=4)
    assert spread.weights == llama.weights // 4 and spread.cache == llama.cache // 4
    one, some = (cycle_cost(models, TreeShape(), 3, 100) for models in (llama, spread))
    assert some.moved == {name: size / 4 for name, size in one.moved.items()} and some.operations == one.operations / 4


def test_kv_heads_are_repeated_where_there_are_fewer_than_gpus():
    two, four, three = (pair(tiny_target().config, None, "bfloat16", tp) for tp in (2, 4, 3))
    assert two.cache == four.cache == three.cache // 2  # 4 heads, 2 KV heads: three GPUs have all of them


def test_heads_that_gpus_can_t_divide_are_whole_on_each():
    """Weights, what a cycle reads and what it computes; two GPUs divide the heads, three don't."""
    one, two, three = (pair(tiny_target(num_heads=4).config, None, "float32", tp) for tp in (1, 2, 3))
    attention = 8 * 4 * (32 * (32 + 2 * 16) + 32 * 32)  # layers of q, k and v, and o
    norms = 4 * 17 * 32
    assert two.weights == (one.weights + norms) // 2
    assert three.weights == (one.weights + 2 * (attention + norms)) // 3
    costs = [cycle_cost(models, PLAIN, 1, 1000) for models in (one, two, three)]
    for models, cost in zip((two, three), costs[1:], strict=True):
        assert cost.moved["target weights"] == (models.target.weights.layers + models.target.weights.projection) / models.tp
    scores = 4 * 1000 * 8 * 32
    assert costs[2].operations > scores + 2 * attention / 4 > costs[1].operations > costs[0].operations / 2


def test_a_tree_needs_a_head():
    with pytest.raises(ValueError, match="needs a draft head"):
        cycle_cost(pair(tiny_target().config, None, "bfloat16"), TreeShape(), 1, 1)


def test_memory_by_hand():
    memory = Memory(total=1000, jax_share=0.75, mem_fraction=0.8, weights=100, cache_per_token=10, page_size=4)
    assert (memory.managed, memory.left_free, memory.room) == (750, pytest.approx(150), 500)
    assert memory.tokens == 48  # 12 pages of 4 tokens of 10 bytes; half a page is none
    assert memory.requests(10) == 4  # 3 pages each


def test_a_cache_of_8_bits_has_no_more_entries_than_kernels_can_address():
    """In each of its arrays, on one GPU, as the engine limits it; a head's cache, too, if it is of 8 bits."""
    target = tiny_target(num_kv_heads=4, num_heads=4).config
    head = random_head(target, layer={"num_kv_heads": 4, "head_dim": 16}).config
    fp8 = {"kv_cache_dtype": "fp8_e4m3"}
    assert pair(target, head, "bfloat16").most_tokens == math.inf
    assert pair(target, None, "bfloat16", **fp8).most_tokens == 2**31 // 32
    assert pair(target, None, "bfloat16", 2, **fp8).most_tokens == 2**31 // 16
    assert pair(target, head, "bfloat16", **fp8).most_tokens == 2**31 // 64
    memory = Memory(1e12, 1, 1, weights=0, cache_per_token=10, page_size=16, most_tokens=1000)
    assert memory.tokens == 992 and replace(memory, most_tokens=math.inf).tokens == 1e11


@given(weights=st.integers(0, 2000), cache=SIZES, page=SIZES, context=SIZES)
def test_what_fits_fits(weights, cache, page, context):
    memory = Memory(1000, 0.75, 0.8, weights, cache, page)
    assert memory.tokens * cache <= max(0, memory.room) and memory.tokens % page == 0
    assert memory.requests(context) * context <= memory.tokens
    assert replace(memory, weights=weights + 10).tokens <= memory.tokens
