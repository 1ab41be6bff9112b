"""The product as a Pallas kernel for NVIDIA GPUs from the A100 on (Pallas' Triton backend). See `api.skinny_matmul`.

Reading the weight is all that such a product costs, so every byte is read once, in one wave of thread blocks, with several steps
under way. Each block has its own columns and adds up its stretch of k in order: no atomics, the same bits in every run. A product
that another kernel adds up (pallas_kernels/product.py) has several stretches, so that narrow matrices fill the GPU.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.skinny_matmul.epilogues import Epilogue, SwiGlu
from pallas_kernels.skinny_matmul.packed import Bytes, Packed
from pallas_kernels.skinny_matmul.tiling import Tiling, choose_tiling
from pallas_kernels.skinny_matmul.unpacking import reader_of


@jax.named_scope("skinny_matmul")
def pallas_triton_matmul(
    x: Float[Array, "rows k"],
    weight: Float[Array, "k n"] | Packed,
    epilogue: Epilogue,
    *,
    dtype: DTypeLike,
    parts: bool = False,
    interpret: bool = False,
    tiling: Tiling | None = None,
) -> Array:
    """One program per block of columns and stretch of k, and for more than 16 rows of x per block of rows.

    `tiling`: None: the kernel's own choice.
    """
    rows, n = x.shape[0], weight.shape[1] // (2 if isinstance(epilogue, SwiGlu) else 1)
    tiling = tiling or choose_tiling(weight, x.dtype.itemsize, epilogue, rows, parts)
    if isinstance(weight, Bytes) and weight.rows.dtype == jnp.float8_e4m3fn:  # not known to all GPUs
        weight = weight._replace(rows=jax.lax.bitcast_convert_type(weight.rows, jnp.uint8))
    blocks = pl.cdiv(n, tiling.columns)
    split = (tiling.splits,) if parts else ()
    store: Any = _store_swiglu if isinstance(epilogue, SwiGlu) else _store
    return pl.pallas_call(
        functools.partial(_kernel, store=store, tiling=tiling, n=n, inline=not interpret),
        grid=(blocks, pl.cdiv(rows, tiling.rows), tiling.splits),
        out_shape=jax.ShapeDtypeStruct((*split, rows, n), dtype),
        compiler_params=pltriton.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        interpret=interpret,
        name="skinny_matmul",
    )(x, weight)


class _Tile:
    """The rows and columns of one block: where they are, and which of them exist."""

    def __init__(self, rows: int, n: int, tiling: Tiling):
        self.block = pl.program_id(0)
        self.row = pl.program_id(1) * tiling.rows + jnp.arange(tiling.rows, dtype=jnp.int32)
        self.first = self.block * tiling.columns
        self.column = self.first + jnp.arange(tiling.columns, dtype=jnp.int32)
        self.has_row = self.row < rows
        self.has_column = self.column < n if n % tiling.columns else jnp.ones(tiling.columns, bool)
        self.place = self.row[:, None], self.column[None]
        self.mask = self.has_row[:, None] & self.has_column[None]


def _kernel(x_ref, weight_refs, out_ref, *, store: Any, tiling: Tiling, n: int, inline: bool):
    """One block: sums over its stretch of k, one array of them or two (SwiGLU); then the epilogue."""
    tile = _Tile(x_ref.shape[0], n, tiling)
    reader = reader_of(x_ref, weight_refs, tile, tiling.depth, inline=inline)
    stretch = reader.steps // tiling.splits
    begin = pl.program_id(2) * stretch
    first_columns = range(0, weight_refs.shape[1], n)

    def step(i, sums):
        x = reader.load(i)
        return tuple(total + reader.product(i, x, first) for total, first in zip(sums, first_columns, strict=True))

    zeros = (jnp.zeros((tiling.rows, tiling.columns), jnp.float32),) * len(first_columns)
    sums = jax.lax.fori_loop(begin, begin + stretch, step, zeros)
    sums = tuple(reader.finished(total, first) for total, first in zip(sums, first_columns, strict=True))
    store(*sums, out_ref, tile=tile)


def _store(sums, out_ref, *, tile: _Tile):
    split = (pl.program_id(2),) if len(out_ref.shape) > len(tile.place) else ()
    pltriton.store(out_ref.at[(*split, *tile.place)], sums.astype(out_ref.dtype), mask=tile.mask)


def _store_swiglu(gate, up, out_ref, *, tile: _Tile):
    _store(gate * jax.nn.sigmoid(gate) * up, out_ref, tile=tile)
