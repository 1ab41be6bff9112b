"""The shapes that the Triton kernel supports, the sizes of its tiles, and how many programs share one sequence's keys."""

from dataclasses import dataclass
from typing import Any

from jax.experimental import pallas as pl

PROGRAMS = 132
"""Programs that fill a GPU: one per multiprocessor of an H100. An A100 has 108."""
MIN_BLOCKS = 2
"""Key blocks per split of a full table: both are under way at once, so fewer would not be faster."""
MOST_BESIDE_BYTES = 64 * 128
"""The most numbers that a tile's rows may have while 64 keys are decoded from bytes: with more, an A100 runs out of registers."""
MERGE_SPLITS = 16
"""Splits that the merge reads at a time, at most."""


@dataclass(frozen=True)
class Tiling:
    """The static settings of one kernel."""

    group: int
    """Query heads per KV head: this many rows of a tile share a window row."""
    rows: int
    """Rows per tile, a power of two and at least 16, the height of a tensor-core product."""
    keys: int
    """Keys per block, a power of two and at least 32, a word of the packed mask. Independent of the page size."""
    padded_dim: int
    """head_dim rounded up to a power of two; the columns after it are masked."""
    row_blocks: int
    splits: int
    """Programs that share the keys of one tile of rows."""
    warps: int
    stages: int
    """Key blocks under way between memory and the tensor cores."""
    merge_splits: int
    """Splits that the merge reads at a time, a power of two."""
    merge_warps: int


def unsupported(q: Any, k_pages: Any, v_pages: Any, k_window: Any, v_window: Any) -> str | None:
    """The reason why the kernel can't take arrays of these shapes and dtypes; None if it can."""
    stored = {str(array.dtype) for array in (k_pages, v_pages, k_window, v_window)}
    dtypes, (heads, head_dim) = sorted({str(q.dtype)} | stored), q.shape[2:]
    if stored not in ({str(q.dtype)}, {"uint8"}) or str(q.dtype) not in ("bfloat16", "float16", "float32"):
        return (
            f"dtypes are {', '.join(dtypes)}, expected one of bfloat16, float16 and float32 for all arrays, or bytes of 8-bit "
            "numbers for all keys and values"
        )
    if head_dim > 256:
        return f"head_dim is {head_dim}, expected at most 256"
    if not k_window.shape[1]:
        return "k_window has no keys, expected at least one"
    if heads % k_window.shape[2]:
        return f"q has {heads} heads, expected a multiple of the {k_window.shape[2]} KV heads"
    return None


def choose_tiling(
    b: int, w: int, heads: int, kv_heads: int, head_dim: int, slots: int, s: int, itemsize: int, *, fp8: bool = False
) -> Tiling:
    """The tiling for w rows per sequence over at most `slots` cached and s window keys. `itemsize`: of q; `fp8`: keys and values
    are bytes of 8-bit numbers.

    In:  b=1, w=8, heads=32, kv_heads=8, head_dim=128, slots=8192, s=8, itemsize=2
    Out: group=4, rows=32, keys=64, padded_dim=128, row_blocks=1, splits=16, warps=4, stages=3, merge_splits=16, merge_warps=4
    """
    group = heads // kv_heads
    padded_dim = max(16, pl.next_power_of_2(head_dim))
    most_rows, keys, stages = _block_sizes(padded_dim, itemsize)
    rows = min(most_rows, max(16, pl.next_power_of_2(w * group)))
    if fp8 and rows * padded_dim > MOST_BESIDE_BYTES:
        keys = min(keys, 32)
    row_blocks = -(-w * group // rows)
    blocks = -(-slots // keys) + -(-s // keys)
    splits = max(1, min(round(PROGRAMS / (b * kv_heads * row_blocks)), blocks // MIN_BLOCKS))
    if splits > MERGE_SPLITS:
        splits -= splits % MERGE_SPLITS  # whole chunks: with 33 splits the merge spilled registers (sm_90a)
    merge_splits = min(MERGE_SPLITS, pl.next_power_of_2(splits))
    return Tiling(
        group=group,
        rows=rows,
        keys=keys,
        padded_dim=padded_dim,
        row_blocks=row_blocks,
        splits=splits,
        warps=8 if rows >= 64 else 4,  # with four an A100 would run out of registers
        stages=stages,
        merge_splits=merge_splits,
        merge_warps=max(1, min(4, merge_splits * padded_dim // 512)),  # 16 numbers per thread
    )


def _block_sizes(padded_dim: int, itemsize: int) -> tuple[int, int, int]:
    """(most rows per tile, keys per block, stages).

    128 rows x 128 columns are 64 float32 accumulators for each of 256 threads, the logits of 64 keys another 32: all of it stays in
    registers. Three stages keep two blocks of keys and values under way, 64 KiB at head_dim 128. With what the products need
    besides that is 98 KiB on an A100 and 130 KiB on an H100, whose tensor cores read more from shared memory: one tile per
    multiprocessor, and two of the small tiles of decoding. At head_dim 256 half the rows and half the keys take the same room.
    """
    if itemsize == 4:  # for tests: full-precision products run without tensor cores and hold their operands in registers
        return 16, 32, 1
    if padded_dim == 256:
        return 64, 32, 2
    return 128, 64, 3
