"""Numbers of 8 bits: e4m3 (1 sign, 4 exponent and 3 fraction bits; up to 448, no infinity), kept as bytes.

Bytes and whole-number arithmetic run everywhere, in kernels and outside, with the same result: an A100 has no such type, and XLA
would widen whole caches to move them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Real, UInt8

LARGEST = 448.0
SMALLEST_NORMAL = 2.0**-6
"""Below it numbers are multiples of 2**-9."""
STEP_OF_SMALL = 2.0**14
"""A float32 of this size has steps of 2**-9: adding it rounds a smaller number to a multiple of them."""
BITS_OF_STEP = 0x46800000
"""The bits of STEP_OF_SMALL."""
DROPPED = 23 - 3
"""Fraction bits that float32 has and e4m3 has not."""
BIAS = 127 - 7
"""What the exponent's offset in float32 is above that in e4m3."""
NAN = 0x7F


class Scales(NamedTuple):
    """What stored keys and values of one layer are multiplied by, one number per KV head."""

    k: Float[Array, " kv_heads"]
    v: Float[Array, " kv_heads"]


def encode(x: Float[Array, "*shape"]) -> UInt8[Array, "*shape"]:
    """The nearest e4m3 numbers as bytes; ties go to the even one, and numbers beyond the largest to the largest.

    In:  [1.0, -0.3, 1000.0]
    Out: [0x38, 0xaa, 0x7e], which are 1, -0.3125 and 448
    """
    x = x.astype(jnp.float32)
    size = jnp.minimum(jnp.abs(x), LARGEST)
    bits = jax.lax.bitcast_convert_type(size, jnp.int32)
    to_even = (1 << (DROPPED - 1)) - 1 + ((bits >> DROPPED) & 1)
    normal = ((bits + to_even) >> DROPPED) - (BIAS << 3)
    small = jax.lax.bitcast_convert_type(size + STEP_OF_SMALL, jnp.int32) - BITS_OF_STEP
    sign = (jax.lax.bitcast_convert_type(x, jnp.int32) >> 24) & 0x80
    code = jnp.where(size < SMALLEST_NORMAL, small, normal)
    return jnp.where(x == x, code | sign, NAN).astype(jnp.uint8)


def decode(stored: UInt8[Array, "*shape"], dtype: DTypeLike) -> Float[Array, "*shape"]:
    """The numbers, exact in any dtype of 16 or 32 bits. (NaN becomes 480. Bytes in use hold none unless the model
    itself computes NaN, and then its other results show that too.)

    As float16 the bits mean the number divided by 256.
    """
    wide = stored.astype(jnp.uint16)
    half = jax.lax.bitcast_convert_type(((wide & 0x80) << 8) | ((wide & 0x7F) << 7), jnp.float16)
    return (half.astype(jnp.float32) * 256.0).astype(dtype)


def is_fp8(stored: Real[Array, "*shape"]) -> bool:
    """Whether the array holds e4m3 numbers: then its dtype is uint8."""
    return stored.dtype == jnp.uint8


def numbers(stored: Real[Array, "*shape"], dtype: DTypeLike) -> Float[Array, "*shape"]:
    """`decode`, or the array itself if it holds numbers of another kind."""
    return decode(stored, dtype) if is_fp8(stored) else stored
