"""Writes selected window rows to their cache slots, for all layers at once."""

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.cache_write.pallas_triton import pallas_triton_write
from pallas_kernels.cache_write.reference import reference_write
from pallas_kernels.dispatch import call

type Pages = Float[Array, "pages page kv_heads head_dim"]
type Window = Float[Array, "b s kv_heads head_dim"]

IMPLEMENTATIONS = {"reference": reference_write, "pallas_triton": pallas_triton_write}


def cache_write(
    pages: tuple[Pages, ...],
    windows: tuple[Window, ...],
    page_table: Int[Array, "b p"],
    path: Int[Array, "b j"],
    slots: Int[Array, "b j"],
    write: Bool[Array, "b j"],
    *,
    implementation: str | None = None,
) -> tuple[Pages, ...]:
    """Writes row path[b, j] of every window to slot slots[b, j] of its pages where write[b, j]; returns the new pages.

    Slot i of a sequence lies in page page_table[i // page] at i % page. Donate the pages to update them in place.

    In:  page_table [[7, 2]], page 4, path [[0, 3]], slots [[3, 4]], write [[True, True]]
    Out: row 0 of each window lies in page 7 at 3, row 3 in page 2 at 0

    Args:
        pages: the keys or the values of one layer each, all of one shape.
        windows: the computed keys or values; windows[i] belongs to pages[i].
        page_table: the pages of each sequence, in order.
        path: the window rows to write.
        slots: their slots, without duplicates; the slot of a row that is not written may be anything.
        write: which rows of `path` are written.
        implementation: a name from IMPLEMENTATIONS; None picks the kernel on a GPU and the reference elsewhere.

    Raises:
        ValueError: the name of the implementation is unknown.
    """
    arguments = (pages, windows, page_table, path, slots, write)
    return call("cache_write", IMPLEMENTATIONS, implementation, arguments)
