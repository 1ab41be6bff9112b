"""The matrix products of decoding, one to 64 rows: how close do XLA and our kernel come to the speed of a copy?"""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from statistics import median
from typing import Any, NamedTuple

import jax
from flax.traverse_util import flatten_dict

from pallas_kernels.skinny_matmul import skinny_matmul

from .lab import Cases, Lab, Skip, random_array

WAYS: dict[str, dict[str, bool | int]] = {
    "XLA": {},
    "not autotuned": {"xla_gpu_autotune_level": 0},
    "cuBLASLt only": {"xla_gpu_enable_triton_gemm": False, "xla_gpu_enable_cublaslt": True},
    "Triton only": {"xla_gpu_enable_cublaslt": False, "xla_gpu_cublas_fallback": False},
}
"""Compiler options by name. As it is, XLA autotunes; the proof without a GPU can't."""
OURS = {"ours": "pallas_triton", "ours, jax-triton": "jax_triton"}
"""Implementations of pallas_kernels/skinny_matmul."""


class Product(NamedTuple):
    """rows x k times k x n."""

    name: str
    k: int
    n: int
    rows: int

    def bytes(self, itemsize: int) -> int:
        """Read and written at least."""
        return itemsize * (self.k * self.n + self.rows * (self.k + self.n))


def matrices(lab: Lab) -> dict[str, tuple[int, int]]:
    """The different matrices that a cycle multiplies by, by the name of the first one with this shape."""
    found: dict[str, tuple[int, int]] = {}
    for path, array in flatten_dict(lab.parameter_shapes).items():
        if path[-1] == "kernel" and array.shape not in found.values():
            found[f"{'head ' if path[0] == 'draft' else ''}{path[-2]}"] = array.shape
    return found


def cases(lab: Lab) -> Cases:
    return timed(lab, dict.fromkeys((*WAYS, *OURS), time_jax))


def timed(lab: Lab, ways: Mapping[str, Callable[..., list[float]]]) -> Cases:
    """Every matrix with each number of rows; `ways`: functions that time a product, by name."""
    for name, (k, n) in matrices(lab).items():
        for rows in lab.size.product_rows:
            product = Product(name, k, n, rows)
            for way, measure in ways.items():
                case = {"matrix": f"{name} {k}x{n}", "rows": rows, "way": way}
                yield case, partial(measured, lab, product, partial(measure, lab, product, way))


def measured(lab: Lab, product: Product, time: Callable[[int], list[float]]) -> dict[str, Any]:
    """Microseconds per product, and the share of the copy's bandwidth."""
    copies = math.ceil(lab.size.copy_bytes / product.bytes(lab.dtype.itemsize))
    microseconds = [1e3 * value / copies for value in time(copies)]
    row: dict[str, Any] = {"microseconds": microseconds, "bytes": product.bytes(lab.dtype.itemsize)}
    if (bandwidth := lab.known_bandwidth) is not None:
        row["share"] = row["bytes"] / bandwidth / (median(microseconds) / 1e6)
    return row


@lru_cache(maxsize=1)
def weights(lab: Lab, k: int, n: int, copies: int) -> list[jax.Array]:
    return [random_array(seed, (k, n), lab.dtype, 0.02) for seed in range(copies)]


def time_jax(lab: Lab, product: Product, way: str, copies: int) -> list[float]:
    """Milliseconds for one product with each of `copies` matrices, which is more than the GPU's own cache holds, and more work than
    the host's for launching the program.

    Each has rows of its own, as XLA would join products of the same rows into one.
    """
    multiply, options = (ours(lab, OURS[way]), {}) if way in OURS else (lambda x, w: x @ w, WAYS[way])
    every = [random_array(100 + seed, (product.rows, product.k), lab.dtype, 1.0) for seed in range(copies)]
    made = weights(lab, product.k, product.n, copies)
    multiply = jax.jit(multiply)  # traced once for all copies
    function = jax.jit(lambda every, made: [multiply(x, w) for x, w in zip(every, made, strict=True)])
    try:
        lowered = function.lower(every, made)
    except (ValueError, ImportError) as error:
        if way in OURS:
            raise Skip(f"refused: {str(error)[:150]}") from error
        raise
    program = lowered.compile(compiler_options=options if lab.on_gpu else None)
    return lab.time(lambda: program(every, made), most_calls=100).values


def ours(lab: Lab, implementation: str) -> Callable[..., Any]:
    """Our kernel for few rows."""
    if not lab.on_gpu:
        raise Skip("it runs on GPUs only")
    return partial(skinny_matmul, implementation=implementation)
