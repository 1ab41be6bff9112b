"""What kernels are called with when they are checked: random numbers, such that results are of order 1 and mistakes show."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.rotate_qkv.api import QkvLayout

from .lab import Lab, random_array
from .sizes import Shape

NORM_WEIGHT = 0.1
"""Standard deviation of norms' weights: real ones are near 1, but then the largest results of many have errors near the bound."""


def attention(lab: Lab, shape: Shape) -> tuple[jax.Array, ...]:
    """tree_attention's arguments: contexts of different lengths up to the shape's, scattered pages; what no row sees is NaN."""
    config, batch, rng = lab.size.target, shape.batch, np.random.default_rng(1)
    length = rng.integers(shape.context // 2, shape.context + 1, batch).astype(np.int32)
    length[0] = shape.context
    start = np.minimum(rng.integers(0, 3, batch), length).astype(np.int32)
    slots = shape.context + shape.rows
    table = rng.permutation(batch * -(-slots // shape.page)).reshape(batch, -1).astype(np.int32)
    pages = (table.size, shape.page, config.num_kv_heads, config.head_dim)
    place = np.arange(table.shape[1] * shape.page)
    unseen = np.ones((table.size, shape.page), bool)
    unseen[table] = ((place < start[:, None]) | (place >= length[:, None])).reshape(*table.shape, shape.page)
    hidden = jnp.asarray(unseen)[:, :, None, None]
    mask = rng.random((batch, shape.rows, shape.window)) < 0.4
    mask &= np.arange(shape.window) <= np.arange(shape.rows)[:, None] + shape.window - shape.rows
    mask[:, np.arange(shape.rows), np.arange(shape.rows) + shape.window - shape.rows] = True
    window = (batch, shape.window, config.num_kv_heads, config.head_dim)
    return (
        random_array(1, (batch, shape.rows, config.num_heads, config.head_dim), lab.dtype, 1.0),
        jnp.where(hidden, jnp.nan, random_array(2, pages, lab.dtype, 1.0)),
        jnp.where(hidden, jnp.nan, random_array(3, pages, lab.dtype, 0.5)),
        *map(jnp.asarray, (table, start, length)),
        random_array(4, window, lab.dtype, 1.0),
        random_array(5, window, lab.dtype, 0.5),
        jnp.asarray(mask),
    )


def write(lab: Lab, shape: Shape) -> tuple[Any, ...]:
    """cache_write's arguments: some of the window's rows go behind contexts of different lengths."""
    _, k_pages, v_pages, table, _, length, k_window, v_window, _ = attention(lab, shape)
    rng = np.random.default_rng(2)
    rows = min(shape.rows, 6) if shape.rows < 100 else shape.rows
    path = np.sort(np.argsort(rng.random((shape.batch, shape.window)), 1)[:, :rows], 1).astype(np.int32)
    pages = tuple(jnp.nan_to_num(each, nan=7.0) for each in (k_pages, v_pages))  # every number is compared, so there is no NaN
    write = jnp.asarray(np.arange(rows) < rng.integers(0, rows + 1, (shape.batch, 1)))
    return pages, (k_window, v_window), table, jnp.asarray(path), length[:, None] + jnp.arange(rows, dtype=jnp.int32), write


def norm(lab: Lab, batch: int, rows: int) -> tuple[jax.Array, ...]:
    """rms_norm's arguments but for eps: the residual stream's rows, far from normed."""
    width = lab.size.target.hidden_size
    return random_array(1, (batch, rows, width), lab.dtype, 3.0), random_array(2, (width,), lab.dtype, NORM_WEIGHT)


def layouts(lab: Lab) -> tuple[QkvLayout, QkvLayout]:
    """The target's, and the same with norms of queries and keys (as Qwen3 has)."""
    plain = QkvLayout(lab.size.target.num_heads, lab.size.target.num_kv_heads, lab.size.target.head_dim)
    return plain, replace(plain, norm_eps=1e-6)


def rotation(layout: QkvLayout, lab: Lab, batch: int, rows: int) -> tuple[Any, ...]:
    """rotate_qkv's arguments but for the layout: random angles."""
    heads = layout.heads + 2 * layout.kv_heads
    angle = jax.random.uniform(jax.random.key(1), (batch, rows, layout.head_dim // 2), jnp.float32, 0, 7)
    weights = tuple(random_array(seed, (layout.head_dim,), lab.dtype, NORM_WEIGHT) for seed in (2, 3))
    qkv = random_array(1, (batch, rows, heads * layout.head_dim), lab.dtype, 0.25)
    return qkv, jnp.cos(angle), jnp.sin(angle), None if layout.norm_eps is None else weights
