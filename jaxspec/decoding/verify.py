"""Verification: one forward pass of the target over the tree, then a walk along the target's own tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.decoding.drafter import Models
from jaxspec.decoding.penalties import adjust_logits, tree_context
from jaxspec.decoding.sampling import ALL, Thresholds, choose, choose_by_threshold
from jaxspec.decoding.settings import SamplingKind, highest_kind
from jaxspec.decoding.state import Batch, Sequences, State
from jaxspec.decoding.tree import Tree
from jaxspec.models.layers import AttentionMetadata
from jaxspec.typing import Array, Bool, Float, Int, KeysValues, UInt

RUNNING, STOPPED, OUT_OF_BUDGET = 0, 1, 2  # finish codes, as the host reads them
REPORT_HEADER = 3
"""Columns of a report before its tokens: emitted tokens, accepted drafts, finish code."""
NOT_VERIFIED = -1
"""The source, in a report, of a node that was not verified."""


class Verified(NamedTuple):
    """The target's results for every node."""

    target_tokens: Int[Array, "b n"]
    """The target's own token after each node."""
    logits: Float[Array, "b n v"]
    """Unchanged: before penalties, bias and temperature."""
    features: Float[Array, "b n f"]
    window: tuple[KeysValues, ...]
    """Their keys and values in each layer, not yet in the cache."""


class Accepted(NamedTuple):
    """The tokens that a cycle emits: accepted drafts and then the bonus, unless truncated."""

    path: Int[Array, "b j"]
    """The accepted nodes, root first; entries after index `accepted` mean nothing."""
    tokens: Int[Array, "b j"]
    """The target's token after each node of the path."""
    accepted: Int[Array, " b"]
    """Accepted drafts, 0 .. num_steps."""
    emitted: Int[Array, " b"]
    """Tokens emitted: accepted + 1, or fewer where a stop token or the budget truncates them; 0 for a finished sequence."""
    finish: Int[Array, " b"]
    """RUNNING, STOPPED or OUT_OF_BUDGET."""


@jax.named_scope("verify")
def verify(
    models: Models,
    state: State,
    batch: Batch,
    tree: Tree,
    masks: UInt[Array, "b n words"] | None = None,
) -> Verified:
    """Runs all nodes that pay as one window (a node sees the cache, its ancestors and itself) and chooses a token after each.

    `masks`: as for `choose_tokens`.
    """
    length = batch.sequences.length
    metadata = AttentionMetadata(length[:, None] + tree.depth, batch.page_table, jnp.zeros_like(length), length, tree.mask)
    out = models.target(tree.verified, metadata, state.cache, models.drafter.capture)
    logits = models.target.logits(out.hidden)
    chosen = choose_tokens(state, batch, tree, logits, models.thresholds, masks)
    return Verified(chosen, logits, out.features, out.window)


def choose_tokens(
    state: State,
    batch: Batch,
    tree: Tree,
    logits: Float[Array, "b n v"],
    thresholds: Thresholds | None = None,
    masks: UInt[Array, "b n words"] | None = None,
) -> Int[Array, "b n"]:
    """The target's own token after every node, as the settings of each sequence ask, among those that its mask allows: a mask for
    each node (`masks`), or that of the sequence, which holds after the root (State.masks)."""
    if masks is not None:
        logits = jnp.where(unpack(masks, logits.shape[-1]), logits, -jnp.inf)
    sequences = batch.sequences
    needed = highest_kind(batch.settings, ~sequences.done)
    positions = sequences.length[:, None] + tree.depth + 1

    def adjust(logits: Float[Array, "b n v"], nodes: slice = ALL) -> Float[Array, "b n v"]:
        context = tree_context(state.history[batch.rows], sequences.length, tree, nodes)
        if masks is None:
            allowed = unpack(state.masks[batch.rows][:, None], logits.shape[-1]) | ~batch.settings.masked[:, None, None]
            logits = jnp.where(allowed, logits, -jnp.inf)
        return adjust_logits(logits, positions[:, nodes], context, batch.settings, state.bias[batch.rows])

    if thresholds is None:
        return choose(logits, positions, needed, lambda: batch.settings, adjust)
    adjusted = jax.lax.cond(needed == SamplingKind.ADJUSTED, adjust, lambda same: same, logits)
    return choose_by_threshold(adjusted, positions, batch.settings, tree, thresholds)


