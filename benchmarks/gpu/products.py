"""The matrix products of decoding, one to 64 rows: how close do XLA and our kernel come to the speed of a copy?"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from jaxspec.model_config import QUANTIZATIONS
from pallas_kernels.quantized import QuantizedAs
from pallas_kernels.skinny_matmul import SwiGlu, skinny_matmul
from pallas_kernels.skinny_matmul.pallas_triton import pallas_triton_matmul
from pallas_kernels.skinny_matmul.tiling import choose_tiling

from .lab import Cases, Lab, Skip, random_array, random_matrix

OURS = "ours"
WAYS: dict[str, dict[str, bool | int] | None] = {
    "XLA": {},
    "not autotuned": {"xla_gpu_autotune_level": 0},
    "cuBLASLt only": {"xla_gpu_enable_triton_gemm": False, "xla_gpu_enable_cublaslt": True},
    "Triton only": {"xla_gpu_enable_cublaslt": False, "xla_gpu_cublas_fallback": False},
    OURS: None,
}
"""Compiler options by name, but for pallas_kernels/skinny_matmul. As it is, XLA autotunes; the proof without a GPU can't."""
ROWS = (4, 1, 8, 64)
PACKED_ROWS = 4
"""Rows of the products that `packed` times. All up to 16 take as long."""
TILES = {"columns": (32, 64, 128), "depth": (128, 256), "stages": (3, 4, 5), "warps": (2, 4, 8), "splits": (1, 2, 4, 8)}
"""What `packed` tries, one setting at a time."""


def matrices(lab: Lab) -> dict[str, tuple[int, int]]:
    """The different matrices that a cycle multiplies by, by the name of the first one with this shape."""
    found: dict[str, tuple[int, int]] = {}
    for of, model in zip(("", "head "), lab.graphs, strict=True):
        for path, array in flatten_dict(model.params).items():
            if path[-1] == "kernel" and array.shape not in found.values():
                found[f"{of}{path[-2]}"] = array.shape
    return found


def cases(lab: Lab) -> Cases:
    """Every matrix with each number of rows, in each way."""
    for (name, (k, n)), rows, way in product(matrices(lab).items(), lab.few(ROWS), WAYS):
        yield {"matrix": f"{name} {k}x{n}", "rows": rows, "way": way}, partial(time_way, lab, k, n, rows, way)


def time_way(lab: Lab, k: int, n: int, rows: int, way: str) -> dict[str, Any]:
    shape = jax.ShapeDtypeStruct((k, n), lab.dtype)
    if way != OURS:
        return timed(lab, jnp.matmul, shape, rows, WAYS[way])
    lab.need_gpu()
    try:
        return timed(lab, partial(skinny_matmul, implementation="pallas_triton"), shape, rows)
    except ValueError as error:
        raise Skip(f"refused: {str(error)[:150]}") from error


def timed(lab: Lab, multiply: Callable, like: Any, rows: int, options: Any = None) -> dict[str, Any]:
    """Microseconds for a product with a weight like this, and the share of the copy's bandwidth at which it is read.

    One program multiplies by more weights than the GPU's own cache holds, which is more work than the host's for launching it. Each
    has rows of its own, as XLA would join products of the same rows into one.
    """
    nbytes = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(like))
    copies = math.ceil(lab.size.copy_bytes / nbytes)
    weights = lab.newest(str(like), lambda: [jax.tree.map(partial(random_matrix, seed), like) for seed in range(copies)])
    every = [random_array(100 + seed, (rows, like.shape[0]), lab.dtype, 1.0) for seed in range(copies)]
    multiply = jax.jit(multiply)  # traced once for all copies
    lowered = jax.jit(lambda every, made: [multiply(x, w) for x, w in zip(every, made, strict=True)]).lower(every, weights)
    program = lowered.compile(compiler_options=options if lab.on_gpu else None)
    microseconds = [1e3 * value / copies for value in lab.time(lambda: program(every, weights), most_calls=100)]
    return {"microseconds": microseconds, "bytes": nbytes, "share": nbytes / lab.bandwidth / (median(microseconds) / 1e6)}


def packed(lab: Lab) -> Cases:
    """Products of four rows with quantised matrices: as the kernel chooses its tiles, and with each setting changed."""
    for kind, (name, (k, n)) in product(QUANTIZATIONS, matrices(lab).items()):
        how = QuantizedAs.default(kind, k, for_cpu=False)
        weight: Any = jax.eval_shape(how, jax.ShapeDtypeStruct((k, n), lab.dtype)).packed
        epilogue = SwiGlu() if name.startswith("gate_up") else None
        parts = epilogue is None and not name.endswith("lm_head")
        own = choose_tiling(weight, lab.dtype.itemsize, epilogue, PACKED_ROWS, parts)
        dtype = lab.dtype if epilogue else jnp.dtype(jnp.float32)
        for changed, tiling in changes(own, TILES):
            fixed = {"depth": how.group, "splits": not parts or k // own.depth % tiling.splits}
            if not fixed.get(changed.split()[0]):
                case = {"weights": kind, "matrix": f"{name} {k}x{n}", "changed": changed}
                multiply = partial(pallas_triton_matmul, epilogue=epilogue, dtype=dtype, parts=parts, tiling=tiling)
                yield case, partial(time_packed, lab, multiply, weight)


def time_packed(lab: Lab, multiply: Callable, weight: Any) -> dict[str, Any]:
    lab.need_gpu()
    return timed(lab, multiply, weight, PACKED_ROWS)


def changes[Tiling](own: Tiling, tiles: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tiling]]:
    """A tiling as it is, and with one setting changed, by what was."""
    yield "as it is", own
    for setting, value in ((setting, value) for setting, values in tiles.items() for value in values):
        if vars(own)[setting] != value:
            yield f"{setting} {value}", replace(own, **{setting: value})  # type: ignore[type-var]
