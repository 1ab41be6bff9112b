"""How fast is attention alone, with each implementation and with other tiles? And the peak that all figures are compared with."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tree_attention.api import tree_attention
from pallas_kernels.tree_attention.pallas_triton import pallas_triton_attention
from pallas_kernels.tree_attention.triton_tiling import MERGE_SPLITS, choose_tiling

from .arrays import PAGE
from .checks import ORDER, compiled
from .lab import Cases, Lab, random_array
from .products import changes

BATCHES, ROWS, CHAINED = (1, 8, 64), (8, 1, 32), 16
"""Of `times`; calls of attention in one program."""
SHAPES = ((8, 1024), (4, 1024), (1, 1024), (8, 32768))
"""Rows and context of `tiles`."""
TILES = {"splits": (4, 8, 16, 32), "keys": (32, 64, 128), "stages": (1, 2, 3, 4), "warps": (2, 4, 8)}
"""What `tiles` tries, one setting at a time."""


def copy(lab: Lab) -> Cases:
    """The measured peak of the device, which all other figures are compared with."""
    yield {}, lambda: {"bytes_per_second": lab.bandwidth}


def times(lab: Lab) -> Cases:
    """Every implementation of attention at all sizes."""
    for name, batch, context, rows in itertools.product(ORDER, lab.few(BATCHES), lab.size.contexts, lab.few(ROWS)):
        case = {"implementation": name, "batch": batch, "context": context, "rows": rows}
        yield case, partial(time_attention, lab, name, partial(tree_attention, implementation=name), batch, context, rows)


def tiles(lab: Lab) -> Cases:
    """The Triton kernel at batch 1: as it chooses its tiles, and with each setting changed."""
    for rows, context in lab.few(SHAPES):
        config, width = lab.size.target, -(-context // PAGE) * PAGE
        heads = config.num_heads, config.num_kv_heads, config.head_dim
        for changed, tiling in changes(choose_tiling(1, rows, *heads, width, rows, lab.dtype.itemsize), TILES):
            if changed.startswith("splits"):
                merged = min(MERGE_SPLITS, tiling.splits)
                tiling = replace(tiling, merge_splits=merged, merge_warps=max(1, min(4, merged * tiling.padded_dim // 512)))
            attention = partial(pallas_triton_attention, tiling=tiling)
            case = {"rows": rows, "context": context, "changed": changed}
            yield case, partial(time_attention, lab, "pallas_triton", attention, 1, context, rows)


def time_attention(lab: Lab, name: str, function: Callable, batch: int, context: int, rows: int) -> dict[str, Any]:
    """Microseconds per call, and the share of the copy's bandwidth at which keys and values of context and window were read.

    A program chains calls that together read more than the GPU's own cache holds. All caches are parts of one large pool, selected
    by page tables, so a chain copies nothing.
    """
    config, dtype, width = lab.size.target, lab.dtype, -(-context // PAGE)
    per_token = 2 * config.num_kv_heads * config.head_dim * dtype.itemsize
    needed = lab.size.more_than_caches / (batch * context * per_token)
    caches = 1 if needed <= 1 else -(-math.ceil(needed) // CHAINED) * CHAINED
    attention = jax.jit(function)  # traced once for the whole chain

    def chain(tables, q, k_pool, v_pool, k, v, start, length, mask):
        for number in range(CHAINED):
            q = attention(q, k_pool, v_pool, tables[number], start, length, k, v, mask)
        return q

    pages = (caches * batch * width, PAGE, config.num_kv_heads, config.head_dim)
    window = (batch, rows, config.num_kv_heads, config.head_dim)
    q, *pools = (
        random_array(seed, shape, dtype, 1.0)
        for seed, shape in enumerate(((batch, rows, config.num_heads, config.head_dim), pages, pages, window, window))
    )
    length = jnp.full(batch, context, jnp.int32)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((rows, rows), bool)), (batch, rows, rows))
    arguments = (q, *pools, jnp.zeros_like(length), length, mask)
    scattered = np.random.default_rng(0).permutation(pages[0]).reshape(caches, batch, width).astype(np.int32)
    groups = [scattered[first : first + CHAINED] for first in range(0, caches, CHAINED)]
    tables = [jnp.asarray(np.resize(group, (CHAINED, batch, width))) for group in groups]
    program = compiled(lab, name, lambda: jax.jit(chain).lower(tables[0], *arguments).compile())
    turn = itertools.cycle(tables)
    microseconds = [1e3 * value / CHAINED for value in lab.time(lambda: program(next(turn), *arguments), most_calls=1000)]
    moved = batch * (context + rows) * per_token
    return {"microseconds": microseconds, "bytes": moved, "share": moved / lab.bandwidth / (median(microseconds) / 1e6)}