def unpack(masks: UInt[Array, "b n words"], vocab_size: int) -> Bool[Array, "b n v"]:
    """The bits of 32-bit words, the lowest first.

    In:  [[[5]]], vocabulary of 4
    Out: [[[1, 0, 1, 0]]]
    """
    bits = (masks[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(*masks.shape[:2], -1)[..., :vocab_size] > 0


@jax.named_scope("accept")
def accept(tree: Tree, target_tokens: Int[Array, "b n"], batch: Batch, num_steps: int) -> Accepted:
    """Walks from the root while the target's token is a child; truncates at stop tokens and at the token budget, and after the
    root if the settings are `masked`.

    A node is accepted if it and each of its ancestors is the target's token after its parent. Siblings have different tokens, so at
    most one node per level is accepted.
    """
    parent = jnp.maximum(tree.parents, 0)
    matches = (tree.tokens == jnp.take_along_axis(target_tokens, parent, 1)) | (tree.parents < 0)
    if tree.pays is not None:
        matches &= tree.pays
    on_walk = jnp.all(matches[:, None, :] | ~tree.mask, -1)
    accepted = jnp.where(batch.settings.masked, 0, jnp.max(jnp.where(on_walk, tree.depth, 0), -1))
    columns = jnp.arange(num_steps + 1)
    path = jnp.argmax(on_walk[:, None, :] & (tree.depth[:, None, :] == columns[:, None]), -1).astype(jnp.int32)
    tokens = jnp.take_along_axis(target_tokens, path, 1)
    emitted, finish = truncate(tokens, accepted + 1, batch.sequences, batch.settings.stop_tokens)
    return Accepted(path, tokens, accepted, emitted, finish)


def truncate(
    tokens: Int[Array, "b j"], available: Int[Array, " b"], sequences: Sequences, stop_tokens: Int[Array, "b stops"]
) -> tuple[Int[Array, " b"], Int[Array, " b"]]:
    """The number of emitted tokens among the first `available`, and the finish code. Stop tokens are emitted.

    In:  tokens [[5, 2, 9]], available [3], stop token 2, remaining 10
    Out: emitted [2], finish [STOPPED]
    """
    columns = jnp.arange(tokens.shape[1])
    allowed = columns < jnp.minimum(available, sequences.remaining)[:, None]
    stops = allowed & jnp.any(tokens[:, :, None] == stop_tokens[:, None, :], -1)
    stopped = jnp.any(stops, -1)
    emitted = jnp.where(stopped, jnp.argmax(stops, -1) + 1, jnp.sum(allowed, -1))
    emitted = jnp.where(sequences.done, 0, emitted).astype(jnp.int32)
    ended = jnp.where(stopped, STOPPED, jnp.where(emitted >= sequences.remaining, OUT_OF_BUDGET, RUNNING))
    return emitted, jnp.where(sequences.done, RUNNING, ended).astype(jnp.int32)


def report(accepted: Accepted, tree: Tree) -> Int[Array, "b columns"]:
    """The number of emitted tokens, of accepted drafts, the finish code, then the tokens: all that the host reads, unless a request
    wants log probabilities or trees. With drafts there follow the number of those that were verified and, where drafts are merged,
    the sources of the path and of all nodes (Tree.sources)."""
    columns = [jnp.stack([accepted.emitted, accepted.accepted, accepted.finish], 1), accepted.tokens]
    if tree.tokens.shape[1] > 1:
        pays = jnp.ones(tree.tokens.shape, bool) if tree.pays is None else tree.pays
        columns.append(jnp.sum(pays, 1, keepdims=True, dtype=jnp.int32) - 1)
        if tree.sources is not None:
            columns += [jnp.take_along_axis(tree.sources, accepted.path, 1), jnp.where(pays, tree.sources, NOT_VERIFIED)]
    return jnp.concatenate(columns, 1)
