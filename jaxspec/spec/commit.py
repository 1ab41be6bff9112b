"""Commit: accepted rows enter a cache."""

import jax

from jaxspec.typing import Array, Bool, Int, KeysValues
from pallas_kernels.cache_write import cache_write


@jax.named_scope("commit")
def commit(
    cache: tuple[KeysValues, ...],
    window: tuple[KeysValues, ...],
    page_table: Int[Array, "b p"],
    path: Int[Array, "b j"],
    slots: Int[Array, "b j"],
    write: Bool[Array, "b j"],
) -> tuple[KeysValues, ...]:
    """Writes window row path[j] of every layer to slot slots[j], where write[j]. Rejected rows never reach the cache."""
    pages, rows = ([array for layer in layers for array in layer] for layers in (cache, window))
    written = cache_write(tuple(pages), tuple(rows), page_table, path, slots, write)
    return tuple(map(KeysValues, written[::2], written[1::2]))
