"""Sizes of the Triton kernel's tiles."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import pallas as pl

from pallas_kernels.tree_attention.triton_tiling import PROGRAMS, choose_tiling

LLAMA = {"heads": 32, "kv_heads": 8, "head_dim": 128, "itemsize": 2}


@pytest.mark.parametrize("w", [1, 8, 32, 64])
def test_decoding_one_sequence_fills_the_gpu(w):
    tiling = choose_tiling(b=1, w=w, slots=8192, s=w, **LLAMA)
    assert 0.9 * PROGRAMS <= tiling.splits * tiling.row_blocks * LLAMA["kv_heads"] <= 1.1 * PROGRAMS


def test_large_batches_and_long_prefills_need_no_merge():
    assert choose_tiling(b=32, w=8, slots=8192, s=8, **LLAMA).splits == 1
    assert choose_tiling(b=1, w=2048, slots=8192, s=2048, **LLAMA).splits == 1


def test_the_example_of_the_docstring():
    tiling = choose_tiling(b=1, w=8, slots=8192, s=8, **LLAMA)
    expected = dict(
        group=4, rows=32, keys=64, padded_dim=128, row_blocks=1, splits=16, warps=4, stages=3, merge_splits=16, merge_warps=4
    )
    assert dataclasses.asdict(tiling) == expected


@given(
    st.integers(1, 64), st.integers(1, 300), st.integers(1, 8), st.integers(1, 8), st.integers(1, 256), st.integers(0, 9999),
    st.sampled_from([2, 4]), st.booleans(),
)  # fmt: skip
def test_every_row_has_a_place_in_tiles_that_triton_takes(b, w, group, kv_heads, head_dim, slots, itemsize, fp8):
    tiling = choose_tiling(b, w, group * kv_heads, kv_heads, head_dim, slots, w, itemsize, fp8=fp8)
    for size in (tiling.rows, tiling.keys, tiling.padded_dim, tiling.merge_splits, tiling.warps, tiling.merge_warps):
        assert size == pl.next_power_of_2(size)
    assert (tiling.row_blocks - 1) * tiling.rows < w * group <= tiling.row_blocks * tiling.rows
    assert tiling.splits >= 1 and tiling.padded_dim >= head_dim
    assert tiling.splits < 16 or tiling.splits % tiling.merge_splits == 0
