"""The matrix products of decoding, one to 64 rows: how close do XLA and our kernel come to the speed of a copy?"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from jaxspec.config import QUANTIZATIONS
from pallas_kernels.quantized import QuantizedAs
from pallas_kernels.skinny_matmul import SwiGlu, skinny_matmul
from pallas_kernels.skinny_matmul.pallas_triton import pallas_triton_matmul
from pallas_kernels.skinny_matmul.tiling import Tiling, choose_tiling

from .lab import Cases, Lab, Skip, random_array, random_matrix

WAYS: dict[str, dict[str, bool | int]] = {
    "XLA": {},
    "not autotuned": {"xla_gpu_autotune_level": 0},
    "cuBLASLt only": {"xla_gpu_enable_triton_gemm": False, "xla_gpu_enable_cublaslt": True},
    "Triton only": {"xla_gpu_enable_cublaslt": False, "xla_gpu_cublas_fallback": False},
}
"""Compiler options by name. As it is, XLA autotunes; the proof without a GPU can't."""
OURS = {"ours": "pallas_triton", "ours, jax-triton": "jax_triton"}
"""Implementations of pallas_kernels/skinny_matmul."""


PACKED_ROWS = 4
"""Rows of the products that `packed` times. All up to 16 take as long."""


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


TILES = {"columns": (32, 64, 128), "depth": (128, 256), "stages": (3, 4, 5), "warps": (2, 4, 8), "splits": (1, 2, 4, 8)}
"""What `packed` tries, one setting at a time."""


def packed(lab: Lab) -> Cases:
    """Products of four rows with quantised matrices: as the kernel chooses its tiles, and with each setting changed."""
    for kind, (name, (k, n)) in itertools.product(QUANTIZATIONS, matrices(lab).items()):
        how = QuantizedAs.default(kind, k, for_cpu=False)
        weight: Any = jax.eval_shape(how, jax.ShapeDtypeStruct((k, n), lab.dtype))
        form = "gate_up" if name.startswith("gate_up") else "logits" if name.endswith("lm_head") else "parts"
        own = choose_tiling(
            weight.packed, lab.dtype.itemsize, SwiGlu() if form == "gate_up" else None, PACKED_ROWS, form == "parts"
        )
        for setting, value in [("as it is", 0), *((setting, value) for setting, values in TILES.items() for value in values)]:
            is_fixed = (setting == "depth" and how.group) or (setting == "splits" and (form != "parts" or k // own.depth % value))
            if setting in TILES and (is_fixed or getattr(own, setting) == value):
                continue
            tiling = own if setting not in TILES else replace(own, **{setting: value})
            case = {"weights": kind, "matrix": f"{name} {k}x{n}", "changed": f"{setting} {value or ''}".strip()}
            yield case, partial(time_packed, lab, weight.packed, form, tiling)


def time_packed(lab: Lab, shapes: Any, form: str, tiling: Tiling) -> dict[str, Any]:
    """Microseconds per product, and the share of the copy's bandwidth."""
    if not lab.on_gpu:
        raise Skip("it runs on GPUs only")
    nbytes = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(shapes))
    copies = math.ceil(lab.size.copy_bytes / 2 / nbytes)
    made = [jax.tree.map(partial(random_matrix, seed), shapes) for seed in range(copies)]
    x = random_array(100, (PACKED_ROWS, shapes.shape[0]), lab.dtype, 1.0)
    epilogue = SwiGlu() if form == "gate_up" else None
    dtype = lab.dtype if epilogue else jnp.dtype(jnp.float32)
    static: dict[str, Any] = {"dtype": dtype, "parts": form == "parts", "tiling": tiling}
    multiply = jax.jit(lambda x, weight: pallas_triton_matmul(x, weight, epilogue, **static))
    program = jax.jit(lambda x, made: [multiply(x, weight) for weight in made]).lower(x, made).compile()
    microseconds = [1e3 * value / copies for value in lab.time(lambda: program(x, made), most_calls=100).values]
    return {"microseconds": microseconds, "bytes": nbytes, "share": nbytes / lab.bandwidth / (median(microseconds) / 1e6)}


def ours(lab: Lab, implementation: str) -> Callable[..., Any]:
    """Our kernel for few rows."""
    if not lab.on_gpu:
        raise Skip("it runs on GPUs only")
    return partial(skinny_matmul, implementation=implementation)
