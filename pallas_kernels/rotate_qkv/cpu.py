"""Splitting and rotation on CPUs: C++ (cpu.cc, rotate.inc) where it runs, else the reference. XLA needs five operations."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Real

from pallas_kernels.cpu import what_is_missing
from pallas_kernels.fp8 import Scales
from pallas_kernels.product import Product, value
from pallas_kernels.rotate_qkv.reference import QkvLayout, as_stored, cosines_and_sines, reference_rotate


def cpu_rotate(
    qkv: Float[Array, "b w width"] | Product,
    positions: Int[Array, "b w"],
    frequencies: Float[Array, " half"],
    norms: tuple[Float[Array, " head_dim"], Float[Array, " head_dim"]] | None,
    scales: Scales | None = None,
    *,
    layout: QkvLayout,
) -> tuple[Float[Array, "b w heads head_dim"], Real[Array, "b w kv_heads head_dim"], Real[Array, "b w kv_heads head_dim"]]:
    """See `api.rotate_qkv`."""
    several = len(jax.devices("cpu")) > 1  # XLA can't divide a call among them
    if what_is_missing() is not None or qkv.dtype != jnp.float32 or norms is not None or several:
        return reference_rotate(qkv, positions, frequencies, norms, scales, layout=layout)
    angles = cosines_and_sines(positions, frequencies, layout.attention_factor)  # layers share them
    rows = [each.reshape(positions.size, -1) for each in (value(qkv), *angles)]
    heads = (layout.heads, layout.kv_heads, layout.kv_heads)
    results = [jax.ShapeDtypeStruct((positions.size, each, layout.head_dim), jnp.float32) for each in heads]
    q, k, v = jax.ffi.ffi_call("rotate_qkv_float32", results)(*rows)
    q, k, v = (each.reshape(*positions.shape, *each.shape[1:]) for each in (q, k, v))
    return q, *as_stored(k, v, scales, layout)
