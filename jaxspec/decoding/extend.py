"""Extend: the head reads the target's features of the emitted tokens, so that its cache follows the target's."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.decoding.commit import write_slots
from jaxspec.decoding.draft import SlidingWindow, visible_slots
from jaxspec.decoding.state import Batch, Models, State, gather, last, put
from jaxspec.decoding.verify import Accepted, Verified
from jaxspec.models.layers import AttentionMetadata
from jaxspec.typing import Array, Float, Int


class Pairs(NamedTuple):
    """The head's input: pair j is the token at slot first_slot + j with the target's feature of the position before."""

    features: Float[Array, "b j f"]
    tokens: Int[Array, "b j"]
    first_slot: Int[Array, " b"]
    cached: Int[Array, " b"]
    """Pairs of slots below it are neither written nor seen by others: they are in the cache (and slot 0 has no pair)."""
    size: Int[Array, " b"]
    """The number of valid pairs; the rest is padding."""


@jax.named_scope("extend")
def extend(
    models: Models, state: State, batch: Batch, verified: Verified, accepted: Accepted, sliding_window: SlidingWindow | None = None
) -> State:
    """Extends the head's cache by the emitted tokens. A plain cycle only remembers their features (`catch_up`)."""
    if models.head is None:
        return state
    if accepted.path.shape[1] == 1:
        return fall_behind(state, batch, verified, accepted)
    features = jnp.take_along_axis(verified.features, accepted.path[:, :, None], 1)
    first = batch.sequences.length + 1
    return read_pairs(models, state, batch, Pairs(features, accepted.tokens, first, first, accepted.emitted), sliding_window)


def fall_behind(state: State, batch: Batch, verified: Verified, accepted: Accepted) -> State:
    """Keeps the feature of a plain cycle's token for later, so that the cycle costs no more than without a head."""
    place = jnp.where(accepted.emitted > 0, batch.sequences.lag, state.lag_features.shape[1])
    features = state.lag_features.at[batch.rows, place].set(verified.features[:, 0], mode="drop")
    sequences = put(state.sequences, batch.rows, lag=batch.sequences.lag + accepted.emitted)
    return state._replace(sequences=sequences, lag_features=features)


@jax.named_scope("catch_up")
def catch_up(
    models: Models,
    state: State,
    rows: Int[Array, " b"],
    page_table: Int[Array, "b p"],
    *,
    sliding_window: SlidingWindow | None = None,
) -> State:
    """Extends the head by the slots that it lags behind after plain cycles; a draft may follow.

    In:  length 9, lag 3
    Out: head slots 7, 8 and 9 are written; lag 0
    """
    batch = gather(state, rows, page_table)
    features, history, lag = state.lag_features[rows], state.history[rows], batch.sequences.lag
    first = batch.sequences.length + 1 - lag
    slots = first[:, None] + jnp.arange(features.shape[1], dtype=jnp.int32)
    tokens = jnp.take_along_axis(history, jnp.minimum(slots, history.shape[1] - 1), 1)
    state = read_pairs(models, state, batch, Pairs(features, tokens, first, first, lag), sliding_window)
    return state._replace(sequences=put(state.sequences, rows, lag=jnp.zeros_like(lag)))


def read_pairs(models: Models, state: State, batch: Batch, pairs: Pairs, sliding_window: SlidingWindow | None) -> State:
    """Runs the head over the pairs, writes their keys and values, and keeps its last output for the next draft."""
    head, cache = models.head, state.caches.draft
    assert head is not None, "without a head there is nothing to extend"
    batch_size, width = pairs.tokens.shape
    columns = jnp.arange(width, dtype=jnp.int32)
    slots = pairs.first_slot[:, None] + columns
    new = slots >= pairs.cached[:, None]
    mask = jnp.broadcast_to(columns[:, None] >= columns, (batch_size, width, width))
    mask = mask & (new[:, None, :] | jnp.eye(width, dtype=bool))
    seen = visible_slots(batch.page_table, pairs.cached, cache[0].k.shape[1], sliding_window)
    metadata = AttentionMetadata(slots - 1, *seen, mask)  # a pair's position is its slot - 1
    out = head(head.embed(pairs.tokens, models.target), head.project(pairs.features), metadata, cache)
    path = jnp.broadcast_to(columns, pairs.tokens.shape)
    write = (columns < pairs.size[:, None]) & new
    pages = write_slots(cache, out.window, batch.page_table, path, slots, write)
    hidden = jnp.where((pairs.size > 0)[:, None], last(out.hidden, pairs.size), batch.sequences.draft_hidden)
    sequences = put(state.sequences, batch.rows, draft_hidden=hidden)
    return state._replace(caches=state.caches._replace(draft=pages), sequences=sequences)
