"""Keys and values of chosen window rows go to their slots; everything else of the cache stays."""

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.cache_write.reference import reference_write

IMPLEMENTATIONS = {"reference": reference_write}


def cache_write(
    k_pages: Float[Array, "pages page kv_heads head_dim"],
    v_pages: Float[Array, "pages page kv_heads head_dim"],
    k_window: Float[Array, "b s kv_heads head_dim"],
    v_window: Float[Array, "b s kv_heads head_dim"],
    page_table: Int[Array, "b p"],
    path: Int[Array, "b j"],
    slots: Int[Array, "b j"],
    write: Bool[Array, "b j"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "pages page kv_heads head_dim"], Float[Array, "pages page kv_heads head_dim"]]:
    """Writes window row path[b, j] to slot slots[b, j] of its sequence where write[b, j]; returns the new k_pages, v_pages.

    Slot i of a sequence lies in page page_table[i // page] at i % page. Donate the pages to update them in place.

    In:  page_table [[7, 2]], page 4, path [[0, 3]], slots [[3, 4]], write [[True, True]]
    Out: row 0 of the window lies in page 7 at 3, row 3 in page 2 at 0

    Raises:
        ValueError: the implementation's name is unknown.
    """
    name = implementation or "reference"
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"unknown cache_write implementation {name!r}; there are: {', '.join(IMPLEMENTATIONS)}")
    return IMPLEMENTATIONS[name](k_pages, v_pages, k_window, v_window, page_table, path, slots, write)
