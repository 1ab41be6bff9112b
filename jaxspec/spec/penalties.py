"""Penalties, bias and bans: the adjustments of the target's logits at a node, given the text before it.

A node's text is the committed tokens, the root, and the node's own ancestors in the tree; siblings do not count. So every node
gets the logits that plain decoding computes after the same text.
"""

from typing import NamedTuple

import jax.numpy as jnp

from jaxspec.spec.sampling import Settings
from jaxspec.spec.tree import Tree
from jaxspec.typing import Array, Bool, Float, Int

MIN_TOKENS_BAN = -1e30
"""Not -inf: if only stop tokens are allowed, generation still ends, with the lowest stop id."""


class Context(NamedTuple):
    """The tokens before each of n nodes: a shared prefix, and some of m more tokens."""

    history: Int[Array, "b t"]
    """Tokens by position."""
    known: Int[Array, " b"]
    """Length of the shared prefix; the root is part of it."""
    extra: Int[Array, "b m"]
    seen: Bool[Array, "b n m"]
    """Which of the extra tokens are the node or its ancestors."""


def tree_context(history: Int[Array, "b t"], length: Int[Array, " b"], tree: Tree) -> Context:
    """The context of every node; the history holds the root already, at position `length`."""
    return Context(history, length + 1, tree.tokens[:, 1:], tree.mask[:, :, 1:])


def adjust_logits(
    logits: Float[Array, "b n v"], positions: Int[Array, "b n"], context: Context, settings: Settings, bias: Float[Array, "b v"]
) -> Float[Array, "b n v"]:
    """Applies penalties, then bias, then min_tokens to the logits of the tokens at `positions` (see SamplingParams)."""
    occurs, generated = count_tokens(context, settings.prompt_length, logits.shape[-1])
    repetition, frequency, presence = (
        field[:, None, None] for field in (settings.repetition_penalty, settings.frequency_penalty, settings.presence_penalty)
    )
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(occurs, repeated, logits)
    logits = logits - frequency * generated - presence * (generated > 0)
    logits = logits + bias[:, None]
    return jnp.where(banned_stops(positions, settings, logits.shape[-1]), MIN_TOKENS_BAN + jnp.minimum(logits, 0), logits)


def count_tokens(
    context: Context, prompt_length: Int[Array, " b"], vocab_size: int
) -> tuple[Bool[Array, "b n v"], Float[Array, "b n v"]]:
    """Per node: the tokens that occur in its text, and how often each was generated.

    In:  history [7, 8, 8], known 3, prompt_length 1, extra [8], seen [[False], [True]]
    Out: 7 and 8 occur at both nodes; 8 was generated 2 and 3 times, 7 never
    """
    batch, nodes, _ = context.seen.shape
    places = jnp.arange(context.history.shape[1])
    known = places < context.known[:, None]
    generated = known & (places >= prompt_length[:, None])
    sequence = jnp.arange(batch)[:, None]
    zeros = jnp.zeros((batch, vocab_size), jnp.float32)
    occurs = zeros.at[sequence, context.history].add(known.astype(jnp.float32))
    counts = zeros.at[sequence, context.history].add(generated.astype(jnp.float32))
    node = jnp.arange(nodes)[None, :, None]
    extra = jnp.zeros((batch, nodes, vocab_size), jnp.float32)
    extra = extra.at[sequence[:, :, None], node, context.extra[:, None, :]].add(context.seen.astype(jnp.float32))
    return occurs[:, None] + extra > 0, counts[:, None] + extra


def banned_stops(positions: Int[Array, "b n"], settings: Settings, vocab_size: int) -> Bool[Array, "b n v"]:
    """The stop tokens at positions where min_tokens is not reached yet."""
    batch = positions.shape[0]
    stops = jnp.zeros((batch, vocab_size + 1), bool)  # the last column takes the unused entries, which are -1
    stops = stops.at[jnp.arange(batch)[:, None], settings.stop_tokens].set(True)
    return stops[:, None, :vocab_size] & (positions < settings.min_length[:, None])[:, :, None]
