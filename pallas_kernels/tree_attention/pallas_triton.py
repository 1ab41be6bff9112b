"""Tree attention as a Pallas kernel for NVIDIA GPUs from the A100 on (Pallas' Triton backend).

Flash-decoding (Dao et al. 2023, "Flash-Decoding for long-context inference"): the keys of a sequence, cached ones first and window
keys after them, are cut into blocks; the blocks are shared out among `splits` programs, each of which runs FlashAttention's online
softmax over its share; a second, small kernel merges the partial results. With one split the first kernel writes the
result itself. Query heads that share a KV head are rows of one tile: row r is window row r // group, head r % group of its group.

Offsets into the cache: Pallas computes them in 64 bits as soon as an array holds more than 2**32 bytes, and in 32 bits otherwise,
where fewer than 2**31 elements of two or four bytes cannot overflow. Those of one byte could: an engine allocates fewer pages.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int, Real

from pallas_kernels.fp8 import Scales, is_fp8, numbers
from pallas_kernels.tree_attention.packed_mask import BITS, pack_mask
from pallas_kernels.tree_attention.triton_tiling import Tiling, choose_tiling, unsupported

LOG2_E = math.log2(math.e)
LOWEST = -1e30  # the running maximum before any key: finite, so that a row without keys yet never computes inf - inf


@jax.named_scope("tree_attention_pallas_triton")
def pallas_triton_attention(
    q: Float[Array, "b w heads head_dim"],
    k_pages: Real[Array, "pages page kv_heads head_dim"],
    v_pages: Real[Array, "pages page kv_heads head_dim"],
    page_table: Int[Array, "b p"],
    start: Int[Array, " b"],
    length: Int[Array, " b"],
    k_window: Real[Array, "b s kv_heads head_dim"],
    v_window: Real[Array, "b s kv_heads head_dim"],
    mask: Bool[Array, "b w s"],
    scales: Scales | None = None,
    *,
    interpret: bool = False,
    tiling: Tiling | None = None,
) -> Float[Array, "b w heads head_dim"]:
    """`api.tree_attention` in at most two launches; `interpret` runs it on the CPU, slowly, for tests.

    tiling: None: `triton_tiling.choose_tiling` chooses. The GPU benchmark tries others.

    Raises:
        ValueError: `triton_tiling.unsupported` returns a reason.
    """
    if reason := unsupported(q, k_pages, v_pages, k_window, v_window):
        raise ValueError(f"pallas_triton_attention: {reason}")
    b, w, heads, head_dim = q.shape
    slots = page_table.shape[1] * k_pages.shape[1]
    if tiling is None:
        sizes = b, w, heads, k_window.shape[2], head_dim, slots, k_window.shape[1], q.dtype.itemsize
        tiling = choose_tiling(*sizes, fp8=is_fp8(k_window))
    packed = pack_mask(mask)
    cache = (page_table.astype(jnp.int32), k_pages, v_pages) if slots else ()
    stretch = (packed.first, packed.end) if k_window.shape[1] > tiling.keys else ()
    inputs = _Inputs(start.astype(jnp.int32), length.astype(jnp.int32), q, packed.bits, k_window, v_window, stretch, cache, scales)
    split_call = functools.partial(
        pl.pallas_call,
        functools.partial(_split_kernel, tiling=tiling),
        grid=(tiling.splits, tiling.row_blocks, k_window.shape[2], b),
        compiler_params=pltriton.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        interpret=interpret,
        name="tree_attention_split",
    )
    result = jax.ShapeDtypeStruct(q.shape, q.dtype)
    if tiling.splits == 1:
        return split_call(out_shape=result)(inputs)
    partial = jax.ShapeDtypeStruct((tiling.splits, *q.shape), jnp.float32)
    weight = jax.ShapeDtypeStruct((tiling.splits, *q.shape[:3]), jnp.float32)
    return pl.pallas_call(
        functools.partial(_merge_kernel, tiling=tiling),
        out_shape=result,
        grid=(heads, w, b),
        compiler_params=pltriton.CompilerParams(num_warps=tiling.merge_warps, num_stages=1),
        interpret=interpret,
        name="tree_attention_merge",
    )(*split_call(out_shape=(partial, weight))(inputs))


class _Inputs(NamedTuple):
    """The inputs of the split kernel: arrays outside of it, references inside."""

    start: Any
    length: Any
    q: Any
    bits: Any
    k_window: Any
    v_window: Any
    stretch: tuple
    """`first` and `end` of the packed mask, or nothing if the window is one block anyway."""
    cache: tuple
    """page_table, k_pages and v_pages, or nothing if there are no pages."""
    scales: Scales | None


def _split_kernel(inputs: _Inputs, *out_refs, tiling: Tiling):
    """One split of the keys for one tile of rows, one KV head and one sequence; the result, or a partial one and its weight."""
    split, row_block, kv_head, sequence = (pl.program_id(axis) for axis in range(4))
    rows = _Rows(tiling.row_blocks - 1 - row_block, kv_head, sequence, inputs.q.shape, tiling)  # causal rows: long tiles first

    # The blocks that this tile needs: cached ones, then window ones. They are dealt out evenly among the splits.
    start, length = inputs.start[sequence], inputs.length[sequence]
    first_cached, cached = _cached_blocks(start, length, tiling.keys) if inputs.cache else (0, 0)
    first_window, window = _window_blocks(rows, *inputs.stretch) if inputs.stretch else (0, 1)
    low = (cached + window) * split // tiling.splits
    high = (cached + window) * (split + 1) // tiling.splits

    q = pltriton.load(inputs.q.at[rows.place], mask=rows.mask, other=0)
    factor = LOG2_E / math.sqrt(rows.head_dim) * (1.0 if inputs.scales is None else inputs.scales.k[kv_head])
    running = (
        jnp.full(tiling.rows, LOWEST, jnp.float32),
        jnp.zeros(tiling.rows, jnp.float32),
        jnp.zeros((tiling.rows, tiling.padded_dim), jnp.float32),
    )
    if inputs.cache:

        def cached_block(i, running):
            k, v, seen = _load_cached(i, inputs.cache, start, length, rows)
            return _absorb(running, q, k, v, seen, factor)

        running = jax.lax.fori_loop(first_cached + low, first_cached + jnp.minimum(high, cached), cached_block, running)

    def window_block(i, running):
        k, v, seen = _load_window(i, (inputs.bits, inputs.k_window, inputs.v_window), rows)
        return _absorb(running, q, k, v, seen, factor)

    first_window -= cached
    running = jax.lax.fori_loop(first_window + jnp.maximum(low, cached), first_window + high, window_block, running)
    if inputs.scales is not None:
        running = *running[:2], running[2] * inputs.scales.v[kv_head]
    _store(running, out_refs, split, rows)


class _Rows:
    """The rows of one tile: where they lie in q and in the result, and which of them exist."""

    def __init__(self, row_block, kv_head, sequence, q_shape: tuple[int, ...], tiling: Tiling):
        _, w, _, self.head_dim = q_shape
        self.kv_head, self.sequence, self.tiling = kv_head, sequence, tiling
        row = row_block * tiling.rows + jnp.arange(tiling.rows, dtype=jnp.int32)
        self.window_row, self.head = row // tiling.group, kv_head * tiling.group + row % tiling.group
        self.exist = row < w * tiling.group
        self.dim = jnp.arange(tiling.padded_dim, dtype=jnp.int32)[None]
        self.place = (sequence, self.window_row[:, None], self.head[:, None], self.dim)
        self.mask = self.exist[:, None] & (self.dim < self.head_dim)


def _cached_blocks(start, length, keys: int):
    """(first block, number of blocks) that hold the slots start .. length - 1."""
    first = start // keys
    return first, jnp.where(start < length, pl.cdiv(length, keys) - first, 0)


def _window_blocks(rows: _Rows, first_ref, end_ref):
    """(first block, number of blocks) of the window keys that any row of the tile sees."""
    place, keys = (rows.sequence, rows.window_row), rows.tiling.keys
    first = jnp.min(pltriton.load(first_ref.at[place], mask=rows.exist, other=jnp.iinfo(jnp.int32).max)) // keys
    end = jnp.max(pltriton.load(end_ref.at[place], mask=rows.exist, other=0))
    return first, jnp.maximum(pl.cdiv(end, keys) - first, 0)


def _load_cached(block, cache_refs, start, length, rows: _Rows):
    """Keys and values [keys, padded_dim] of one block of slots, and which of them the rows see [1, keys]."""
    table_ref, k_ref, v_ref = cache_refs
    page_size = k_ref.shape[1]
    slot = block * rows.tiling.keys + jnp.arange(rows.tiling.keys, dtype=jnp.int32)
    seen = (start <= slot) & (slot < length)
    page = pltriton.load(table_ref.at[rows.sequence, slot // page_size], mask=seen, other=0)
    place = page[:, None], (slot % page_size)[:, None], rows.kv_head, rows.dim
    mask = seen[:, None] & (rows.dim < rows.head_dim)  # unseen slots become 0: they may hold NaN
    return pltriton.load(k_ref.at[place], mask=mask, other=0), pltriton.load(v_ref.at[place], mask=mask, other=0), seen[None]


def _load_window(block, window_refs, rows: _Rows):
    """Keys and values [keys, padded_dim] of one block of the window, and which of them each row sees [rows, keys]."""
    bits_ref, k_ref, v_ref = window_refs
    keys = rows.tiling.keys
    offset = jnp.arange(keys, dtype=jnp.int32)
    key = block * keys + offset
    word = jnp.zeros((rows.tiling.rows, keys), jnp.int32)
    for i in range(keys // BITS):
        index = block * (keys // BITS) + i
        exist = rows.exist & (index < bits_ref.shape[2])
        bits = pltriton.load(bits_ref.at[rows.sequence, rows.window_row, index], mask=exist, other=0)
        word = jnp.where(offset[None] // BITS == i, bits[:, None], word)
    place = rows.sequence, key[:, None], rows.kv_head, rows.dim
    mask = (key < k_ref.shape[1])[:, None] & (rows.dim < rows.head_dim)
    k, v = pltriton.load(k_ref.at[place], mask=mask, other=0), pltriton.load(v_ref.at[place], mask=mask, other=0)
    return k, v, (word >> (offset[None] % BITS)) & 1 == 1


def _absorb(running, q, k, v, seen, factor):
    """One block of keys enters the running (maximum, sum of weights, weighted sum of values); logits are base 2."""
    maximum, total, values = running
    k, v = numbers(k, q.dtype), numbers(v, q.dtype)
    logits = _dot(q, k, trans_b=True) * factor
    logits = jnp.where(seen, logits, -jnp.inf)
    new_maximum = jnp.maximum(maximum, jnp.max(logits, 1))
    weights = jnp.exp2(logits - new_maximum[:, None])
    fade = jnp.exp2(maximum - new_maximum)
    return (
        new_maximum,
        total * fade + jnp.sum(weights, 1),
        values * fade[:, None] + _dot(weights.astype(v.dtype), v),
    )


def _dot(a, b, trans_b: bool = False):
    """A product accumulated in float32; float32 inputs keep their full precision instead of TF32's."""
    return pltriton.dot(a, b, trans_b=trans_b, precision="highest" if a.dtype == jnp.float32 else None)


