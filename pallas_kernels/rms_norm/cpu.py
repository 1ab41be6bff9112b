"""RMS norm on CPUs: C++ (cpu.cc, norm.inc) where it runs, else the reference.

Below 8 rows XLA sums in another order than from 8 on, so a token's bits would depend on the tree and the batch around it. The C++
kernel has one order, and does in one operation what XLA does in five.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.cpu import what_is_missing
from pallas_kernels.product import Product, value
from pallas_kernels.rms_norm.reference import reference_add_norm, reference_norm, reference_norm_pair
from pallas_kernels.row_matmul import row_matmul


def cpu_norm(x: Float[Array, "*rows h"], weight: Float[Array, " h"], eps: float) -> Float[Array, "*rows h"]:
    """See `api.rms_norm`."""
    if what_is_missing() is not None:
        return reference_norm(x, weight, eps)
    if len(jax.devices("cpu")) > 1:  # XLA can't divide a call among devices, but all that is done to sums
        wide = x.astype(jnp.float32)
        sums = row_matmul((wide * wide).reshape(-1, x.shape[-1]), jnp.ones((1, x.shape[-1]), jnp.float32))
        wide = wide * jax.lax.rsqrt(sums.reshape(*x.shape[:-1], 1) / x.shape[-1] + eps)
        return wide.astype(x.dtype) * weight
    if x.dtype != jnp.float32:
        return cpu_norm(x.astype(jnp.float32), jnp.ones(weight.shape, jnp.float32), eps).astype(x.dtype) * weight
    rows = x.reshape(-1, x.shape[-1])
    return jax.ffi.ffi_call("rms_norm_float32", like(rows))(rows, weight, jnp.float32(eps)).reshape(x.shape)


def cpu_add_norm(
    x: Float[Array, "*rows h"], product: Product | Float[Array, "*rows h"], weight: Float[Array, " h"], eps: float
) -> tuple[Float[Array, "*rows h"], Float[Array, "*rows h"]]:
    """See `api.add_norm`."""
    if what_is_missing() is not None or x.dtype != jnp.float32 or len(jax.devices("cpu")) > 1:
        return reference_add_norm(x, product, weight, eps, norm=cpu_norm)
    both = [each.reshape(-1, x.shape[-1]) for each in (x, value(product))]
    total, normed = jax.ffi.ffi_call("add_norm_float32", [like(both[0])] * 2)(*both, weight, jnp.float32(eps))
    return total.reshape(x.shape), normed.reshape(x.shape)


def like(array: Array) -> jax.ShapeDtypeStruct:
    """A result of this shape and dtype."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


cpu_norm_pair = partial(reference_norm_pair, norm=cpu_norm)
