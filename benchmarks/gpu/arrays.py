"""Random arrays for benchmarks.gpu: sequences in the middle of decoding, and arguments of kernels with results of order 1."""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import EngineConfig
from jaxspec.decoding.settings import SamplingKind, Settings, settings_row
from jaxspec.decoding.state import Admission, Sizes, State, admit
from jaxspec.engine.models import new_state
from jaxspec.placement import Placement
from jaxspec.rope import inverse_frequencies
from jaxspec.sampling_params import SamplingParams
from pallas_kernels.fp8 import Scales, encode
from pallas_kernels.quantized import QuantizedAs
from pallas_kernels.rotate_qkv.api import QkvLayout
from pallas_kernels.skinny_matmul import SwiGlu

from .lab import MOST_CALLS, Lab, random_array

PAGE = EngineConfig().page_size
"""Tokens per page in timed programs."""


class Batch:
    """A state on the device and the other arguments of programs. Programs consume the state, so each replaces it."""

    def __init__(self, state: State, page_table: jax.Array, context: int, room: int, placement: Placement):
        self.state, self.page_table, self.context = state, page_table, context
        self.rows = placement.put(jnp.arange(page_table.shape[0], dtype=jnp.int32))
        self._room, self._placement = room, placement

    def put_back(self) -> None:
        """Resets every sequence to `context` tokens, running; its budget ends before its pages do."""
        batch, put = self.rows.shape[0], self._placement.put
        sequences = self.state.sequences.replaced(
            length=put(jnp.full(batch, self.context, jnp.int32)),
            remaining=put(jnp.full(batch, self._room, jnp.int32)),
            done=put(jnp.zeros(batch, bool)),
        )
        features = self.state.features._replace(lag=put(jnp.zeros(batch, jnp.int32)))
        self.state = self.state._replace(sequences=sequences, features=features)

    def delete(self) -> None:
        """Frees the memory at once, for the next batch."""
        for array in jax.tree.leaves(self.state):
            if not array.is_deleted():
                array.delete()


def room(lab: Lab) -> int:
    """Tokens by which a context may grow during one sample."""
    return MOST_CALLS * max(tree.num_steps + 1 for tree in lab.size.trees)


def sizes_of(lab: Lab, batch: int, context: int) -> Sizes:
    """With pages for the tokens that may be emitted, and one more cycle's rows."""
    longest = context + room(lab) + max(tree.num_steps for tree in lab.size.trees) + 2
    width = -(-longest // PAGE)
    return Sizes(batch, batch * width, PAGE, max_length=width * PAGE, max_lag=1, dtype=lab.dtype, devices=lab.tp)


SAMPLING = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=1),
    "top_p": SamplingParams(temperature=1, top_p=0.9),
}
"""The kinds of requests that are timed: a chat client's default is one of the last two."""


def make_batch(lab: Lab, batch: int, context: int, sampling: str = "greedy") -> Batch:
    """Random keys, values, roots and hidden states; the pages of each sequence are scattered over the whole cache."""
    state_shapes, _, table_shape = batch_shapes(lab, batch, context)
    table = np.random.default_rng(0).permutation(table_shape.size).reshape(table_shape.shape).astype(np.int32)
    # Not zeros: a GPU may be faster on those.
    seeds = itertools.count()
    state = new_state(lab.size.target, lab.drafter(), sizes_of(lab, batch, context)._replace(num_pages=0))
    target, draft = (
        jax.tree.map(lambda array: random_array(next(seeds), array.shape, array.dtype, 1.0), pages)
        for pages in (state_shapes.cache, state_shapes.draft.cache)
    )
    rows, params = jnp.arange(batch, dtype=jnp.int32), SAMPLING[sampling]
    row = settings_row(kind=SamplingKind.of(params), temperature=params.temperature, top_p=params.top_p)
    settings: Settings = jax.tree.map(lambda field: jnp.repeat(jnp.asarray(field), batch, 0), row)
    settings = settings._replace(seed=jnp.stack([jnp.zeros(batch), jnp.arange(batch)], 1).astype(jnp.uint32))
    state = admit(state, Admission(rows, state.history, jnp.zeros_like(rows), settings, state.bias))
    roots = jax.random.randint(jax.random.key(3), rows.shape, 0, lab.size.target.vocab_size, jnp.int32)
    hidden, last = (random_array(next(seeds), field.shape, field.dtype, 1.0) for field in (state.draft.hidden, state.features.last))
    state = state._replace(
        cache=target,
        sequences=state.sequences.replaced(root=roots),
        draft=state.draft._replace(cache=draft, hidden=hidden),
        features=state.features._replace(last=last),
    )
    state = jax.device_put(state, jax.tree.map(lambda array: array.sharding, state_shapes))
    made = Batch(state, lab.placement.put(table), context, room(lab), lab.placement)
    made.put_back()
    return made


