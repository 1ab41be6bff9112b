"""Writes selected window rows to their cache slots, for all layers at once."""

from jaxtyping import Array, Bool, Int, Real

from pallas_kernels.cache_write.pallas_triton import pallas_triton_write
from pallas_kernels.cache_write.reference import reference_write
from pallas_kernels.dispatch import call
from pallas_kernels.fp8 import is_fp8

type Pages = Real[Array, "pages page kv_heads head_dim"]
type Window = Real[Array, "b s kv_heads head_dim"]

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
        windows: the computed keys or values; windows[i] belongs to pages[i]. Bytes of 8-bit numbers if and only if the pages are.
        page_table: the pages of each sequence, in order.
        path: the window rows to write.
        slots: their slots, without duplicates; the slot of a row that is not written may be anything.
        write: which rows of `path` are written.
        implementation: a name from IMPLEMENTATIONS; None picks the kernel on a GPU and the reference elsewhere.

    Raises:
        ValueError: the name of the implementation is unknown, or only pages or only windows are in 8 bits.
    """
    if [is_fp8(each) for each in pages] != [is_fp8(each) for each in windows]:
        raise ValueError(f"the cache is {pages[0].dtype} and what to write {windows[0].dtype}: both must be bytes, or neither")
    arguments = (pages, windows, page_table, path, slots, write)
    return call("cache_write", IMPLEMENTATIONS, implementation, arguments)
