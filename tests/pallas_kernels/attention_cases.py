"""Random cases of tree attention, and its definition in NumPy."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from pallas_kernels.fp8 import Scales

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
STORED = ("k_pages", "v_pages", "k_window", "v_window")
"""The arguments that a cache of 8 bits holds as bytes."""
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}


@dataclass(frozen=True)
class Case:
    """Sizes of one kind of call; a seed makes arrays of it."""

    window: str
    """Which window keys a row sees: a name from `MASKS`."""
    b: int
    w: int
    """Rows per sequence."""
    s: int
    """Window keys per sequence."""
    heads: int
    kv_heads: int
    head_dim: int
    page: int
    table: int
    """Pages per sequence."""
    dtype: str = "float32"
    longest: bool = False
    """Whether all pages are filled: then every split of a kernel has work."""
    fp8: bool = False
    """Whether keys and values are stored in 8 bits, with a scale for each head."""

    def __str__(self) -> str:
        return (
            f"{self.window}-{self.w}x{self.s}-heads{self.heads}/{self.kv_heads}x{self.head_dim}"
            f"-pages{self.b}x{self.table}x{self.page}-{self.dtype}{'-longest' * self.longest}{'-fp8' * self.fp8}"
        )


def ancestors(parents: np.ndarray) -> np.ndarray:
    """The mask of a tree: each node sees itself and its ancestors.

    In:  [-1, 0, 0, 2]
    Out: [[1,0,0,0], [1,1,0,0], [1,0,1,0], [1,0,1,1]]
    """
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def _random_window(rng: np.random.Generator, w: int, s: int) -> np.ndarray:
    mask = rng.random((w, s)) < 0.4
    mask[np.arange(w), np.arange(s - w, s)] = True
    return mask


def _draft_level(rng: np.random.Generator, w: int, s: int) -> np.ndarray:
    """The last w of s nodes, drafted in levels of w."""
    parents = [-1 if node < w else node - node % w - w + int(rng.integers(w)) for node in range(s)]
    return ancestors(np.array(parents))[-w:]


MASKS = {
    "chain": lambda rng, w, s: ancestors(np.arange(w) - 1),
    "wide tree": lambda rng, w, s: ancestors(np.array([-1] + [int(rng.integers(min(node, 4))) for node in range(1, w)])),
    "deep tree": lambda rng, w, s: ancestors(np.array([-1] + [int(rng.integers(max(0, node - 3), node)) for node in range(1, w)])),
    "causal": lambda rng, w, s: np.tril(np.ones((w, s), bool), s - w),
    "itself": lambda rng, w, s: np.eye(w, s, s - w, dtype=bool),
    "level": _draft_level,
    "random": _random_window,
}


def arrays(case: Case, seed: int, seen: tuple[list[int], list[int]] | None = None) -> dict[str, Any]:
    """Random arguments of `tree_attention`; slots that no row sees are NaN, and unused entries of the table name used pages.

    `seen`: start and length of each sequence, if they are not random.
    """
    rng = np.random.default_rng(seed)
    dtype, slots = DTYPES[case.dtype], case.table * case.page
    length = np.full(case.b, slots) if case.longest else rng.integers(0, slots + 1, case.b)
    if seed % 3 == 0 and not case.longest:
        length[0] = 0  # an empty prefix
    start = np.minimum(rng.integers(0, slots // 2 + 2, case.b), length) * (rng.random(case.b) < 0.5)
    if seen is not None:
        start, length = map(np.array, seen)

    def normal(*shape):
        return rng.normal(size=shape).astype(dtype)

    pages = normal(2, case.b * case.table + 2, case.page, case.kv_heads, case.head_dim)
    page_table = rng.permutation(case.b * case.table).reshape(case.b, case.table)
    hidden = np.ones(pages.shape[1:3], bool)
    for row in range(case.b):
        slot = np.arange(start[row], length[row])
        hidden[page_table[row, slot // case.page], slot % case.page] = False
        used = -(-length[row] // case.page)
        page_table[row, used:] = rng.integers(0, len(hidden), case.table - used)
    pages[:, hidden] = np.nan
    made = {
        "q": normal(case.b, case.w, case.heads, case.head_dim),
        "k_pages": pages[0],
        "v_pages": pages[1],
        "page_table": page_table.astype(np.int32),
        "start": start.astype(np.int32),
        "length": length.astype(np.int32),
        "k_window": normal(case.b, case.s, case.kv_heads, case.head_dim),
        "v_window": normal(case.b, case.s, case.kv_heads, case.head_dim),
        "mask": np.stack([MASKS[case.window](rng, case.w, case.s) for _ in range(case.b)]),
    }
    if case.fp8:
        made |= {name: made[name].astype(E4M3).view(np.uint8) for name in STORED}
        made["scales"] = Scales(*rng.uniform(0.4, 1.6, (2, case.kv_heads)).astype(np.float32))
    return made


def definition(q, k_pages, v_pages, page_table, start, length, k_window, v_window, mask, scales=None) -> np.ndarray:
    """Attention as it is written down, in float64: one sequence at a time, all keys that anyone sees in a row."""
    if scales is not None:
        k_pages, v_pages, k_window, v_window = (
            stored.view(E4M3).astype(np.float64) * scale[:, None]
            for stored, scale in zip((k_pages, v_pages, k_window, v_window), (*scales, *scales), strict=True)
        )
    group, page = q.shape[2] // k_window.shape[2], k_pages.shape[1]
    out = np.zeros(q.shape)
    for row in range(len(q)):
        slot = np.arange(start[row], length[row])
        place = page_table[row, slot // page], slot % page
        keys, values = (
            np.repeat(np.concatenate([pages[place], window[row]]).astype(np.float64), group, axis=1)
            for pages, window in ((k_pages, k_window), (v_pages, v_window))
        )
        seen = np.concatenate([np.ones((q.shape[1], len(slot)), bool), mask[row]], 1)
        logits = np.einsum("whd,nhd->whn", q[row].astype(np.float64), keys) / np.sqrt(q.shape[3])
        logits = np.where(seen[:, None], logits, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        out[row] = np.einsum("whn,nhd->whd", weights / weights.sum(-1, keepdims=True), values)
    return out


CASES = [
    # every page size, one row: plain decoding
    Case("itself", 2, 1, 1, 4, 2, 64, 1, 30),
    Case("itself", 2, 1, 1, 4, 2, 80, 4, 12),
    Case("itself", 2, 1, 1, 6, 2, 96, 16, 6),
    Case("itself", 1, 1, 1, 4, 1, 128, 32, 20),
    Case("itself", 2, 1, 1, 2, 1, 256, 64, 2),
    Case("itself", 1, 1, 1, 7, 1, 64, 128, 4),
    Case("itself", 1, 1, 1, 8, 2, 64, 16, 40, longest=True),
    Case("itself", 2, 1, 1, 4, 2, 128, 64, 12, "bfloat16"),
    # so many splits that the merge takes them in two chunks
    Case("chain", 1, 2, 2, 2, 1, 64, 64, 34, longest=True),
    Case("chain", 1, 2, 2, 2, 1, 64, 64, 34),
    # verification
    Case("chain", 2, 6, 6, 4, 2, 64, 16, 5),
    Case("wide tree", 1, 16, 16, 8, 2, 80, 16, 6),
    Case("wide tree", 2, 8, 8, 4, 2, 64, 64, 12, "bfloat16"),
    Case("deep tree", 2, 12, 12, 4, 4, 96, 4, 9),
    Case("deep tree", 1, 32, 32, 4, 2, 128, 16, 20, longest=True),
    Case("deep tree", 1, 64, 64, 4, 1, 64, 32, 10, "bfloat16"),
    Case("deep tree", 1, 20, 20, 4, 1, 256, 32, 4, "bfloat16"),
    Case("wide tree", 1, 9, 9, 4, 1, 128, 128, 4, "float16"),
    Case("deep tree", 1, 7, 7, 2, 1, 80, 16, 3, "bfloat16"),
    # draft levels: more window keys than rows
    Case("level", 2, 4, 12, 4, 2, 64, 16, 4),
    Case("level", 1, 8, 40, 4, 1, 128, 32, 9),
    Case("level", 2, 4, 20, 4, 2, 128, 16, 20, "bfloat16"),
    # prefill
    Case("causal", 1, 40, 40, 2, 1, 64, 16, 4),
    Case("causal", 2, 70, 70, 3, 1, 64, 4, 5),
    Case("causal", 1, 33, 65, 2, 2, 96, 1, 20),
    Case("causal", 1, 150, 150, 4, 2, 64, 64, 2, "bfloat16"),
    Case("causal", 1, 96, 200, 4, 2, 128, 32, 5, "bfloat16"),
    # no pages at all, and anything
    Case("random", 2, 5, 5, 4, 2, 64, 4, 0),
    Case("causal", 2, 50, 50, 2, 1, 64, 1, 0),
    Case("random", 1, 5, 130, 4, 2, 64, 16, 3),
    Case("random", 3, 3, 9, 6, 3, 16, 3, 7),
    # rows that see nothing in the first block of their tile
    Case("itself", 1, 100, 100, 2, 2, 64, 16, 2, "bfloat16"),
    # a cache of 8 bits: read whole, in blocks, and by several splits
    Case("wide tree", 2, 8, 8, 4, 2, 80, 16, 3, fp8=True),
    Case("level", 2, 4, 12, 4, 2, 64, 16, 40, "bfloat16", fp8=True),
    Case("causal", 1, 40, 40, 2, 1, 64, 32, 9, "float16", longest=True, fp8=True),
]
