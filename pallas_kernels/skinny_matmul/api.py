"""Matrix product for at most 16 rows, which is what decoding consists of, with an epilogue."""

from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.dispatch import call
from pallas_kernels.skinny_matmul.epilogues import Epilogue
from pallas_kernels.skinny_matmul.packed import Packed
from pallas_kernels.skinny_matmul.pallas_triton import pallas_triton_matmul
from pallas_kernels.skinny_matmul.reference import reference_matmul
from pallas_kernels.skinny_matmul.tiling import ROWS as MAX_ROWS
from pallas_kernels.skinny_matmul.tiling import unsupported

IMPLEMENTATIONS: dict[str, Any] = {
    "reference": reference_matmul,
    "pallas_triton": pallas_triton_matmul,
}


def skinny_matmul(
    x: Float[Array, "rows k"],
    weight: Float[Array, "k n"] | Packed,
    epilogue: Epilogue = None,
    *,
    dtype: DTypeLike | None = None,
    parts: bool = False,
    implementation: str | None = None,
) -> Array:
    """x @ weight for 1 to 16 rows, summed in float32 in an order that depends on the weight's shape only.

    So a row's result has the same bits, whatever the other rows are and however many.

    Args:
        x, weight: bfloat16, float16 or float32, both the same. Or a weight of 8 or 4 bits; without an epilogue it takes any number
            of rows.
        epilogue: what is done with the sums before they are written.
        dtype: of the result; None: x's.
        parts: of a weight of 8 or 4 bits without an epilogue: return parts that add up to the product.
        implementation: a name from IMPLEMENTATIONS; None picks the Pallas kernel on a GPU and the reference elsewhere.

    Returns:
        No epilogue: the product [rows, n]; with `parts` [splits, rows, n].
        SwiGlu: silu(gate) * up [rows, n / 2].

    Raises:
        ValueError: `tiling.unsupported` returns a reason, or the name of the implementation is unknown.
    """
    if reason := unsupported(x, weight, epilogue):
        raise ValueError(f"skinny_matmul: {reason}")
    if parts and not (isinstance(weight, Packed) and epilogue is None):
        raise ValueError("skinny_matmul: parts are those of a weight of 8 or 4 bits, without an epilogue")
    dtype = jnp.dtype(dtype or x.dtype)
    return call("skinny_matmul", IMPLEMENTATIONS, implementation, (x, weight, epilogue), dtype=dtype, parts=parts)


__all__ = ["IMPLEMENTATIONS", "MAX_ROWS", "skinny_matmul"]
