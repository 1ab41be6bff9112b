"""RMS norm as one launch: alone, of two rows, or after an addition. See `api`."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from pallas_kernels.product import Product, load_sum, partial_sums

ELEMENTS_PER_WARP = 512
"""16 numbers a thread: the row stays in registers between the sum and the scaling."""


@jax.named_scope("rms_norm")
def pallas_triton_norm(
    x: Float[Array, "*rows h"], weight: Float[Array, " h"], eps: float, *, interpret: bool = False
) -> Float[Array, "*rows h"]:
    """One program per row. For a single row (plain decoding at batch 1) XLA takes two launches."""
    flat = x.reshape(-1, x.shape[-1])
    out = jax.ShapeDtypeStruct(flat.shape, x.dtype)
    return _call("rms_norm", _norm_row, out, eps, interpret)(flat, weight).reshape(x.shape)


@jax.named_scope("norm_pair")
def pallas_triton_norm_pair(
    left: Float[Array, "*rows h"], right: Float[Array, "*rows h"], left_weight: Array, right_weight: Array, eps: float,
    *, interpret: bool = False,
) -> Float[Array, "*rows 2*h"]:  # fmt: skip
    """Two programs per row, one for each side. XLA takes one launch for each norm and one to join them."""
    *rows, size = left.shape
    flat = (left.reshape(-1, size), right.reshape(-1, size))
    out = jax.ShapeDtypeStruct((len(flat[0]), 2, size), left.dtype)
    normed = _call("norm_pair", _norm_pair_row, out, eps, interpret, sides=2)(*flat, left_weight, right_weight)
    return normed.reshape(*rows, 2 * size)


@jax.named_scope("add_norm")
def pallas_triton_add_norm(
    x: Float[Array, "*rows h"],
    product: Product | Float[Array, "*rows h"],
    weight: Float[Array, " h"],
    eps: float,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "*rows h"], Float[Array, "*rows h"]]:
    """One program per row, after the product's own launch. XLA takes two: it adds the product's parts in one of them."""
    flat = x.reshape(-1, x.shape[-1])
    out = (jax.ShapeDtypeStruct(flat.shape, x.dtype),) * 2
    parts, bias = partial_sums(product)
    optional = () if bias is None else (bias,)
    total, normed = _call("add_norm", _add_norm_row, out, eps, interpret)(flat, parts, weight, *optional)
    return total.reshape(x.shape), normed.reshape(x.shape)


def _call(name: str, kernel, out_shape, eps: float, interpret: bool, sides: int = 1):
    rows, *_, size = jax.tree.leaves(out_shape)[0].shape
    return pl.pallas_call(
        partial(kernel, eps=eps),
        grid=(rows, sides),
        out_shape=out_shape,
        compiler_params=pltriton.CompilerParams(
            num_warps=min(16, pl.next_power_of_2(pl.cdiv(size, ELEMENTS_PER_WARP))), num_stages=1
        ),
        interpret=interpret,
        name=name,
    )


def _norm_row(x_ref, weight_ref, out_ref, *, eps: float):
    row = pl.program_id(0)
    columns, inside = _columns(x_ref)
    values = pltriton.load(x_ref.at[row, columns], mask=inside, other=0).astype(jnp.float32)
    weight = pltriton.load(weight_ref.at[columns], mask=inside, other=0)
    _store_normed(values, weight, out_ref, (row, columns), inside, eps)


def _norm_pair_row(left_ref, right_ref, left_weight_ref, right_weight_ref, out_ref, *, eps: float):
    row, side = pl.program_id(0), pl.program_id(1)
    columns, inside = _columns(left_ref)
    on_left, on_right = inside & (side == 0), inside & (side == 1)

    def of_side(left, right):
        return pltriton.load(left, mask=on_left, other=0) + pltriton.load(right, mask=on_right, other=0)

    values = of_side(left_ref.at[row, columns], right_ref.at[row, columns]).astype(jnp.float32)
    weight = of_side(left_weight_ref.at[columns], right_weight_ref.at[columns])
    _store_normed(values, weight, out_ref, (row, side, columns), inside, eps)


def _add_norm_row(x_ref, parts_ref, weight_ref, *refs, eps: float):
    """`refs` are the bias, if there is one, the sum and the normed sum."""
    *bias, total_ref, normed_ref = refs
    row = pl.program_id(0)
    columns, inside = _columns(x_ref)
    product = load_sum(parts_ref, bias[0] if bias else None, row, columns, inside)
    total = pltriton.load(x_ref.at[row, columns], mask=inside, other=0).astype(jnp.float32) + product
    total = total.astype(total_ref.dtype)
    pltriton.store(total_ref.at[row, columns], total, mask=inside)
    weight = pltriton.load(weight_ref.at[columns], mask=inside, other=0)
    _store_normed(total.astype(jnp.float32), weight, normed_ref, (row, columns), inside, eps)


def _columns(ref):
    """The columns of a row, padded to a power of two, and which of them exist."""
    columns = jnp.arange(pl.next_power_of_2(ref.shape[1]))
    return columns, columns < ref.shape[1]


def _store_normed(values, weight, out_ref, place, inside, eps: float):
    """Norms a row, whose values are 0 after its end, and stores it there."""
    scaled = values * jax.lax.rsqrt(jnp.sum(values * values) / out_ref.shape[-1] + eps)
    pltriton.store(out_ref.at[place], scaled.astype(out_ref.dtype) * weight, mask=inside)
