"""What of a head's cache a draft may see: all of it, or its first slots (the sink) and its last ones (the window).

Heads are trained on short texts, and far back they find little; a window keeps them within what they know and reads less.
Keys carry their rotation already, so a window is nothing but another page table.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from jaxspec.typing import Array, Int


@dataclass(frozen=True)
class DraftWindow:
    """SGLang's --speculative-draft-window-size and --speculative-draft-sink-size, in tokens."""

    size: int
    sink: int = 0


class Visible(NamedTuple):
    """A stretch of a cache, as attention takes it."""

    page_table: Int[Array, "b p"]
    start: Int[Array, " b"]
    length: Int[Array, " b"]


def visible(page_table: Int[Array, "b p"], length: Int[Array, " b"], page_size: int, window: DraftWindow | None) -> Visible:
    """The slots 1 <= i < length of a head's cache, or those of them that the window leaves.

    Without a sink exactly the last `size` slots; with one, the pages that hold the sink and the last `size` slots.

    In:  pages [3, 8, 5, 9, 4], length 18, page_size 4, size 5, sink 2
    Out: pages [3, 9, 4, ...], start 1, length 10: slots 1-3, 12-15 and 16-17
    """
    start = jnp.ones_like(length)
    if window is None:
        return Visible(page_table, start, length)
    sink = -(-window.sink // page_size)
    tail = -(-window.size // page_size) + 1  # it may begin and end inside a page
    first = jnp.maximum(length - window.size, 0)
    if sink + tail >= page_table.shape[1]:  # nothing to leave out of the table
        return Visible(page_table, jnp.maximum(start, first) if sink == 0 else start, length)
    first_page = jnp.maximum(first // page_size, sink)
    pages = first_page[:, None] + jnp.arange(tail)
    tail_pages = jnp.take_along_axis(page_table, jnp.minimum(pages, page_table.shape[1] - 1), 1)
    skipped = (first_page - sink) * page_size
    start = jnp.maximum(start, first) - skipped if sink == 0 else start
    return Visible(jnp.concatenate([page_table[:, :sink], tail_pages], 1), start, length - skipped)
