"""Extend: the head reads the target's features of committed tokens, so that its cache follows the target's."""

import jax
import jax.numpy as jnp

from jaxspec.models.head import DraftHead
from jaxspec.models.layers import AttentionMetadata
from jaxspec.models.llama import Llama
from jaxspec.spec.commit import commit
from jaxspec.spec.draft import DraftWindow, visible_slots
from jaxspec.spec.state import Models, State, last, put, take
from jaxspec.typing import Array, Bool, Float, Int, KeysValues


@jax.named_scope("extend")
def extend(
    head: DraftHead,
    target: Llama,
    cache: tuple[KeysValues, ...],
    page_table: Int[Array, "b p"],
    features: Float[Array, "b j f"],
    tokens: Int[Array, "b j"],
    first_slot: Int[Array, " b"],
    begin: Int[Array, " b"],
    write: Bool[Array, "b j"],
    window: DraftWindow | None = None,
) -> tuple[tuple[KeysValues, ...], Float[Array, "b j h"]]:
    """Feeds the head the pairs (features[j], tokens[j]) of slots first_slot + j and writes their keys where write[j].

    features[j] belongs to the position *before* tokens[j]. Rows of slots below `begin` are computed but neither seen nor
    written: the cache holds those slots already (or, slot 0, has no pair). Returns the cache and the head's output at every row.
    """
    width = tokens.shape[1]
    steps = jnp.arange(width, dtype=jnp.int32)
    slots = first_slot[:, None] + steps
    new = slots >= begin[:, None]
    mask = jnp.broadcast_to(steps[:, None] >= steps, (tokens.shape[0], width, width))
    mask = mask & (new[:, None, :] | jnp.eye(width, dtype=bool))
    rows = AttentionMetadata(slots - 1, *visible_slots(page_table, begin, cache[0].k.shape[1], window), mask)
    out = head(head.embed(tokens, target), head.project(features), rows, cache)
    path = jnp.broadcast_to(steps, tokens.shape)
    return commit(cache, out.window, page_table, path, slots, write & new), out.hidden


def catch_up(
    models: Models, state: State, rows: Int[Array, " b"], page_table: Int[Array, "b p"], *, window: DraftWindow | None = None
) -> State:
    """Extends the head by the slots that it lags behind after plain cycles; a draft may follow.

    In:  length 9, lag 3
    Out: head slots 7, 8 and 9 are written; lag 0
    """
    assert models.head is not None, "without a head nothing lags behind"
    now, features, history = take(state.sequences, rows), state.lag_features[rows], state.history[rows]
    steps = jnp.arange(features.shape[1], dtype=jnp.int32)
    first_slot = now.length + 1 - now.lag
    slots = first_slot[:, None] + steps
    tokens = jnp.take_along_axis(history, jnp.minimum(slots, history.shape[1] - 1), 1)
    draft_cache, hidden = extend(
        models.head, models.target, state.caches.draft, page_table, features, tokens, first_slot, first_slot,
        steps < now.lag[:, None], window,
    )  # fmt: skip
    newest = jnp.where((now.lag > 0)[:, None], last(hidden, now.lag), now.draft_hidden)
    after = now._replace(draft_hidden=newest, lag=jnp.zeros_like(now.lag))
    return state._replace(caches=state.caches._replace(draft=draft_cache), sequences=put(state.sequences, rows, after))
