"""How the Pallas kernel reads weights: as they are, or in 8 and 4 bits, unpacked after they were loaded.

A reader has a number of `steps`. `load` reads x's columns of one step, `product` multiplies them with the same rows of the matrix,
and `finished` does what is left when all are added up.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.skinny_matmul.packed import BLOCK, Bytes, Nibbles
from pallas_kernels.skinny_matmul.ptx import from_fp8, from_halves, from_int8


def reader_of(x_ref: Any, weight_refs: Any, tile: Any, depth: int, *, inline: bool) -> "DenseReader":
    """The reader for a weight's arrays. `inline`: the kernel may contain PTX."""
    kind = {Bytes: BytesReader, Nibbles: NibblesReader}.get(type(weight_refs), DenseReader)
    return kind(x_ref, weight_refs, tile, depth, inline)


class DenseReader:
    """A matrix [k, n] in x's dtype."""

    def __init__(self, x_ref: Any, weight_refs: Any, tile: Any, depth: int, inline: bool):
        """`depth`: rows of the matrix per step."""
        self.x_ref, self.refs, self.tile, self.depth, self.inline = x_ref, weight_refs, tile, depth, inline
        self.steps = pl.cdiv(x_ref.shape[1], depth)

    def load(self, i: Any) -> Any:
        """The columns of x that step i reads."""
        return self._columns(i * self.depth, self.depth)

    def product(self, i: Any, x: Any, first: int) -> Any:
        """Step i for the columns of the tile, counted from `first`."""
        rows, inside = self._rows(i)
        places = self.refs.at[rows[:, None], first + self.tile.column[None]]
        return dot(x, pltriton.load(places, mask=inside, other=0))

    def finished(self, sums: Any, first: int) -> Any:
        """The product, from the sums of all steps."""
        return sums

    def _rows(self, i: Any) -> tuple[Any, Any]:
        """The matrix's rows of step i, and which places of the tile exist."""
        k = self.x_ref.shape[1]
        rows, inside = i * self.depth + jnp.arange(self.depth, dtype=jnp.int32), self.tile.has_column[None]
        return rows, inside if k % self.depth == 0 else inside & (rows < k)[:, None]

    def _columns(self, start: Any, count: int) -> Any:
        columns, inside = start + jnp.arange(count, dtype=jnp.int32), self.tile.has_row[:, None]
        if self.x_ref.shape[1] % count:
            inside = inside & (columns < self.x_ref.shape[1])[None]
        return pltriton.load(self.x_ref.at[self.tile.row[:, None], columns[None]], mask=inside, other=0)


class BytesReader(DenseReader):
    """8 bits, FP8 as its bits in uint8. Scales of rows multiply the product, scales of blocks what a step adds, so that the
    tensor cores get exact numbers."""

    def product(self, i: Any, x: Any, first: int) -> Any:
        rows, inside = self._rows(i)
        column = first + self.tile.column
        packed = pltriton.load(self.refs.rows.at[column[None], rows[:, None]], mask=inside, other=0)
        convert = from_fp8 if packed.dtype == jnp.uint8 else from_int8
        product = dot(x, convert(packed, x.dtype, inline=self.inline))
        if self.refs.is_by_row:
            return product
        return product * self._scales(self.refs.scales.at[column // BLOCK, jax.lax.div(i * self.depth, BLOCK)])

    def finished(self, sums: Any, first: int) -> Any:
        return sums * self._scales(self.refs.scales.at[first + self.tile.column]) if self.refs.is_by_row else sums

    def _scales(self, places: Any) -> Any:
        return pltriton.load(places, mask=self.tile.has_column, other=0)[None]


class NibblesReader(DenseReader):
    """4 bits, a group in each step; its scale multiplies what the step adds."""

    def __init__(self, x_ref: Any, weight_refs: Any, tile: Any, depth: int, inline: bool):
        super().__init__(x_ref, weight_refs, tile, x_ref.shape[1] // weight_refs.scales.shape[1], inline)

    def load(self, i: Any) -> Any:
        half = self.depth // 2
        return [self._columns(i * self.depth + start, half) for start in (0, half)]

    def product(self, i: Any, x: Any, first: int) -> Any:
        column, inside = first + self.tile.column, self.tile.has_column
        bytes_ = i * (self.depth // 2) + jnp.arange(self.depth // 2, dtype=jnp.int32)
        packed = pltriton.load(self.refs.halves.at[column[None], bytes_[:, None]], mask=inside[None], other=0)
        zeros = jnp.full(column.shape, 8, jnp.float32)
        if self.refs.zeros is not None:
            zeros = pltriton.load(self.refs.zeros.at[column, i], mask=inside, other=0).astype(jnp.float32)
        numbers = from_halves(packed, zeros, x[0].dtype, inline=self.inline)
        low, high = (dot(part, each) for part, each in zip(x, numbers, strict=True))
        return (low + high) * pltriton.load(self.refs.scales.at[column, i], mask=inside, other=0)[None]


def dot(a: Any, b: Any) -> Any:
    """A product accumulated in float32; float32 inputs keep their full precision instead of TF32's."""
    return pltriton.dot(a, b, precision="highest" if a.dtype == jnp.float32 else None)
