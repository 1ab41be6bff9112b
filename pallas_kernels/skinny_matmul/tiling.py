"""The shapes that the kernels support, and the sizes of their tiles."""

from dataclasses import dataclass
from typing import Any

from jax.experimental import pallas as pl

from pallas_kernels.skinny_matmul.epilogues import Epilogue, SwiGlu
from pallas_kernels.skinny_matmul.packed import BLOCK, Bytes, Nibbles, Packed

ROWS = 16
"""Rows of every tile, the height of a tensor-core product; fewer are padded. So a row's sums don't depend on the others."""
MANY_ROWS = 64
"""Rows of the tiles that products with more than 16 rows have."""
BLOCKS = 264
"""Thread blocks at most, if 256 columns each suffice: two per multiprocessor of an H100, all at work at the same time."""
MAX_SPLITS, MOST_PARTS = 8, 512
"""Stretches of k, and thread blocks with all stretches, of packed weights whose products are added up elsewhere."""
DEPTHS = {32: 128, 64: 128, 128: 64, 256: 32}
"""Rows of the weight that a step reads, by columns: 8 or 16 KiB in 16 bits, of which several are under way."""


@dataclass(frozen=True)
class Tiling:
    """The static settings of one kernel. They depend on the weight only."""

    columns: int
    """Columns of the result per thread block, a power of two."""
    depth: int
    """Rows of the weight per step, a power of two."""
    stages: int
    """Steps under way between memory and the tensor cores."""
    warps: int = 4
    rows: int = ROWS
    """Rows of x per thread block."""
    splits: int = 1
    """Stretches of k, each with thread blocks of its own. They divide the steps."""


def choose_tiling(weight: Any, itemsize: int, epilogue: Epilogue, rows: int = ROWS, parts: bool = False) -> Tiling:
    """The tiling for a weight [k, n] and x's number of bytes.

    In: [4096, 4096], 2, None  Out: columns=32, depth=128, stages=4
    """
    n = weight.shape[1] // (2 if isinstance(epilogue, SwiGlu) else 1)
    if rows > ROWS:  # packed weights of prefill and of large batches
        return Tiling(128, 64, 3, 8, MANY_ROWS) if itemsize == 2 else Tiling(64, 16, 1, 8, MANY_ROWS)
    if isinstance(weight, Packed) and itemsize == 2:
        return _packed_tiling(weight, n, epilogue, parts)
    columns = next((size for size in DEPTHS if pl.cdiv(n, size) <= BLOCKS), max(DEPTHS))
    if itemsize == 4:  # for tests: full-precision products run without tensor cores and hold their operands in registers
        return Tiling(min(columns, 64), depth=16, stages=1)
    depth = DEPTHS[columns] // (2 if isinstance(epilogue, SwiGlu) else 1)  # it reads two tiles
    return Tiling(columns, depth, stages=3 if columns == 256 else 4)


def _packed_tiling(weight: Packed, n: int, epilogue: Epilogue, parts: bool) -> Tiling:
    """The fastest of 12 to 56 tilings for each matrix of Llama-3.1-8B in int8 and int4, or within 11% (H200, four rows, jax
    0.11.2, 26 November 2026; `jaxspec bench gpu --only packed`)."""
    is_int4 = isinstance(weight, Nibbles)
    depth = 2 * BLOCK if isinstance(weight, Bytes) and weight.is_by_row else BLOCK
    if isinstance(epilogue, SwiGlu):
        return Tiling(32, depth, stages=3)
    if not parts:
        return Tiling(128, depth, stages=3, warps=2) if is_int4 else Tiling(64, depth, stages=3)
    widths = (64,) if is_int4 else (64, 128)
    columns = next((each for each in widths if pl.cdiv(n, each) * MAX_SPLITS <= MOST_PARTS), widths[-1])
    steps = weight.scales.shape[1] if is_int4 else pl.cdiv(weight.shape[0], BLOCK)
    splits = MAX_SPLITS
    while splits > 1 and (pl.cdiv(n, columns) * splits > MOST_PARTS or steps % splits):
        splits //= 2
    return Tiling(columns, BLOCK, stages=4, warps=2, splits=splits) if is_int4 else Tiling(columns, BLOCK, stages=3, splits=splits)


def unsupported(x: Any, weight: Any, epilogue: Epilogue) -> str | None:
    """The reason why the kernels can't take these arrays; None if they can."""
    rows, (k, n) = x.shape[0], weight.shape
    is_packed = isinstance(weight, Packed)
    dtype = x.dtype if is_packed else weight.dtype
    if x.dtype != dtype or str(dtype) not in ("bfloat16", "float16", "float32"):
        return f"dtypes are {x.dtype} and {dtype}, expected bfloat16, float16 or float32 for both"
    if rows < 1 or (rows > ROWS and not (is_packed and epilogue is None)):
        return f"x has {rows} rows, expected 1 to {ROWS}: use an ordinary product for more"
    if x.shape[1] != k or 0 in (k, n):
        return f"x is [{rows}, {x.shape[1]}] and the weight [{k}, {n}], expected [rows, k] and [k, n], not empty"
    if isinstance(epilogue, SwiGlu) and n % 2:
        return f"the weight has {n} columns, expected as many of the gate as of the up projection"
    return None
