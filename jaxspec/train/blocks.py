"""Training block heads: blocks after random places of a text, all at once, drafted as in decoding.

A block begins at a token of an answer, and its drafts count up to where the answer ends (as in DeepSpec's trainer). DFlash's
early drafts count more, as later ones need them (arXiv 2602.06036); JetSpec's count alike (arXiv 2606.18394, section 3.3). Both
learn the target's whole distribution here, as in JetSpec's paper; DFlash's authors train on the text's own tokens.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.block import BlockConfig, BlockHead
from jaxspec.models.layers import AttentionMetadata
from jaxspec.models.linear import Kernels
from jaxspec.models.llama import Llama
from jaxspec.train.ttt import Lesson, Rows, Unrolled, distances
from jaxspec.typing import Array, Bool, Float, Int

SHARE = 1
"""A row's blocks together hold this many times the row's tokens."""


def decay_of(config: BlockConfig) -> float:
    """Weight of a position's loss, relative to the position before: exp(-1/gamma), where gamma is half a block. (DeepSpec has 4 for
    blocks of 7 tokens.) 1 for JetSpec."""
    return 1.0 if all(config.causal) else math.exp(-2 / config.block_size)


def drawn_roots(rows: Rows, block_size: int, step: Int[Array, ""] | int, seed: int) -> Int[Array, "b a"]:
    """The columns at which each row's blocks begin: random ones that are learnt, and others only if these are too few. The choice
    depends on step and seed only."""
    learnt = jnp.asarray(rows.learnt)
    width = learnt.shape[1]
    order = jax.random.uniform(jax.random.fold_in(jax.random.key(seed), step), learnt.shape) + learnt
    return jax.lax.top_k(order, min(width, max(1, SHARE * width // block_size)))[1]


def drafted(
    head: BlockHead, target: Llama, features: Float[Array, "b n f"], rows: Rows, roots: Int[Array, "b a"]
) -> Float[Array, "b a steps h"]:
    """What `logits` reads of the tokens that each block drafts. The head needs less memory if it was built with TRAINING."""
    config, (batch, count) = head.config, roots.shape
    columns = np.arange(config.block_size)
    segments, places = jnp.asarray(rows.segments), jnp.asarray(rows.positions)
    positions = jnp.take_along_axis(places, roots, 1)[:, :, None] + jnp.asarray(columns, jnp.int32)
    of_text = (jnp.take_along_axis(segments, roots, 1)[:, :, None] == segments[:, None]) & (
        jnp.arange(segments.shape[1]) < roots[:, :, None]
    )

    def metadata(causal: bool, window: int | None) -> AttentionMetadata:
        block = columns[:, None] >= columns if causal else np.ones((len(columns), len(columns)), bool)
        seen = jnp.broadcast_to(of_text[:, :, None], (*positions.shape, segments.shape[1]))
        if window is not None:
            seen &= positions[..., None] - places[:, None, None] < window
        mask = jnp.concatenate([seen, jnp.broadcast_to(block, (*positions.shape, len(columns)))], 3)
        return AttentionMetadata.of_window(positions.reshape(batch, -1), mask.reshape(batch, -1, mask.shape[3]))

    kinds = tuple(zip(config.causal, config.windows, strict=True))
    views = {kind: metadata(*kind) for kind in dict.fromkeys(kinds)}
    tokens = jnp.full(positions.shape, config.mask_token_id, jnp.int32)
    tokens = tokens.at[:, :, 0].set(jnp.take_along_axis(jnp.asarray(rows.tokens), roots, 1)).reshape(batch, -1)
    text = head.keys_values(features, places)
    hidden = head(head.embed(tokens, target), [views[kind] for kind in kinds], None, text)
    return hidden.reshape(batch, count, len(columns), -1)[:, :, config.first :]


def unroll_blocks(head: BlockHead, target: Llama, taught: Lesson, rows: Rows, roots: Int[Array, "b a"], loss: str) -> Unrolled:
    """Drafts a block after each root. `loss` is one of LOSSES.

    Draft i of a block at column r is compared with the target's distribution at column r + i, which predicts the same token. It
    counts if that column and all before it in the block are learnt and of the same conversation. Losses are means over all blocks,
    those that don't count included.
    """
    config, learnt, segments = head.config, jnp.asarray(rows.learnt), jnp.asarray(rows.segments)
    goals = roots[:, :, None] + jnp.arange(config.max_steps)
    is_inside, goals = goals < learnt.shape[1], jnp.minimum(goals, learnt.shape[1] - 1)

    def at_goals(values: Array) -> Array:
        return jax.vmap(lambda row, columns: row[columns])(values, goals)

    counts = is_inside & at_goals(learnt) & (at_goals(segments) == jnp.take_along_axis(segments, roots, 1)[:, :, None])
    counted = jnp.cumprod(counts, 2).astype(bool)
    hidden = drafted(head, target, taught.features, rows, roots)
    weights = counted / np.float32(roots.size)
    goal, log_sum = at_goals(taught.hidden), at_goals(taught.log_sum)
    total, losses, found = distances(head, target, goal, log_sum, hidden, weights, loss, decay_of(config))
    right = counted & (found == at_goals(taught.choice))
    return Unrolled(total, losses, jnp.moveaxis(right, 2, 0), jnp.moveaxis(counted, 2, 0))


@jax.checkpoint
def attend(
    q: Float[Array, "b q heads d"], k: Float[Array, "b s kv d"], v: Float[Array, "b s kv d"], mask: Bool[Array, "b q m"]
) -> Float[Array, "b q heads d"]:
    """Each block attends to the text and to itself. The text's keys come first; the mask's last columns are the block's own.
    For the gradient, scores are computed again rather than kept."""
    batch, count, heads, head_dim = q.shape
    text, kv_heads = k.shape[1] - count, k.shape[2]
    width = mask.shape[2] - text
    grouped = q.reshape(batch, count // width, width, kv_heads, heads // kv_heads, head_dim)
    k_own, v_own = (each[:, text:].reshape(batch, count // width, width, kv_heads, head_dim) for each in (k, v))
    of_text = jnp.einsum("bawkgd,bskd->bkgaws", grouped, k[:, :text], preferred_element_type=jnp.float32)
    of_own = jnp.einsum("bawkgd,baskd->bkgaws", grouped, k_own, preferred_element_type=jnp.float32)
    seen = mask.reshape(batch, 1, 1, count // width, width, -1)
    scores = jnp.where(seen, jnp.concatenate([of_text, of_own], -1) / head_dim**0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, -1).astype(q.dtype)
    out = jnp.einsum("bkgaws,bskd->bawkgd", weights[..., :text], v[:, :text], preferred_element_type=jnp.float32)
    out += jnp.einsum("bkgaws,baskd->bawkgd", weights[..., text:], v_own, preferred_element_type=jnp.float32)
    return out.reshape(q.shape).astype(q.dtype)


def block_attention(
    q, k_pages, v_pages, page_table, start, length, k_window, v_window, mask, scales: None = None, *, implementation: None = None
):  # fmt: skip
    """`tree_attention` for the masks of `drafted`, which leave out the keys of other blocks."""
    return attend(q, k_window, v_window, mask)


TRAINING_BLOCKS = Kernels(attend=block_attention)
"""What a block head in training is built with."""
