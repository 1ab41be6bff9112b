"""Cache write as one launch for many layers. See `api.cache_write`."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Int, Real

NUMBERS_PER_LAUNCH = 32 * 1024
"""Numbers in registers at once, half as many as a multiprocessor has registers: one row of each of 32 arrays of Llama-3.1-8B.
64 arrays spill (sm_90a)."""


@jax.named_scope("cache_write")
def pallas_triton_write(
    pages: tuple[Real[Array, "pages page kv_heads head_dim"], ...],
    windows: tuple[Real[Array, "b s kv_heads head_dim"], ...],
    page_table: Int[Array, "b p"],
    path: Int[Array, "b j"],
    slots: Int[Array, "b j"],
    write: Bool[Array, "b j"],
    *,
    interpret: bool = False,
) -> tuple[Real[Array, "pages page kv_heads head_dim"], ...]:
    """One program per written row copies that row in many arrays.

    One launch per layer would cost more than moving the bytes: 32 layers of Llama-3.1-8B and 6 rows are 0.8 MB.
    """
    _, page_size, kv_heads, head_dim = pages[0].shape
    arrays = max(1, NUMBERS_PER_LAUNCH // pl.next_power_of_2(kv_heads * head_dim))
    page = jnp.take_along_axis(page_table, slots // page_size, 1, mode="clip")
    place = jnp.where(write, page * page_size + slots % page_size, -1)
    written: list[Array] = []
    for first in range(0, len(pages), arrays):
        some = slice(first, first + arrays)
        written += _launch(pages[some], windows[some], path, place, interpret=interpret)
    return tuple(written)


def _launch(pages: tuple, windows: tuple, path: Array, place: Array, *, interpret: bool) -> list[Array]:
    count, page_size, kv_heads, head_dim = pages[0].shape
    batch, window_rows = windows[0].shape[:2]
    width = kv_heads * head_dim
    flat_pages = [array.reshape(count * page_size, width) for array in pages]
    flat_windows = [window.reshape(batch * window_rows, width) for window in windows]
    inputs = (path, place, *flat_windows, *flat_pages)
    written = pl.pallas_call(
        partial(_copy_rows, arrays=len(pages), window_rows=window_rows, width=width),
        grid=path.shape,
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in flat_pages],
        input_output_aliases={len(inputs) - len(pages) + index: index for index in range(len(pages))},
        compiler_params=pltriton.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="cache_write",
    )(*inputs)
    return [array.reshape(pages[0].shape) for array in written]


def _copy_rows(path_ref, place_ref, *refs, arrays: int, window_rows: int, width: int):
    """Program (b, j). `refs` are the windows, the pages, and the pages again, as outputs."""
    sequence, step = pl.program_id(0), pl.program_id(1)
    place = place_ref[sequence, step]
    row = sequence * window_rows + path_ref[sequence, step]
    columns = jnp.arange(pl.next_power_of_2(width))
    inside = (columns < width) & (place >= 0)
    rows = [pltriton.load(window_ref.at[row, columns], mask=inside, other=0) for window_ref in refs[:arrays]]  # all at once
    for values, pages_ref in zip(rows, refs[2 * arrays :], strict=True):
        pltriton.store(pages_ref.at[jnp.maximum(place, 0), columns], values.astype(pages_ref.dtype), mask=inside)