def _store(running, out_refs, split, rows: _Rows):
    """Writes the result, or a partial result and the log-sum-exp (base 2) that weighs it against the other splits."""
    maximum, total, values = running
    values = values / total[:, None]
    if len(out_refs) == 1:
        (out_ref,) = out_refs
        pltriton.store(out_ref.at[rows.place], values.astype(out_ref.dtype), mask=rows.mask)
        return
    partial_ref, weight_ref = out_refs
    filled = total > 0  # a row that saw no key here writes only that it weighs nothing
    pltriton.store(partial_ref.at[(split, *rows.place)], values, mask=rows.mask & filled[:, None])
    log_sum = jnp.where(filled, maximum + jnp.log2(total), -jnp.inf)
    pltriton.store(weight_ref.at[split, rows.sequence, rows.window_row, rows.head], log_sum, mask=rows.exist)


def _merge_kernel(partial_ref, weight_ref, out_ref, *, tiling: Tiling):
    """The splits' results for one row and head, weighted by their log-sum-exps; a chunk of splits at a time."""
    head, window_row, sequence = (pl.program_id(axis) for axis in range(3))
    place, head_dim = (sequence, window_row, head), out_ref.shape[3]
    dim = jnp.arange(tiling.padded_dim, dtype=jnp.int32)

    def log_sums(split):
        return pltriton.load(weight_ref.at[(split, *place)], mask=split < tiling.splits, other=-jnp.inf)

    every = log_sums(jnp.arange(pl.next_power_of_2(tiling.splits), dtype=jnp.int32))
    maximum = jnp.max(every)  # finite: every row sees a key
    total = jnp.sum(jnp.exp2(every - maximum))

    def chunk(i, merged):
        split = i * tiling.merge_splits + jnp.arange(tiling.merge_splits, dtype=jnp.int32)
        weight = log_sums(split)
        # A split that saw no key has written nothing: its memory may hold NaN.
        mask = (weight > -jnp.inf)[:, None] & (dim < head_dim)[None]
        values = pltriton.load(partial_ref.at[(split[:, None], *place, dim[None])], mask=mask, other=0)
        return merged + jnp.sum(values * jnp.exp2(weight - maximum)[:, None], 0)

    chunks = pl.cdiv(tiling.splits, tiling.merge_splits)
    merged = jax.lax.fori_loop(0, chunks, chunk, jnp.zeros(tiling.padded_dim, jnp.float32)) / total
    pltriton.store(out_ref.at[(*place, dim)], merged.astype(out_ref.dtype), mask=dim < head_dim)
