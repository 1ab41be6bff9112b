"""RMS norm on CPUs: the sum of squares in an order that does not depend on the number of rows, where XLA's does.

Below 8 rows XLA sums in another order than from 8 on, so a token's bits would depend on the tree and the batch around it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.cpu import what_is_missing
from pallas_kernels.product import Product, value
from pallas_kernels.rms_norm.reference import reference_norm
from pallas_kernels.row_matmul import row_matmul


def cpu_norm(x: Float[Array, "*rows h"], weight: Float[Array, " h"], eps: float) -> Float[Array, "*rows h"]:
    """See `api.rms_norm`."""
    if what_is_missing() is not None:
        return reference_norm(x, weight, eps)
    size, wide = x.shape[-1], x.astype(jnp.float32)
    sums = row_matmul((wide * wide).reshape(-1, size), jnp.ones((1, size), jnp.float32))
    wide = wide * jax.lax.rsqrt(sums.reshape(*x.shape[:-1], 1) / size + eps)
    return wide.astype(x.dtype) * weight


def cpu_norm_pair(
    left: Float[Array, "*rows h"], right: Float[Array, "*rows h"], left_weight: Array, right_weight: Array, eps: float
) -> Float[Array, "*rows 2*h"]:
    """See `api.norm_pair`."""
    return jnp.concatenate([cpu_norm(left, left_weight, eps), cpu_norm(right, right_weight, eps)], -1)


def cpu_add_norm(
    x: Float[Array, "*rows h"], product: Product | Float[Array, "*rows h"], weight: Float[Array, " h"], eps: float
) -> tuple[Float[Array, "*rows h"], Float[Array, "*rows h"]]:
    """See `api.add_norm`."""
    total = x + value(product)
    return total, cpu_norm(total, weight, eps)
