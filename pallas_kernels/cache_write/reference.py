"""Cache write as XLA scatters. See `api.cache_write`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Real


@jax.named_scope("cache_write_reference")
def reference_write(
    pages: tuple[Real[Array, "pages page kv_heads head_dim"], ...],
    windows: tuple[Real[Array, "b s kv_heads head_dim"], ...],
    page_table: Int[Array, "b p"],
    path: Int[Array, "b j"],
    slots: Int[Array, "b j"],
    write: Bool[Array, "b j"],
) -> tuple[Real[Array, "pages page kv_heads head_dim"], ...]:
    count, page_size = pages[0].shape[:2]
    page = jnp.take_along_axis(page_table, slots // page_size, 1, mode="clip")
    # Rows that are not written get an index past the last page, which the scatter drops.
    place = jnp.where(write, page * page_size + slots % page_size, count * page_size)

    def scatter(array, window):
        rows = jnp.take_along_axis(window, path[:, :, None, None], 1)
        flat = array.reshape(count * page_size, *array.shape[2:])
        return flat.at[place].set(rows.astype(flat.dtype), mode="drop").reshape(array.shape)

    return tuple(scatter(array, window) for array, window in zip(pages, windows, strict=True))
