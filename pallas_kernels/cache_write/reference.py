"""Cache write as an XLA scatter. See `api.cache_write`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@jax.named_scope("cache_write_reference")
def reference_write(
    k_pages: Float[Array, "pages page kv_heads head_dim"],
    v_pages: Float[Array, "pages page kv_heads head_dim"],
    k_window: Float[Array, "b s kv_heads head_dim"],
    v_window: Float[Array, "b s kv_heads head_dim"],
    page_table: Int[Array, "b p"],
    path: Int[Array, "b j"],
    slots: Int[Array, "b j"],
    write: Bool[Array, "b j"],
) -> tuple[Float[Array, "pages page kv_heads head_dim"], Float[Array, "pages page kv_heads head_dim"]]:
    pages, page_size = k_pages.shape[:2]
    page = jnp.take_along_axis(page_table, slots // page_size, 1, mode="clip")
    # A row that is not written gets a place behind the last page, which the scatter drops.
    place = jnp.where(write, page * page_size + slots % page_size, pages * page_size)

    def scatter(pages_array, window):
        rows = jnp.take_along_axis(window, path[:, :, None, None], 1)
        flat = pages_array.reshape(pages * page_size, *pages_array.shape[2:])
        return flat.at[place].set(rows.astype(flat.dtype), mode="drop").reshape(pages_array.shape)

    return scatter(k_pages, k_window), scatter(v_pages, v_window)
