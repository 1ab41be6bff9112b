"""The product in plain XLA. See `api.skinny_matmul`."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.skinny_matmul.epilogues import AddResidual, Best, Epilogue, SwiGlu
from pallas_kernels.skinny_matmul.packed import Packed
from pallas_kernels.skinny_matmul.tiling import choose_tiling


def reference_matmul(
    x: Float[Array, "rows k"], weight: Float[Array, "k n"] | Packed, epilogue: Epilogue, *, dtype: DTypeLike, parts: bool = False
) -> Array | tuple[Array, ...]:
    sums = weight.product(x) if isinstance(weight, Packed) else jnp.dot(x, weight, preferred_element_type=jnp.float32)
    if isinstance(epilogue, SwiGlu):
        gate, up = jnp.split(sums, 2, 1)
        return (jax.nn.silu(gate) * up).astype(dtype)
    blocks = choose_tiling(weight, x.dtype.itemsize, epilogue).columns
    if isinstance(epilogue, AddResidual):
        total = (epilogue.residual.astype(jnp.float32) + sums).astype(dtype)
        return total, jnp.sum(in_blocks(total.astype(jnp.float32) ** 2, blocks, 0.0), 2)
    if isinstance(epilogue, Best):
        logits = sums.astype(dtype)
        places = in_blocks(logits, blocks, -jnp.inf)
        first = jnp.arange(places.shape[1], dtype=jnp.int32) * blocks
        return logits, jnp.max(places, 2), jnp.argmax(places, 2).astype(jnp.int32) + first
    return sums.astype(dtype)[None] if parts else sums.astype(dtype)


def in_blocks(x: Float[Array, "rows n"], columns: int, behind: float) -> Float[Array, "rows blocks columns"]:
    """Blocks of columns; `behind` fills the last one."""
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % columns)), constant_values=behind)
    return padded.reshape(x.shape[0], -1, columns)
