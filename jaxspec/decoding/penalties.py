"""Penalties, bias and bans: the adjustments of the target's logits at a node, given the text before it.

A node's text is the committed tokens, the root, and the node's own ancestors in the tree; siblings do not count. So every node
gets the logits that plain decoding computes after the same text.
"""

from typing import NamedTuple

import jax.numpy as jnp

from jaxspec.decoding.settings import Settings
from jaxspec.decoding.tree import Tree
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


def tree_context(history: Int[Array, "b t"], length: Int[Array, " b"], tree: Tree, nodes: slice = slice(None)) -> Context:
    """The context of these nodes; the history holds the root already, at position `length`."""
    return Context(history, length + 1, tree.tokens[:, 1:], tree.mask[:, nodes, 1:])


def adjust_logits(
    logits: Float[Array, "b n w"],
    positions: Int[Array, "b n"],
    context: Context,
    settings: Settings,
    bias: Float[Array, "b v"],
    ids: Int[Array, " w"] | None = None,
) -> Float[Array, "b n w"]:
    """Applies penalties, then bias, then min_tokens to the logits of the tokens at `positions` (see SamplingParams).

    `ids`: the token of each logit, for a head's own vocabulary, without extra tokens in the context. None: the whole vocabulary.
    """
    vocab_size = bias.shape[-1]
    occurs, generated = count_tokens(context, settings.prompt_length, vocab_size)
    banned = banned_stops(positions, settings, vocab_size)

    def adjust(logits: Array, occurs: Array, generated: Array, bias: Array, banned: Array) -> Array:
        repetition, frequency, presence = (
            field[:, None, None] for field in (settings.repetition_penalty, settings.frequency_penalty, settings.presence_penalty)
        )
        repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = jnp.where(occurs, repeated, logits)
        logits = logits - frequency * generated - presence * (generated > 0) + bias
        return jnp.where(banned, MIN_TOKENS_BAN + jnp.minimum(logits, 0), logits)

    columns = slice(None) if ids is None else ids
    of_prefix = [values[:, None] for values in (occurs, generated, bias)]
    adjusted = adjust(logits, *(values[..., columns] for values in (*of_prefix, banned)))
    if extra := context.extra.shape[1]:  # their counts differ from node to node, so these columns are set once more
        tokens = context.extra[:, None, :]
        again = jnp.sum(context.seen[:, :, :, None] & (context.extra[:, None, :, None] == tokens[:, :, None]), 2)
        occurs, generated, bias = (jnp.take_along_axis(values, tokens, 2) for values in of_prefix)
        everywhere = jnp.broadcast_to(tokens, (*positions.shape, extra))
        own, stops = (jnp.take_along_axis(values, everywhere, 2) for values in (logits, banned))
        own = adjust(own, occurs | (again > 0), generated + again, bias, stops)
        batch, node = jnp.arange(len(logits))[:, None, None], jnp.arange(logits.shape[1])[None, :, None]
        adjusted = adjusted.at[batch, node, tokens].set(own)
    return adjusted


def count_tokens(
    context: Context, prompt_length: Int[Array, " b"], vocab_size: int
) -> tuple[Bool[Array, "b v"], Float[Array, "b v"]]:
    """The tokens that occur in the shared prefix, and how often each was generated there.

    In:  history [7, 8, 8], known 3, prompt_length 1
    Out: 7 and 8 occur; 8 was generated twice, 7 never
    """
    places = jnp.arange(context.history.shape[1])
    known = places < context.known[:, None]
    generated = known & (places >= prompt_length[:, None])
    sequence = jnp.arange(len(known))[:, None]
    zeros = jnp.zeros((len(known), vocab_size), jnp.float32)
    occurs = zeros.at[sequence, context.history].add(known.astype(jnp.float32))
    return occurs > 0, zeros.at[sequence, context.history].add(generated.astype(jnp.float32))


def banned_stops(positions: Int[Array, "b n"], settings: Settings, vocab_size: int) -> Bool[Array, "b n v"]:
    """The stop tokens at positions where min_tokens is not reached yet."""
    batch = positions.shape[0]
    stops = jnp.zeros((batch, vocab_size + 1), bool)  # the last column takes the unused entries, which are -1
    stops = stops.at[jnp.arange(batch)[:, None], settings.stop_tokens].set(True)
    return stops[:, None, :vocab_size] & (positions < settings.min_length[:, None])[:, :, None]
