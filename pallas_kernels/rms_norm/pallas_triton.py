"""RMS norm as one launch. See `api.rms_norm`."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

ELEMENTS_PER_WARP = 512
"""16 numbers a thread: the row stays in registers between the sum and the scaling."""


@jax.named_scope("rms_norm")
def pallas_triton_norm(
    x: Float[Array, "*rows h"], weight: Float[Array, " h"], eps: float, *, interpret: bool = False
) -> Float[Array, "*rows h"]:
    """One program per row. For a single row (plain decoding at batch 1) XLA takes two launches."""
    size = x.shape[-1]
    flat = x.reshape(-1, size)
    normed = pl.pallas_call(
        partial(_norm_row, size=size, eps=eps),
        grid=flat.shape[:1],
        out_shape=jax.ShapeDtypeStruct(flat.shape, x.dtype),
        compiler_params=pltriton.CompilerParams(
            num_warps=min(16, pl.next_power_of_2(pl.cdiv(size, ELEMENTS_PER_WARP))), num_stages=1
        ),
        interpret=interpret,
        name="rms_norm",
    )(flat, weight)
    return normed.reshape(x.shape)


def _norm_row(x_ref, weight_ref, out_ref, *, size: int, eps: float):
    row = pl.program_id(0)
    columns = jnp.arange(pl.next_power_of_2(size))
    inside = columns < size
    values = pltriton.load(x_ref.at[row, columns], mask=inside, other=0).astype(jnp.float32)
    scaled = values * jax.lax.rsqrt(jnp.sum(values * values) / size + eps)
    weight = pltriton.load(weight_ref.at[columns], mask=inside, other=0)
    pltriton.store(out_ref.at[row, columns], scaled.astype(out_ref.dtype) * weight, mask=inside)
