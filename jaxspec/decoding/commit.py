"""Commit and advance: accepted tokens enter the target's cache, and the sequences move on by the emitted tokens."""

import jax
import jax.numpy as jnp

from jaxspec.decoding.state import Batch, Sequences, State, last, put_sequences
from jaxspec.decoding.verify import RUNNING, Accepted, Verified
from jaxspec.typing import Array, Bool, Int, KeysValues
from pallas_kernels.cache_write import cache_write


def commit(state: State, batch: Batch, verified: Verified, accepted: Accepted) -> State:
    """Writes the keys and values of the accepted nodes to the target's pages. Rejected nodes never enter the cache.

    In:  length 7, path [0, 2, 5], emitted 2
    Out: slot 7 holds window token 0 (the root), slot 8 token 2
    """
    columns = jnp.arange(accepted.path.shape[1], dtype=jnp.int32)
    slots, write = batch.sequences.length[:, None] + columns, columns < accepted.emitted[:, None]
    with jax.named_scope("commit"):  # only the write: benchmarks/gpu counts this scope's launches per layer
        pages = write_slots(state.cache, verified.window, batch.page_table, accepted.path, slots, write)
    return state._replace(cache=pages)


@jax.named_scope("advance")
def advance(state: State, batch: Batch, accepted: Accepted) -> State:
    """Moves the sequences on by their emitted tokens: history, length, root, remaining and done."""
    before, emitted = batch.sequences, accepted.emitted
    after = Sequences.of(
        length=before.length + emitted,
        root=jnp.where(emitted > 0, last(accepted.tokens, emitted), before.root),
        remaining=before.remaining - emitted,
        done=before.done | (accepted.finish != RUNNING),
    )
    columns = jnp.arange(accepted.tokens.shape[1])
    places = jnp.where(columns < emitted[:, None], before.length[:, None] + 1 + columns, state.history.shape[1])
    history = state.history.at[batch.rows[:, None], places].set(accepted.tokens, mode="drop")
    return put_sequences(state._replace(history=history), batch.rows, after)


def write_slots(
    cache: tuple[KeysValues, ...],
    window: tuple[KeysValues, ...],
    page_table: Int[Array, "b p"],
    path: Int[Array, "b j"],
    slots: Int[Array, "b j"],
    write: Bool[Array, "b j"],
) -> tuple[KeysValues, ...]:
    """Writes keys and values of window token path[j] to slot slots[j] of every layer, where write[j]. Returns the new pages."""
    pages, rows = ([array for layer in layers for array in layer] for layers in (cache, window))
    written = cache_write(tuple(pages), tuple(rows), page_table, path, slots, write)
    return tuple(map(KeysValues, written[::2], written[1::2]))
