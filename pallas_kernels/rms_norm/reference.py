"""RMS norm in plain XLA. See `api`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.product import Product


def reference_norm(x: Float[Array, "*rows h"], weight: Float[Array, " h"], eps: float) -> Float[Array, "*rows h"]:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight


def reference_add_norm(
    x: Float[Array, "*rows h"], product: Product, weight: Float[Array, " h"], eps: float
) -> tuple[Float[Array, "*rows h"], Float[Array, "*rows h"]]:
    total = x + product.value()
    return total, reference_norm(total, weight, eps)
