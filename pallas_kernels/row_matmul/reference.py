"""Products with weights stored row by row, in plain XLA, and blocks as numbers. See `api`.

GGUF's blocks: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. Every number is a product of small whole numbers
and one 16-bit scale, plus at most one more number, or it is a product of two numbers. So it is rounded once, and the order of
operations doesn't matter.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8


class Format(NamedTuple):
    """A block of GGUF's or of our own: so many weights in so many bytes."""

    weights: int
    size: int


FORMATS = {
    "q8_0": Format(32, 34), "q4_0": Format(32, 18), "q4_1": Format(32, 20), "q4_k": Format(256, 144), "q6_k": Format(256, 210),
    "fp8_32": Format(32, 36), "int4_32": Format(32, 20),
}  # fmt: skip
"""GGUF's, and two of our own: 32 numbers of FP8 after a float32 scale, and Q4_0 with a float16 zero point after its scale."""


def reference_matmul(
    x: Float[Array, "rows k"],
    weights: Array,
    scales: Float[Array, " n"] | None = None,
    *,
    format: str | None = None,
) -> Float[Array, "rows n"]:
    dense = weights.astype(jnp.float32) if format is None else unpacked(weights, format)
    product = jnp.einsum("mk,nk->mn", x, dense)
    return product if scales is None else product * scales


def unpacked(blocks: UInt8[Array, "*rows size"], format: str) -> Float[Array, "*rows k"]:
    """The numbers in rows of blocks, float32."""
    weights, size = FORMATS[format]
    rows = blocks.shape[:-1]
    return _UNPACK[format](blocks.reshape(*rows, -1, size)).reshape(*rows, blocks.shape[-1] // size * weights)


def _half(two: UInt8[Array, "*rows 2"]) -> Float[Array, "*rows 1"]:
    return jax.lax.bitcast_convert_type(two, jnp.float16)[..., None].astype(jnp.float32)


def _signed(block: UInt8[Array, "*rows n"]) -> Float[Array, "*rows n"]:
    return jax.lax.bitcast_convert_type(block, jnp.int8).astype(jnp.float32)


def _halves(block: UInt8[Array, "*rows n"]) -> Float[Array, "*rows 2*n"]:
    """The low halves of all bytes, then the high ones."""
    return jnp.concatenate([block & 15, block >> 4], -1).astype(jnp.float32)


def _q8_0(block: UInt8[Array, "*rows 34"]) -> Float[Array, "*rows 32"]:
    return _signed(block[..., 2:]) * _half(block[..., :2])


def _q4_0(block: UInt8[Array, "*rows 18"]) -> Float[Array, "*rows 32"]:
    return (_halves(block[..., 2:]) - 8) * _half(block[..., :2])


def _q4_1(block: UInt8[Array, "*rows 20"]) -> Float[Array, "*rows 32"]:
    return _halves(block[..., 4:]) * _half(block[..., :2]) + _half(block[..., 2:4])


def _fp8_32(block: UInt8[Array, "*rows 36"]) -> Float[Array, "*rows 32"]:
    scale = jax.lax.bitcast_convert_type(block[..., :4], jnp.float32)[..., None]
    return jax.lax.bitcast_convert_type(block[..., 4:], jnp.float8_e4m3fn).astype(jnp.float32) * scale


def _int4_32(block: UInt8[Array, "*rows 20"]) -> Float[Array, "*rows 32"]:
    return (_halves(block[..., 4:]) - _half(block[..., 2:4])) * _half(block[..., :2])


def _q4_k(block: UInt8[Array, "*rows 144"]) -> Float[Array, "*rows 256"]:
    """Eight groups of 32, each with a scale and a minimum of 6 bits; the last four's upper bits are kept with the first four's."""
    low, least, both = (block[..., 4 + 4 * i : 8 + 4 * i] for i in range(3))
    scales = jnp.concatenate([low & 63, (both & 15) | (low >> 6) << 4], -1).astype(jnp.float32) * _half(block[..., :2])
    leasts = jnp.concatenate([least & 63, (both >> 4) | (least >> 6) << 4], -1).astype(jnp.float32) * _half(block[..., 2:4])
    numbers = _halves(block[..., 16:].reshape(*block.shape[:-1], 4, 32)).reshape(*block.shape[:-1], 8, 32)
    return (numbers * scales[..., None] - leasts[..., None]).reshape(*block.shape[:-1], 256)


def _q6_k(block: UInt8[Array, "*rows 210"]) -> Float[Array, "*rows 256"]:
    """Two halves of 128: 64 bytes of low halves and 32 bytes of high pairs each. Sixteen scales of 8 bits."""
    rows = block.shape[:-1]
    low = block[..., :128].reshape(*rows, 2, 64)
    low = jnp.concatenate([low & 15, low >> 4], -1).reshape(*rows, 2, 4, 32)
    high = block[..., 128:192].reshape(*rows, 2, 1, 32) >> jnp.array([[0], [2], [4], [6]], jnp.uint8) & 3
    numbers = (low | high << 4).astype(jnp.float32) - 32
    scales = _signed(block[..., 192:208]) * _half(block[..., 208:])
    return (numbers.reshape(*rows, 16, 16) * scales[..., None]).reshape(*rows, 256)


_UNPACK = {
    "q8_0": _q8_0, "q4_0": _q4_0, "q4_1": _q4_1, "q4_k": _q4_k, "q6_k": _q6_k, "fp8_32": _fp8_32, "int4_32": _int4_32,
}  # fmt: skip