def batch_shapes(lab: Lab, batch: int, context: int) -> tuple[Any, Any, Any]:
    """The shapes of a batch's state, rows and page table; nothing is allocated."""
    sizes = sizes_of(lab, batch, context)
    state = lab.placement.abstract(lambda: new_state(lab.size.target, lab.drafter(), sizes))
    inputs = (batch,), (batch, sizes.num_pages // batch)
    return state, *(jax.ShapeDtypeStruct(shape, jnp.int32, sharding=lab.placement.whole) for shape in inputs)


# Arguments of kernels

SMALL = 0.25
"""Standard deviation of products, and of rows to rotate: their rounding in bfloat16 stays well below the bound."""
NORM_WEIGHT = 0.1
"""Standard deviation of the weights of norms. Real ones are near 1, but then the largest results have errors near the bound."""


class Shape(NamedTuple):
    """One call of tree attention: batch, rows, window keys, longest context, page size."""

    name: str
    batch: int
    rows: int
    window: int
    context: int
    page: int

    def __str__(self) -> str:
        return f"{self.name}, batch {self.batch}, page {self.page}"


def shapes(lab: Lab) -> tuple[Shape, ...]:
    """Decode, draft levels, verification, extension and prefill, at two page sizes; two of them where figures mean nothing."""
    if lab.size.few:
        return (Shape("draft level 4 of 5/8/32", 8, 8, 32, 30, 16), Shape("verify 8", 1, 8, 8, 50, 4))
    short, long, chunk = 700, 3000, 256
    return (
        Shape("decode", 1, 1, 1, long, 16),
        Shape("decode", 8, 1, 1, short, 64),
        Shape("draft level 2", 1, 4, 8, long, 16),
        Shape("draft level 4 of 5/8/32", 8, 8, 32, short, 64),
        Shape("extend 6 rows", 8, 6, 6, short, 16),
        Shape("verify 8", 1, 8, 8, long, 16),
        Shape("verify 8", 8, 8, 8, short, 64),
        Shape("verify 32", 1, 32, 32, long, 64),
        Shape("verify 32", 8, 32, 32, short, 16),
        Shape("verify 64", 1, 64, 64, long, 16),
        Shape("verify 64", 8, 64, 64, short, 64),
        Shape("prefill", 1, chunk, chunk, long, 16),
        Shape("prefill", 1, chunk, chunk, short, 64),
        Shape("verify 8, empty cache", 1, 8, 8, 0, 16),
    )


def attention(lab: Lab, shape: Shape, bits: int = 16) -> tuple[Any, ...]:
    """tree_attention's arguments: contexts of different lengths, scattered pages; slots that no row may see are NaN.

    With 8 bits keys and values are bytes, and have scales.
    """
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
    stored = encode if bits == 8 else lambda array: array
    return (
        random_array(1, (batch, shape.rows, config.num_heads, config.head_dim), lab.dtype, 1.0),
        stored(jnp.where(hidden, jnp.nan, random_array(2, pages, lab.dtype, 1.0))),
        stored(jnp.where(hidden, jnp.nan, random_array(3, pages, lab.dtype, 0.5))),
        *map(jnp.asarray, (table, start, length)),
        stored(random_array(4, window, lab.dtype, 1.0)),
        stored(random_array(5, window, lab.dtype, 0.5)),
        jnp.asarray(mask),
        scales(lab) if bits == 8 else None,
    )


def scales(lab: Lab) -> Scales:
    """Of an 8-bit cache, a different one for each head."""
    by_head = jnp.linspace(0.5, 1.0, lab.size.target.num_kv_heads)
    return Scales(by_head, 1.5 - by_head)


def write(lab: Lab, shape: Shape, bits: int = 16) -> tuple[Any, ...]:
    """cache_write's arguments: some rows of the window, for contexts of different lengths."""
    _, k_pages, v_pages, table, _, length, k_window, v_window, _, _ = attention(lab, shape, bits)
    rng = np.random.default_rng(2)
    rows = min(shape.rows, 6) if shape.rows < 100 else shape.rows
    path = np.sort(np.argsort(rng.random((shape.batch, shape.window)), 1)[:, :rows], 1).astype(np.int32)
    pages: tuple[jax.Array, ...] = (k_pages, v_pages)
    if bits == 16:  # all numbers are compared, so no NaN
        pages = tuple(jnp.nan_to_num(each, nan=7.0) for each in pages)
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


def addition(lab: Lab, batch: int, rows: int, is_product: bool) -> tuple[Any, ...]:
    """add_norm's arguments except eps: the residual stream, what is added, and the norm's weight."""
    x, weight = norm(lab, batch, rows)
    added = factors(lab, (batch, rows), x.shape[-1]) if is_product else random_array(3, x.shape, lab.dtype, SMALL)
    return (x / 3).astype(lab.dtype), added, weight


def layout(lab: Lab) -> QkvLayout:
    """The target's, without norms of queries and keys."""
    return QkvLayout(lab.size.target.num_heads, lab.size.target.num_kv_heads, lab.size.target.head_dim)


def rotation(lab: Lab, batch: int, rows: int, layout: QkvLayout, is_product: bool) -> tuple[Any, ...]:
    """rotate_qkv's arguments, the scales last, except the layout; with random positions."""
    width = (layout.heads + 2 * layout.kv_heads) * layout.head_dim
    positions = jax.random.randint(jax.random.key(1), (batch, rows), 0, 8192)
    frequencies = jnp.asarray(inverse_frequencies(lab.size.target.rope, layout.head_dim))
    weights = tuple(random_array(seed, (layout.head_dim,), lab.dtype, NORM_WEIGHT) for seed in (2, 3))
    qkv = factors(lab, (batch, rows), width) if is_product else random_array(1, (batch, rows, width), lab.dtype, SMALL)
    return qkv, positions, frequencies, None if layout.norm_eps is None else weights, scales(lab) if layout.fp8 else None


def factors(lab: Lab, rows: tuple[int, ...], columns: int) -> tuple[jax.Array, jax.Array]:
    """x and a matrix whose product's standard deviation is SMALL."""
    k = lab.size.target.hidden_size
    return random_array(4, (*rows, k), lab.dtype, 1.0), random_array(5, (k, columns), lab.dtype, SMALL / k**0.5)


def side(lab: Lab) -> int:
    """Rows and columns of the weights of `product`: blocks of quantised weights have 128."""
    return max(lab.size.target.hidden_size, 256)


def product(lab: Lab, rows: int, how: QuantizedAs | None, gated: bool) -> tuple[Any, ...]:
    """skinny_matmul's arguments: x, a dense or quantised weight, and the epilogue."""
    k, columns = side(lab), side(lab) * (2 if gated else 1)
    weight = random_array(2, (k, columns), lab.dtype, 2 * SMALL / k**0.5)
    stored: Any = weight if how is None else how(weight)
    return random_array(1, (rows, k), lab.dtype, 1.0), stored if how is None else stored.packed, SwiGlu() if gated else None


def cut(lab: Lab, batch: int, rows: int) -> tuple[jax.Array, ...]:
    """cutoff's arguments: different filters in each row; every other row has many equal logits."""
    count, vocab_size = batch * rows, lab.size.target.vocab_size
    logits, row = random_array(1, (count, vocab_size), jnp.float32, 2.0), np.arange(count)
    logits = jnp.where((row % 2 == 1)[:, None], jnp.round(logits * 8) / 8, logits)
    inverse_temperature = jnp.asarray(1 / (1 + row % 3 / 4), jnp.float32)
    top_k = jnp.asarray(np.where(row % 4 == 3, 50, vocab_size), jnp.int32)
    top_p, min_p = (jnp.asarray(choices, jnp.float32)[row % 3] for choices in ((0.9, 0.5, 1.0), (0.0, 0.0, 0.02)))
    return logits, inverse_temperature, top_k, top_p, min_p
