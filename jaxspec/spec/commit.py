"""Commit and extend: the accepted rows enter the caches, and the head reads the target's features of them."""

import jax
import jax.numpy as jnp

from jaxspec.models.head import DraftHead
from jaxspec.models.layers import Rows
from jaxspec.models.llama import Llama
from jaxspec.typing import Array, Bool, Float, Int, KeysValues
from pallas_kernels.cache_write import cache_write


@jax.named_scope("commit")
def commit(
    cache: tuple[KeysValues, ...],
    window: tuple[KeysValues, ...],
    page_table: Int[Array, "b p"],
    path: Int[Array, "b j"],
    slots: Int[Array, "b j"],
    write: Bool[Array, "b j"],
) -> tuple[KeysValues, ...]:
    """Writes window row path[j] of every layer to slot slots[j], where write[j]. Rejected rows never reach the cache."""
    return tuple(
        KeysValues(*cache_write(*pages, *rows, page_table, path, slots, write)) for pages, rows in zip(cache, window, strict=True)
    )


@jax.named_scope("extend")
def extend(
    head: DraftHead,
    target: Llama,
    cache: tuple[KeysValues, ...],
    page_table: Int[Array, "b p"],
    features: Float[Array, "b j f"],
    tokens: Int[Array, "b j"],
    first_slot: Int[Array, " b"],
    write: Bool[Array, "b j"],
) -> tuple[tuple[KeysValues, ...], Float[Array, "b j h"]]:
    """Feeds the head the pairs (features[j], tokens[j]) of slots first_slot + j and writes their keys where write[j].

    features[j] belongs to the position *before* tokens[j]. Returns the cache and the head's output at every row.
    """
    width = tokens.shape[1]
    steps = jnp.arange(width, dtype=jnp.int32)
    slots = first_slot[:, None] + steps
    mask = jnp.broadcast_to(steps[:, None] >= steps, (tokens.shape[0], width, width))
    # Slot 0 has no pair. A row for it (the first of a prompt) is computed but neither seen nor written.
    mask = mask & ((slots > 0)[:, None, :] | jnp.eye(width, dtype=bool))
    rows = Rows(slots - 1, page_table, jnp.ones_like(first_slot), first_slot, mask)
    out = head(head.embed(tokens, target), head.project(features), rows, cache)
    path = jnp.broadcast_to(steps, tokens.shape)
    return commit(cache, out.window, page_table, path, slots, write & (slots > 0)), out.hidden
