"""RMS norm in plain XLA. See `api.rms_norm`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def reference_norm(x: Float[Array, "*rows h"], weight: Float[Array, " h"], eps: float) -> Float[Array, "*rows h"]:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight
