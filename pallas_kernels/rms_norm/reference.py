"""RMS norm in plain XLA. See `api`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.product import Product, value

type Norm = Callable[[Array, Array, float], Array]
"""Of one array."""


def reference_norm(x: Float[Array, "*rows h"], weight: Float[Array, " h"], eps: float) -> Float[Array, "*rows h"]:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight


def reference_norm_pair(
    left: Float[Array, "*rows h"],
    right: Float[Array, "*rows h"],
    left_weight: Array,
    right_weight: Array,
    eps: float,
    norm: Norm = reference_norm,
) -> Float[Array, "*rows 2*h"]:
    return jnp.concatenate([norm(left, left_weight, eps), norm(right, right_weight, eps)], -1)


def reference_add_norm(
    x: Float[Array, "*rows h"],
    product: Product | Float[Array, "*rows h"],
    weight: Float[Array, " h"],
    eps: float,
    norm: Norm = reference_norm,
) -> tuple[Float[Array, "*rows h"], Float[Array, "*rows h"]]:
    total = x + value(product)
    return total, norm(total, weight, eps)
