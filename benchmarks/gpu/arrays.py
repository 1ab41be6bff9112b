"""Random arrays for benchmarks.gpu: sequences in the middle of decoding, and arguments of kernels with results of order 1."""

import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import EngineConfig
from jaxspec.decoding.state import Sizes, State
from jaxspec.engine.device_state import new_state
from jaxspec.models.rope import inverse_frequencies
from pallas_kernels.rotate_qkv.api import QkvLayout

from .lab import Lab, random_array
from .sizes import MOST_CALLS, Shape

PAGE = EngineConfig().page_size
"""Tokens per page in timed programs."""


class Batch:
    """A state on the device and the other arguments of programs. Programs consume the state, so each replaces it."""

    def __init__(self, state: State, page_table: jax.Array, context: int, room: int):
        self.state, self.page_table, self.context = state, page_table, context
        self.rows = jnp.arange(page_table.shape[0], dtype=jnp.int32)
        self._room = room

    def put_back(self) -> None:
        """Resets every sequence to `context` tokens, running; its budget ends before its pages do."""
        batch = self.rows.shape[0]
        sequences = self.state.sequences.but(
            length=jnp.full(batch, self.context, jnp.int32),
            remaining=jnp.full(batch, self._room, jnp.int32),
            done=jnp.zeros(batch, bool),
        )
        features = self.state.features._replace(lag=jnp.zeros(batch, jnp.int32))
        self.state = self.state._replace(sequences=sequences, features=features)

    def delete(self) -> None:
        """Frees the memory at once, for the next batch."""
        for array in jax.tree.leaves(self.state):
            if not array.is_deleted():
                array.delete()


def room(lab: Lab) -> int:
    """Tokens by which a context may grow during one sample."""
    return MOST_CALLS * max(tree.num_steps + 1 for tree in lab.size.trees)


def pages_per_sequence(lab: Lab, context: int) -> int:
    """Pages for the tokens that may be emitted, and one more cycle's rows."""
    longest = context + room(lab) + max(tree.num_steps for tree in lab.size.trees) + 2
    return -(-longest // PAGE)


def batch_bytes(lab: Lab, batch: int, context: int) -> int:
    """Bytes of the caches of such a batch."""
    return batch * pages_per_sequence(lab, context) * PAGE * lab.pair.cache


def make_batch(lab: Lab, batch: int, context: int) -> Batch:
    """Random keys, values and hidden states; the pages of each sequence are scattered over the whole cache."""
    state_shapes, _, table_shape = batch_shapes(lab, batch, context)
    table = np.random.default_rng(0).permutation(table_shape.size).reshape(table_shape.shape).astype(np.int32)
    # Not zeros: a GPU may be faster on those.
    seeds = itertools.count()
    state = new_state(lab.size.target, lab.drafter(), sizes_of(lab, batch, context)._replace(num_pages=0))
    target, draft = (
        jax.tree.map(lambda array: random_array(next(seeds), array.shape, array.dtype, 1.0), pages)
        for pages in (state_shapes.cache, state_shapes.draft.cache)
    )
    state = fill(lab, state._replace(cache=target, draft=state.draft._replace(cache=draft)))
    made = Batch(state, jnp.asarray(table), context, room(lab))
    made.put_back()
    return made


def batch_shapes(lab: Lab, batch: int, context: int) -> tuple[Any, Any, Any]:
    """The shapes of a batch's state, rows and page table; nothing is allocated."""
    width = pages_per_sequence(lab, context)
    state = jax.eval_shape(lambda: new_state(lab.size.target, lab.drafter(), sizes_of(lab, batch, context)))
    return state, jax.ShapeDtypeStruct((batch,), jnp.int32), jax.ShapeDtypeStruct((batch, width), jnp.int32)


def sizes_of(lab: Lab, batch: int, context: int) -> Sizes:
    width = pages_per_sequence(lab, context)
    return Sizes(batch, batch * width, PAGE, max_length=width * PAGE, max_lag=1, dtype=lab.dtype)


def fill(lab: Lab, state: State) -> State:
    """Random roots and outputs of the head."""
    sequences = state.sequences
    roots = jax.random.randint(jax.random.key(3), sequences.root.shape, 0, lab.size.target.vocab_size, jnp.int32)
    hidden, last = (
        random_array(seed, field.shape, field.dtype, 1.0) for seed, field in ((1, state.draft.hidden), (2, state.features.last))
    )
    return state._replace(
        sequences=sequences.but(root=roots),
        draft=state.draft._replace(hidden=hidden),
        features=state.features._replace(last=last),
    )


# Arguments of kernels

NORM_WEIGHT = 0.1
"""Standard deviation of the weights of norms. Real ones are near 1, but then the largest results have errors near the bound."""


def attention(lab: Lab, shape: Shape) -> tuple[jax.Array, ...]:
    """tree_attention's arguments: contexts of different lengths, scattered pages; slots that no row may see are NaN."""
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
    """cache_write's arguments: some rows of the window, for contexts of different lengths."""
    _, k_pages, v_pages, table, _, length, k_window, v_window, _ = attention(lab, shape)
    rng = np.random.default_rng(2)
    rows = min(shape.rows, 6) if shape.rows < 100 else shape.rows
    path = np.sort(np.argsort(rng.random((shape.batch, shape.window)), 1)[:, :rows], 1).astype(np.int32)
    pages = tuple(jnp.nan_to_num(each, nan=7.0) for each in (k_pages, v_pages))  # all numbers are compared, so no NaN
    write = jnp.asarray(np.arange(rows) < rng.integers(0, rows + 1, (shape.batch, 1)))
    return pages, (k_window, v_window), table, jnp.asarray(path), length[:, None] + jnp.arange(rows, dtype=jnp.int32), write


def norm(lab: Lab, batch: int, rows: int) -> tuple[jax.Array, ...]:
    """rms_norm's arguments except eps."""
    width = lab.size.target.hidden_size
    return random_array(1, (batch, rows, width), lab.dtype, 3.0), random_array(2, (width,), lab.dtype, NORM_WEIGHT)


def norm_pair(lab: Lab, batch: int, rows: int) -> tuple[jax.Array, ...]:
    """norm_pair's arguments except eps."""
    left, weight = norm(lab, batch, rows)
    return left, random_array(3, left.shape, lab.dtype, 1.0), weight, random_array(4, weight.shape, lab.dtype, NORM_WEIGHT)


def layouts(lab: Lab) -> tuple[QkvLayout, QkvLayout]:
    """The target's layout, and the same with norms of queries and keys, as in Qwen3."""
    plain = QkvLayout(lab.size.target.num_heads, lab.size.target.num_kv_heads, lab.size.target.head_dim)
    return plain, replace(plain, norm_eps=1e-6)


def rotation(layout: QkvLayout, lab: Lab, batch: int, rows: int) -> tuple[Any, ...]:
    """rotate_qkv's arguments except the layout, with random positions."""
    heads = layout.heads + 2 * layout.kv_heads
    positions = jax.random.randint(jax.random.key(1), (batch, rows), 0, 8192)
    frequencies = jnp.asarray(inverse_frequencies(lab.size.target.rope, layout.head_dim))
    weights = tuple(random_array(seed, (layout.head_dim,), lab.dtype, NORM_WEIGHT) for seed in (2, 3))
    qkv = random_array(1, (batch, rows, heads * layout.head_dim), lab.dtype, 0.25)
    return qkv, positions, frequencies, None if layout.norm_eps is None else weights
