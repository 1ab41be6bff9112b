"""Splitting, norms and rotation in plain XLA. See `api.rotate_qkv`."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Real, UInt8

from pallas_kernels.fp8 import Scales, encode
from pallas_kernels.product import Product, value
from pallas_kernels.rms_norm.reference import reference_norm


@dataclass(frozen=True)
class QkvLayout:
    """A row of the fused projection: the query heads, then the key heads, then the value heads."""

    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float | None = None
    """Queries and keys are normed head by head (Qwen3) with this epsilon; None: they are not."""
    attention_factor: float = 1.0
    """YaRN: rotated queries and keys are multiplied by it."""
    fp8: bool = False
    """Keys and values are returned as the bytes of 8-bit numbers (pallas_kernels/fp8.py)."""


def reference_rotate(
    qkv: Float[Array, "b w width"] | Product,
    positions: Int[Array, "b w"],
    frequencies: Float[Array, " half"],
    norms: tuple[Float[Array, " head_dim"], Float[Array, " head_dim"]] | None,
    scales: Scales | None = None,
    *,
    layout: QkvLayout,
) -> tuple[Float[Array, "b w heads head_dim"], Real[Array, "b w kv_heads head_dim"], Real[Array, "b w kv_heads head_dim"]]:
    heads = value(qkv).reshape(*positions.shape, layout.heads + 2 * layout.kv_heads, layout.head_dim)
    q, k, v = jnp.split(heads, [layout.heads, layout.heads + layout.kv_heads], 2)
    if norms is not None and layout.norm_eps is not None:
        q, k = (reference_norm(part, weight, layout.norm_eps) for part, weight in zip((q, k), norms, strict=True))
    q, k = (rotate(part, positions, frequencies, layout.attention_factor) for part in (q, k))
    return q, *as_stored(k, v, scales, layout)


def as_stored(
    k: Float[Array, "b w kv_heads head_dim"], v: Float[Array, "b w kv_heads head_dim"], scales: Scales | None, layout: QkvLayout
) -> tuple[Real[Array, "b w kv_heads head_dim"], Real[Array, "b w kv_heads head_dim"]]:
    """Keys and values as the cache holds them: divided by the scales and in 8 bits, if the layout says so."""
    if not layout.fp8:
        return k, v
    by_head = (None, None) if scales is None else (scales.k[:, None], scales.v[:, None])
    return stored(k, by_head[0]), stored(v, by_head[1])


def stored(x: Float[Array, "*shape"], scale: Float[Array, "..."] | None) -> UInt8[Array, "*shape"]:
    """Keys or values divided by the scale, in 8 bits."""
    return encode(x if scale is None else x.astype(jnp.float32) / scale)


def rotate(
    x: Float[Array, "b w heads head_dim"], positions: Int[Array, "b w"], frequencies: Float[Array, " half"], length: float = 1.0
) -> Float[Array, "b w heads head_dim"]:
    """Rotates the pairs (x[i], x[i + head_dim / 2]) by the angles position * frequencies[i], and scales by `length`, in float32."""
    cos, sin = (each[..., None, :] for each in cosines_and_sines(positions, frequencies, length))
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def cosines_and_sines(
    positions: Int[Array, "b w"], frequencies: Float[Array, " half"], length: float
) -> tuple[Float[Array, "b w half"], Float[Array, "b w half"]]:
    """Of the angles position * frequencies[i], times `length`."""
    angle = positions[..., None].astype(jnp.float32) * frequencies
    return length * jnp.cos(angle), length * jnp.sin(angle)
