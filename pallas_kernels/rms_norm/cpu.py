"""RMS norm on CPUs: the sum of squares in an order that does not depend on the number of rows, where XLA's does.

Below 8 rows XLA sums in another order than from 8 on, so a token's bits would depend on the tree and the batch around it.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.cpu import what_is_missing
from pallas_kernels.rms_norm.reference import reference_add_norm, reference_norm, reference_norm_pair
from pallas_kernels.row_matmul import row_matmul


def cpu_norm(x: Float[Array, "*rows h"], weight: Float[Array, " h"], eps: float) -> Float[Array, "*rows h"]:
    """See `api.rms_norm`."""
    if what_is_missing() is not None:
        return reference_norm(x, weight, eps)
    size, wide = x.shape[-1], x.astype(jnp.float32)
    sums = row_matmul((wide * wide).reshape(-1, size), jnp.ones((1, size), jnp.float32))
    wide = wide * jax.lax.rsqrt(sums.reshape(*x.shape[:-1], 1) / size + eps)
    return wide.astype(x.dtype) * weight


cpu_norm_pair, cpu_add_norm = (partial(each, norm=cpu_norm) for each in (reference_norm_pair, reference_add_norm))
