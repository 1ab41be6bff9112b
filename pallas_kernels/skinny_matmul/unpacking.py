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

FP8_STEP = 2.0**8
"""FP8's bits as a float16 number are this many times too small: its exponent's bias is 7, float16's 15."""
MAGIC = {"bfloat16": (0x4300, 128), "float16": (0x6400, 1024)}
"""Bits and value of a number whose last bit counts ones: small whole numbers can be put into its last bits."""


def reader_of(x_ref: Any, weight_refs: Any, tile: Any, depth: int) -> "DenseReader":
    """The reader for a weight's arrays."""
    kind = {Bytes: BytesReader, Nibbles: NibblesReader}.get(type(weight_refs), DenseReader)
    return kind(x_ref, weight_refs, tile, depth)


class DenseReader:
    """A matrix [k, n] in x's dtype."""

    def __init__(self, x_ref: Any, weight_refs: Any, tile: Any, depth: int):
        """`depth`: rows of the matrix per step."""
        self.x_ref, self.refs, self.tile, self.depth = x_ref, weight_refs, tile, depth
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
        """The sums of all steps, as the product has them."""
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
    """8 bits, FP8 as its bits in uint8. Scales of rows multiply the product, those of blocks what a step adds: numbers reach the
    tensor cores exactly."""

    def product(self, i: Any, x: Any, first: int) -> Any:
        rows, inside = self._rows(i)
        column = first + self.tile.column
        packed = pltriton.load(self.refs.rows.at[column[None], rows[:, None]], mask=inside, other=0)
        product = dot(x, self._numbers(packed).astype(x.dtype))
        if self.refs.is_by_row:
            return product
        places = self.refs.scales.at[column // BLOCK, i * self.depth // BLOCK]
        return product * self._scales(places)

    def finished(self, sums: Any, first: int) -> Any:
        return sums * self._scales(self.refs.scales.at[first + self.tile.column]) if self.refs.is_by_row else sums

    @property
    def _is_fp8(self) -> bool:
        return self.refs.rows.dtype == jnp.uint8

    def _numbers(self, packed: Any) -> Any:
        """FP8 in steps of FP8_STEP: by integers, as GPUs before the H100 don't know it."""
        if not self._is_fp8:
            return packed
        bits = packed.astype(jnp.uint16)
        return jax.lax.bitcast_convert_type((bits & 128) << 8 | (bits & 127) << 7, jnp.float16)

    def _scales(self, places: Any) -> Any:
        scales = pltriton.load(places, mask=self.tile.has_column, other=0)
        return (scales * FP8_STEP if self._is_fp8 else scales)[None]


class NibblesReader(DenseReader):
    """4 bits, a group in each step; its scale multiplies what the step adds."""

    def __init__(self, x_ref: Any, weight_refs: Any, tile: Any, depth: int):
        super().__init__(x_ref, weight_refs, tile, x_ref.shape[1] // weight_refs.scales.shape[1])

    def load(self, i: Any) -> Any:
        half = self.depth // 2
        return [self._columns(i * self.depth + start, half) for start in (0, half)]

    def product(self, i: Any, x: Any, first: int) -> Any:
        column, inside = first + self.tile.column, self.tile.has_column
        bytes_ = i * (self.depth // 2) + jnp.arange(self.depth // 2, dtype=jnp.int32)
        packed = pltriton.load(self.refs.halves.at[column[None], bytes_[:, None]], mask=inside[None], other=0).astype(jnp.uint16)
        dtype = jnp.bfloat16 if x[0].dtype == jnp.bfloat16 else jnp.float16
        bits, value = MAGIC[jnp.dtype(dtype).name]
        zeros = jnp.full(column.shape, 8, jnp.uint8)
        if self.refs.zeros is not None:
            zeros = pltriton.load(self.refs.zeros.at[column, i], mask=inside, other=0)
        zeros = (zeros.astype(jnp.float32) + value).astype(dtype)[None]
        numbers = (jax.lax.bitcast_convert_type(half | bits, dtype) - zeros for half in (packed & 15, packed >> 4))
        low, high = (dot(part, each.astype(part.dtype)) for part, each in zip(x, numbers, strict=True))
        return (low + high) * pltriton.load(self.refs.scales.at[column, i], mask=inside, other=0)[None]


def dot(a: Any, b: Any) -> Any:
    """A product accumulated in float32; float32 inputs keep their full precision instead of TF32's."""
    return pltriton.dot(a, b, precision="highest" if a.dtype == jnp.float32 else None)
