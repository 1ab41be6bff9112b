"""Products with weights stored row by row, as files have them, on CPUs.

Decoding reads all weights for a few rows of activations, and XLA's products on CPUs read them on one thread, or once for every
row. The C++ kernels (row_matmul.cc, tiles.inc) read them once, on all of XLA's threads. A row's product has the same bits however
many rows there are, and blocks of a GGUF file give the bits of their float32 numbers.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.cpu import TARGETS
from pallas_kernels.dispatch import call
from pallas_kernels.row_matmul.reference import reference_matmul


def row_matmul(
    x: Float[Array, "rows k"],
    weights: Array,
    scales: Float[Array, " n"] | None = None,
    *,
    format: str | None = None,
    implementation: str = "cpu",
) -> Float[Array, "rows n"]:
    """x @ W^T, summed in float32. For programs that run on a CPU, where nothing is missing (`what_is_missing`).

    Args:
        x: float32, any number of rows. Rows of zeros cost next to nothing.
        weights: W [n, k], float32, bfloat16, float16, int8 or float8_e4m3fn; or its rows as blocks, uint8 [n, bytes].
        scales: of W's rows, float32; int8 and float8 need them.
        format: of the blocks, a key of FORMATS. None: W is not in blocks.
        implementation: "cpu", the C++ kernels, or "reference".

    Raises:
        ValueError: a dtype that the kernels don't know, or scales that are missing.
    """
    arguments = (x, weights) if scales is None else (x, weights, scales)
    return call("row_matmul", IMPLEMENTATIONS, implementation, arguments, format=format)


def cpu_matmul(x: Array, weights: Array, scales: Array | None = None, *, format: str | None = None) -> Float[Array, "rows n"]:
    """The C++ kernels."""
    name = weights.dtype.name.removesuffix("_e4m3fn") if format is None else format
    is_scaled = name in ("int8", "float8")
    if f"row_matmul_{name}" not in TARGETS or is_scaled != (scales is not None):
        raise ValueError(f"row_matmul has no kernel for {name} weights {'with' if scales is not None else 'without'} scales")
    arguments: tuple[Array, ...] = (x, weights)
    if scales is not None:
        arguments += (scales * 2.0**-9 if name == "float8" else scales,)  # the kernel counts float8's smallest steps
    result = jax.ShapeDtypeStruct((x.shape[0], weights.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(f"row_matmul_{name}", result)(*arguments)


IMPLEMENTATIONS = {"reference": reference_matmul, "cpu": cpu_matmul}
