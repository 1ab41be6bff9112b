"""Sequences in the middle of decoding: random caches, scattered pages, a pinned context; for benchmarks.gpu."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import EngineConfig
from jaxspec.engine.device_state import new_state, state_sizes
from jaxspec.spec.state import Sizes, State, empty_state

from .lab import Lab, random_array
from .sizes import MOST_CALLS

PAGE = EngineConfig().page_size
"""Tokens per page where time is taken."""


class Batch:
    """A state on the device with what programs take beside it. Programs consume the state, so it is replaced after each."""

    def __init__(self, state: State, page_table: jax.Array, context: int, room: int):
        self.state, self.page_table, self.context = state, page_table, context
        self.rows = jnp.arange(page_table.shape[0], dtype=jnp.int32)
        self._room = room

    def put_back(self) -> None:
        """Every sequence is running and has `context` tokens again; its budget ends before its pages do."""
        batch = self.rows.shape[0]
        sequences = self.state.sequences._replace(
            length=jnp.full(batch, self.context, jnp.int32),
            remaining=jnp.full(batch, self._room, jnp.int32),
            done=jnp.zeros(batch, bool),
            lag=jnp.zeros(batch, jnp.int32),
        )
        self.state = self.state._replace(sequences=sequences)

    def delete(self) -> None:
        """Gives the memory back at once: the next batch needs it."""
        for array in jax.tree.leaves(self.state):
            if not array.is_deleted():
                array.delete()


def room(lab: Lab) -> int:
    """Tokens by which a context may grow while one sample is taken."""
    return MOST_CALLS * max(tree.num_steps + 1 for tree in lab.size.trees)


def pages_per_sequence(lab: Lab, context: int) -> int:
    """Room for what may be emitted, and one cycle's rows beyond."""
    longest = context + room(lab) + max(tree.num_steps for tree in lab.size.trees) + 2
    return -(-longest // PAGE)


def batch_bytes(lab: Lab, batch: int, context: int) -> int:
    """What the caches of such a batch take."""
    return batch * pages_per_sequence(lab, context) * PAGE * lab.pair.cache


def make_batch(lab: Lab, batch: int, context: int) -> Batch:
    """Random keys, values and hidden states; the pages of each sequence are scattered over the whole cache."""
    state_shapes, _, table_shape = batch_shapes(lab, batch, context)
    table = np.random.default_rng(0).permutation(table_shape.size).reshape(table_shape.shape).astype(np.int32)
    # As the engine lays them out, but not zeros: a GPU may be faster on those.
    seeds = itertools.count()
    caches = jax.tree.map(lambda array: random_array(next(seeds), array.shape, array.dtype, 1.0), state_shapes.caches)
    state = fill(lab, empty_state(caches, batch, sizes_of(lab, context), lab.dtype))
    made = Batch(state, jnp.asarray(table), context, room(lab))
    made.put_back()
    return made


def batch_shapes(lab: Lab, batch: int, context: int) -> tuple[Any, Any, Any]:
    """The shapes of a batch's state, rows and page table; nothing is allocated."""
    width, target, head = pages_per_sequence(lab, context), lab.size.target, lab.size.head
    pages, sizes = batch * width, sizes_of(lab, context)
    state = jax.eval_shape(lambda: new_state(target, head, sizes, rows=batch, num_pages=pages, page_size=PAGE, dtype=lab.dtype))
    return state, jax.ShapeDtypeStruct((batch,), jnp.int32), jax.ShapeDtypeStruct((batch, width), jnp.int32)


def sizes_of(lab: Lab, context: int) -> Sizes:
    return state_sizes(lab.size.target, lab.size.head, max_length=pages_per_sequence(lab, context) * PAGE, max_lag=1)


def fill(lab: Lab, state: State) -> State:
    """Random roots and outputs of the head."""
    sequences = state.sequences
    roots = jax.random.randint(jax.random.key(3), sequences.root.shape, 0, lab.size.target.vocab_size, jnp.int32)
    hidden, feature = (
        random_array(seed, field.shape, field.dtype, 1.0) for seed, field in ((1, sequences.draft_hidden), (2, sequences.feature))
    )
    return state._replace(sequences=sequences._replace(root=roots, draft_hidden=hidden, feature=feature))
