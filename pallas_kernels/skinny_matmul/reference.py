"""The product in plain XLA. See `api.skinny_matmul`."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.skinny_matmul.epilogues import Epilogue, SwiGlu
from pallas_kernels.skinny_matmul.packed import Packed


def reference_matmul(
    x: Float[Array, "rows k"], weight: Float[Array, "k n"] | Packed, epilogue: Epilogue, *, dtype: DTypeLike, parts: bool = False
) -> Array:
    sums = weight.product(x) if isinstance(weight, Packed) else jnp.dot(x, weight, preferred_element_type=jnp.float32)
    if isinstance(epilogue, SwiGlu):
        gate, up = jnp.split(sums, 2, 1)
        return (jax.nn.silu(gate) * up).astype(dtype)
    return sums.astype(dtype)[None] if parts else sums.astype(dtype)
