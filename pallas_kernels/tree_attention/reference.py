"""Tree attention in plain XLA: the definition that kernels are tested against, and the CPU path."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Real

from pallas_kernels.fp8 import Scales, numbers

UNSEEN = -1e30
"""The score of keys that a row does not see. Finite: a row without any would be NaN, which other rows would read later."""


@jax.named_scope("tree_attention_reference")
def reference_attention(
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
    """Gathers the sequence's pages, puts the window after them and attends. See `api.tree_attention`."""
    b, w, heads, head_dim = q.shape
    kv_heads = k_window.shape[2]
    slots = page_table.shape[1] * k_pages.shape[1]
    visible = (jnp.arange(slots) >= start[:, None]) & (jnp.arange(slots) < length[:, None])

    def gather(pages):  # unseen slots become 0: they may hold NaN, and 0 * NaN is NaN
        return jnp.where(visible[:, :, None, None], pages[page_table].reshape(b, slots, kv_heads, head_dim), 0)

    k = numbers(jnp.concatenate([gather(k_pages), k_window], 1), q.dtype)
    v = numbers(jnp.concatenate([gather(v_pages), v_window], 1), q.dtype)
    seen = jnp.concatenate([jnp.broadcast_to(visible[:, None], (b, w, slots)), mask], 2)

    grouped = q.reshape(b, w, kv_heads, heads // kv_heads, head_dim)
    logits = jnp.einsum("bwkgd,bskd->bkgws", grouped, k, preferred_element_type=jnp.float32) / head_dim**0.5
    if scales is not None:
        logits *= scales.k[:, None, None, None]
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], logits, UNSEEN), -1)
    # The batch axes first: asked for "bwkgd", XLA's CPU compiler would transpose the values, which costs more than the product.
    out = jnp.einsum("bkgws,bskd->bkgwd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    if scales is not None:
        out *= scales.v[:, None, None, None]
    return out.transpose(0, 3, 1, 2, 4).reshape(b, w, heads, head_dim).astype(q.dtype)
