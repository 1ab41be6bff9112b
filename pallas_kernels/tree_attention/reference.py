"""Tree attention in plain XLA: the definition that kernels are tested against, and the CPU path."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@jax.named_scope("tree_attention_reference")
def reference_attention(
    q: Float[Array, "b w heads head_dim"],
    k_pages: Float[Array, "pages page kv_heads head_dim"],
    v_pages: Float[Array, "pages page kv_heads head_dim"],
    page_table: Int[Array, "b p"],
    start: Int[Array, " b"],
    length: Int[Array, " b"],
    k_window: Float[Array, "b s kv_heads head_dim"],
    v_window: Float[Array, "b s kv_heads head_dim"],
    mask: Bool[Array, "b w s"],
) -> Float[Array, "b w heads head_dim"]:
    """Gathers the sequence's pages, puts the window behind them and attends. See `api.tree_attention`."""
    b, w, heads, head_dim = q.shape
    kv_heads = k_window.shape[2]
    slots = page_table.shape[1] * k_pages.shape[1]
    visible = (jnp.arange(slots) >= start[:, None]) & (jnp.arange(slots) < length[:, None])

    def gather(pages):  # unseen slots become 0: they may hold NaN, and 0 * NaN is NaN
        return jnp.where(visible[:, :, None, None], pages[page_table].reshape(b, slots, kv_heads, head_dim), 0)

    k = jnp.concatenate([gather(k_pages), k_window], 1)
    v = jnp.concatenate([gather(v_pages), v_window], 1)
    seen = jnp.concatenate([jnp.broadcast_to(visible[:, None], (b, w, slots)), mask], 2)

    grouped = q.reshape(b, w, kv_heads, heads // kv_heads, head_dim)
    logits = jnp.einsum("bwkgd,bskd->bkgws", grouped, k, preferred_element_type=jnp.float32) / head_dim**0.5
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], logits, -jnp.inf), -1)
    # The batch axes first: asked for "bwkgd", XLA's CPU compiler would transpose the values, which costs more than the product.
    out = jnp.einsum("bkgws,bskd->bkgwd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return out.transpose(0, 3, 1, 2, 4).reshape(b, w, heads, head_dim).astype(q.dtype)
