"""The window mask as bits, which the GPU kernels read instead of one byte per row and key."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

BITS = 32
"""Keys per word."""


class PackedMask(NamedTuple):
    """A mask [b, w, s] in words of 32 keys, and the range of keys that each row needs."""

    bits: Int32[Array, "b w words"]
    """Bit j of word i says whether the row sees window key 32 i + j; bits after the last key are 0."""
    first: Int32[Array, "b w"]
    """The first key that the row sees; s where it sees none."""
    end: Int32[Array, "b w"]
    """One after the last key that the row sees; 0 where it sees none."""


def pack_mask(mask: Bool[Array, "b w s"]) -> PackedMask:
    """Packs a mask. All layers share one mask, so XLA computes this once per program, not once per layer; a chain's mask is
    constant, so XLA packs it at compile time. (It would not fold an `iota`, so the numbers here are NumPy's.)

    In:  mask [[[True, False, True], [False, False, False]]]
    Out: bits [[[0b101], [0]]], first [[0, 3]], end [[3, 0]]
    """
    b, w, s = mask.shape
    padded = jnp.pad(mask, ((0, 0), (0, 0), (0, -s % BITS))).reshape(b, w, -1, BITS)
    powers = np.left_shift(np.uint32(1), np.arange(BITS, dtype=np.uint32))
    words = jnp.where(padded, powers, jnp.uint32(0)).sum(-1, dtype=jnp.uint32)
    keys = np.arange(s, dtype=np.int32)
    return PackedMask(
        bits=jax.lax.bitcast_convert_type(words, jnp.int32),
        first=jnp.where(mask, keys, s).min(-1),
        end=jnp.where(mask, keys + 1, 0).max(-1),
    )
