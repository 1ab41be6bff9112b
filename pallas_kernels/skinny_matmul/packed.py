"""Weights of 8 and 4 bits, row by row as files have them. `pallas_kernels.quantized` makes them and chooses their products."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8, UInt8

BLOCK = 128
"""Rows and columns of a block of `Bytes` that shares a scale."""


class Bytes(NamedTuple):
    """The transposed matrix in 8 bits: numbers times their scale."""

    rows: Int8[Array, "n k"] | Float[Array, "n k"]
    """int8 or float8_e4m3fn."""
    scales: Float[Array, "..."]
    """float32, one per row [n], or one per block of 128 x 128 [n / 128, k / 128]."""

    @property
    def shape(self) -> tuple[int, int]:
        """k and n."""
        n, k = self.rows.shape
        return k, n

    @property
    def is_by_row(self) -> bool:
        """There is one scale per row."""
        return len(self.scales.shape) == 1

    def dense(self, dtype: DTypeLike) -> Float[Array, "n k"]:
        """The rows as numbers."""
        numbers = self.rows.astype(jnp.float32)
        if self.is_by_row:
            return (numbers * self.scales[:, None]).astype(dtype)
        n, k = self.rows.shape
        blocks = numbers.reshape(n // BLOCK, BLOCK, k // BLOCK, BLOCK)
        return (blocks * self.scales[:, None, :, None]).reshape(n, k).astype(dtype)

    def product(self, x: Float[Array, "*rows k"]) -> Float[Array, "*rows n"]:
        """x @ matrix by XLA, in float32. Scales of rows multiply the product, so that XLA writes no unpacked matrix to memory."""
        if self.is_by_row:
            return _times(x, self.rows.astype(x.dtype)) * self.scales
        return _times(x, self.dense(x.dtype))


class Nibbles(NamedTuple):
    """The transposed matrix in 4 bits: (number - zero point) times the scale of their group.

    In a group of 4, a byte holds number i in its low half and number i + 2 in its high one:
    In:  1 2 3 4
    Out: 0x31 0x42
    """

    halves: UInt8[Array, "n half"]
    """Two numbers, 0 to 15, each."""
    scales: Float[Array, "n groups"]
    """float32."""
    zeros: UInt8[Array, "n groups"] | None = None
    """None: all are 8."""

    @property
    def shape(self) -> tuple[int, int]:
        """k and n."""
        n, half = self.halves.shape
        return 2 * half, n

    def dense(self, dtype: DTypeLike) -> Float[Array, "n k"]:
        """The rows as numbers."""
        groups = self.halves.reshape(*self.scales.shape, -1)
        numbers = jnp.concatenate([groups & 15, groups >> 4], -1).astype(jnp.float32)
        zeros = 8 if self.zeros is None else self.zeros.astype(jnp.float32)[..., None]
        return ((numbers - zeros) * self.scales[..., None]).reshape(self.halves.shape[0], -1).astype(dtype)

    def product(self, x: Float[Array, "*rows k"]) -> Float[Array, "*rows n"]:
        """x @ matrix by XLA, in float32."""
        return _times(x, self.dense(x.dtype))


Packed = Bytes | Nibbles


def _times(x: Float[Array, "*rows k"], rows: Float[Array, "n k"]) -> Float[Array, "*rows n"]:
    return jnp.einsum("...k,nk->...n", x, rows, preferred_element_type=jnp.float32)
