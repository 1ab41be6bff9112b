"""Root-mean-square norm of rows: alone, of two rows side by side, or after an addition to the residual stream."""

from collections.abc import Callable

from jaxtyping import Array, Float

from pallas_kernels.dispatch import call
from pallas_kernels.product import Product
from pallas_kernels.rms_norm.cpu import cpu_add_norm, cpu_norm, cpu_norm_pair
from pallas_kernels.rms_norm.pallas_triton import pallas_triton_add_norm, pallas_triton_norm, pallas_triton_norm_pair
from pallas_kernels.rms_norm.reference import reference_add_norm, reference_norm, reference_norm_pair

IMPLEMENTATIONS = {"reference": reference_norm, "pallas_triton": pallas_triton_norm, "cpu": cpu_norm}
PAIR_IMPLEMENTATIONS: dict[str, Callable] = {
    "reference": reference_norm_pair, "pallas_triton": pallas_triton_norm_pair, "cpu": cpu_norm_pair,
}  # fmt: skip
ADD_IMPLEMENTATIONS: dict[str, Callable] = {
    "reference": reference_add_norm, "pallas_triton": pallas_triton_add_norm, "cpu": cpu_add_norm,
}  # fmt: skip


def rms_norm(
    x: Float[Array, "*rows h"], weight: Float[Array, " h"], eps: float, *, implementation: str | None = None
) -> Float[Array, "*rows h"]:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis: float32 statistics, cast back, then the weight (as Hugging Face's
    Llama does).

    `implementation`: a name from IMPLEMENTATIONS; None picks the kernel on a GPU and `cpu` elsewhere.

    Raises:
        ValueError: x and weight differ in dtype, or the name of the implementation is unknown.
    """
    _check(x, weight=weight)
    return call("rms_norm", IMPLEMENTATIONS, implementation, (x, weight), eps=eps)


def norm_pair(
    left: Float[Array, "*rows h"],
    right: Float[Array, "*rows h"],
    left_weight: Float[Array, " h"],
    right_weight: Float[Array, " h"],
    eps: float,
    *,
    implementation: str | None = None,
) -> Float[Array, "*rows 2*h"]:
    """The norms of both, side by side: what draft heads read.

    `implementation`: a name from PAIR_IMPLEMENTATIONS; None picks the kernel on a GPU and `cpu` elsewhere.

    Raises:
        ValueError: left, right and the weights differ in dtype, or the name of the implementation is unknown.
    """
    _check(left, right=right, left_weight=left_weight, right_weight=right_weight)
    return call("norm_pair", PAIR_IMPLEMENTATIONS, implementation, (left, right, left_weight, right_weight), eps=eps)


def add_norm(
    x: Float[Array, "*rows h"],
    product: Product | Float[Array, "*rows h"],
    weight: Float[Array, " h"],
    eps: float,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "*rows h"], Float[Array, "*rows h"]]:
    """x + product, in x's dtype, and the norm of that sum.

    On a GPU the product's parts are added in float32 and rounded once, together with x. An array is a product of one part.
    `implementation`: a name from ADD_IMPLEMENTATIONS; None picks the kernel on a GPU and `cpu` elsewhere.

    Raises:
        ValueError: x, product and weight differ in dtype, or the name of the implementation is unknown.
    """
    _check(x, product=product, weight=weight)
    return call("add_norm", ADD_IMPLEMENTATIONS, implementation, (x, product, weight), eps=eps)


def _check(x: Array, **others: Array | Product) -> None:
    for name, other in others.items():
        if other.dtype != x.dtype:
            raise ValueError(f"x is {x.dtype} and {name} is {other.dtype}: they must have the same dtype")
