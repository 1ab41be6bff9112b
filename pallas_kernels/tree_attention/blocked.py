"""Tree attention in plain XLA, a block of slots at a time: the CPU path. Its time grows with the longest sequence of the batch,
not with the page table."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Real

from pallas_kernels.fp8 import Scales, numbers
from pallas_kernels.tree_attention.reference import UNSEEN, reference_attention

BLOCK = 128
"""Slots, at least a page. Larger blocks pay in large batches, smaller ones for short texts (two cores, AMD EPYC, jax 0.12.0.1,
November 2026)."""
READ_WHOLE = 256
"""A page table for at most this many slots is read whole: the loop costs some 40 µs a call."""
NOTHING_SEEN = -1e20
"""The largest score before any key. Finite, as -inf - -inf is NaN."""


@jax.named_scope("tree_attention_blocked")
def blocked_attention(
    q: Float[Array, "b w heads head_dim"],
    k_pages: Real[Array, "pages page kv_heads head_dim"],
    v_pages: Real[Array, "pages page kv_heads head_dim"],
    page_table: Int[Array, "b p"],
    start: Int[Array, " b"],
    length: Int[Array, " b"],
    k_window: Real[Array, "b s kv_heads head_dim"],
    v_window: Real[Array, "b s kv_heads head_dim"],
    mask: Bool[Array, "b w s"],
    scales: Scales | None = None,
) -> Float[Array, "b w heads head_dim"]:
    """Attends to the window, then to each block of the cache that a sequence sees (online softmax). See `api.tree_attention`."""
    if page_table.shape[1] * k_pages.shape[1] <= READ_WHOLE:
        return reference_attention(q, k_pages, v_pages, page_table, start, length, k_window, v_window, mask, scales)
    b, w, heads, head_dim = q.shape
    page, kv_heads, entries = k_pages.shape[1], k_pages.shape[2], page_table.shape[1]
    group = heads // kv_heads
    rows = q.reshape(b, w, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4).reshape(b, kv_heads, group * w, head_dim)
    at_once = -(-BLOCK // page)
    slots = at_once * page
    page_table = jnp.pad(page_table, ((0, 0), (0, -entries % at_once)))

    def attend(so_far, k, v, bias):
        """Adds keys and values [b s kv_heads head_dim]; `bias` [b 1 rows s] hides those that a row does not see."""
        largest, total, out = so_far
        k, v = numbers(k, q.dtype), numbers(v, q.dtype)
        scores = jnp.einsum("bkrd,bskd->bkrs", rows, k, preferred_element_type=jnp.float32) / head_dim**0.5
        if scales is not None:
            scores *= scales.k[:, None, None]
        scores += bias
        now_largest = jnp.maximum(largest, scores.max(-1))
        weights, kept = jnp.exp(scores - now_largest[..., None]), jnp.exp(largest - now_largest)
        added = jnp.einsum("bkrs,bskd->bkrd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return now_largest, total * kept + weights.sum(-1), out * kept[..., None] + added

    def attend_block(number, so_far):
        slot = number * slots + jnp.arange(slots)
        visible = (slot >= start[:, None]) & (slot < length[:, None])
        pages = jax.lax.dynamic_slice_in_dim(page_table, number * at_once, at_once, 1)
        gathered = (each[pages].reshape(b, slots, kv_heads, head_dim) for each in (k_pages, v_pages))
        k, v = (jnp.where(visible[:, :, None, None], each, 0) for each in gathered)  # unseen slots may hold NaN, and 0 * NaN is NaN
        return attend(so_far, k, v, jnp.where(visible, 0, UNSEEN)[:, None, None])

    window_bias = jnp.broadcast_to(jnp.where(mask, 0, UNSEEN)[:, None], (b, group, *mask.shape[1:]))
    nothing = jnp.full(rows.shape[:-1], NOTHING_SEEN), jnp.zeros(rows.shape[:-1]), jnp.zeros(rows.shape)
    so_far = attend(nothing, k_window, v_window, window_bias.reshape(b, 1, group * w, -1)) if k_window.shape[1] else nothing
    _, total, out = jax.lax.fori_loop(jnp.min(start) // slots, -(-jnp.max(length) // slots), attend_block, so_far)
    if scales is not None:
        out *= scales.v[:, None, None]
    out = (out / jnp.where(total > 0, total, 1)[..., None]).reshape(b, kv_heads, group, w, head_dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(b, w, heads, head_dim).astype(q.dtype)
