"""Root-mean-square norm of rows."""

from jaxtyping import Array, Float

from pallas_kernels.dispatch import call
from pallas_kernels.rms_norm.pallas_triton import pallas_triton_norm
from pallas_kernels.rms_norm.reference import reference_norm

IMPLEMENTATIONS = {"reference": reference_norm, "pallas_triton": pallas_triton_norm}


def rms_norm(
    x: Float[Array, "*rows h"], weight: Float[Array, " h"], eps: float, *, implementation: str | None = None
) -> Float[Array, "*rows h"]:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis: float32 statistics, cast back, then the weight (as Hugging Face's
    Llama does).

    `implementation`: a name from IMPLEMENTATIONS; None picks the kernel on a GPU and the reference elsewhere.

    Raises:
        ValueError: x and weight differ in dtype, or the name of the implementation is unknown.
    """
    if x.dtype != weight.dtype:
        raise ValueError(f"x is {x.dtype} and weight is {weight.dtype}: they must have the same dtype")
    return call("rms_norm", IMPLEMENTATIONS, implementation, (x, weight), eps=eps)
