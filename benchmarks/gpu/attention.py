"""How fast is attention alone, with each implementation and with other tiles? And the peaks that all figures are compared with."""

import itertools
import math
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tree_attention.api import tree_attention
from pallas_kernels.tree_attention.pallas_triton import pallas_triton_attention
from pallas_kernels.tree_attention.triton_tiling import MERGE_SPLITS, Tiling, choose_tiling

from .arrays import PAGE
from .checks import ORDER, taken
from .lab import Cases, Lab, Together, random_array


def copy(lab: Lab) -> Cases:
    """The measured peaks of the device, which all other figures are compared with."""

    def measure() -> dict:
        return {"bytes_per_second": lab.bandwidth, "operations_per_second": lab.arithmetic, "copied_bytes": lab.size.copy_bytes}

    yield {}, measure


def times(lab: Lab) -> Cases:
    """Every implementation of attention at all sizes."""
    for name in ORDER:
        for batch in lab.size.kernel_batches:
            for context in lab.size.contexts:
                chains = {rows: Chain(lab, name, batch, context, rows) for rows in lab.size.kernel_rows}
                programs = Together({rows: chain.lower for rows, chain in chains.items()})
                for rows, chain in chains.items():
                    case = {"implementation": name, "batch": batch, "context": context, "rows": rows}
                    yield case, partial(time_attention, lab, chain, programs)


@dataclass
class Chain:
    """Calls of attention that feed each other and together read more than the GPU's own cache holds.

    All caches are parts of one large pool, selected by page tables, so a chain copies nothing.
    """

    lab: Lab
    name: str
    batch: int
    context: int
    rows: int
    tiling: Tiling | None = None
    """Of `pallas_triton`; None: its own choice."""

    @property
    def per_token(self) -> int:
        config = self.lab.size.target
        return 2 * config.num_kv_heads * config.head_dim * self.lab.dtype.itemsize

    @property
    def moved(self) -> int:
        """Bytes that one call must read: keys and values of context and window."""
        return self.batch * (self.context + self.rows) * self.per_token

    @property
    def caches(self) -> int:
        """The number of caches: one, or whole chains."""
        needed, chained = self.lab.size.more_than_caches / (self.batch * self.context * self.per_token), self.lab.size.chained
        return 1 if needed <= 1 else -(-math.ceil(needed) // chained) * chained

    @property
    def width(self) -> int:
        return -(-self.context // PAGE)

    def arguments(self) -> tuple[Any, ...]:
        """The arguments of `run` except the page tables."""
        config, dtype = self.lab.size.target, self.lab.dtype
        pages = (self.caches * self.batch * self.width, PAGE, config.num_kv_heads, config.head_dim)
        window = (self.batch, self.rows, config.num_kv_heads, config.head_dim)
        arrays = [random_array(seed, shape, dtype, 1.0) for seed, shape in enumerate((pages, pages, window, window), 1)]
        q = random_array(5, (self.batch, self.rows, config.num_heads, config.head_dim), dtype, 1.0)
        lengths = jnp.full(self.batch, self.context, jnp.int32)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((self.rows, self.rows), bool)), (self.batch, self.rows, self.rows))
        return q, *arrays, jnp.zeros_like(lengths), lengths, mask

    def run(self, tables, q, k_pool, v_pool, k, v, start, length, mask):
        function = partial(tree_attention, implementation=self.name)
        if self.tiling is not None:
            function = partial(pallas_triton_attention, tiling=self.tiling)
        attention = jax.jit(function)  # traced once for the whole chain
        for number in range(self.lab.size.chained):
            q = attention(q, k_pool, v_pool, tables[number], start, length, k, v, mask)
        return q

    def lower(self) -> jax.stages.Lowered:
        tables = jax.ShapeDtypeStruct((self.lab.size.chained, self.batch, self.width), jnp.int32)
        return jax.jit(self.run).lower(tables, *jax.eval_shape(self.arguments))


TILES = {"splits": (4, 8, 16, 32), "keys": (32, 64, 128), "stages": (1, 2, 3, 4), "warps": (2, 4, 8)}
"""What `tiles` tries, one setting at a time."""


def tiles(lab: Lab) -> Cases:
    """The Triton kernel at batch 1: as it chooses its tiles, and with each setting changed."""
    for rows, context in lab.size.tile_shapes:
        config, chain = lab.size.target, Chain(lab, "pallas_triton", 1, context, rows)
        own = choose_tiling(
            1, rows, config.num_heads, config.num_kv_heads, config.head_dim, chain.width * PAGE, rows, lab.dtype.itemsize
        )
        for setting, values in {"as it is": (0,), **TILES}.items():
            for value in values:
                if setting in TILES and getattr(own, setting) == value:
                    continue
                changed = own if setting not in TILES else replace(own, **{setting: value})
                if setting == "splits":
                    merged = min(MERGE_SPLITS, value)
                    changed = replace(changed, merge_splits=merged, merge_warps=max(1, min(4, merged * own.padded_dim // 512)))
                case = {"rows": rows, "context": context, "changed": f"{setting} {value or ''}".strip()}
                yield case, partial(time_tiling, lab, replace(chain, tiling=changed))


def time_tiling(lab: Lab, chain: Chain) -> dict:
    """As `time_attention`, each compiled alone: one may need more than the GPU has."""
    return time_attention(lab, chain, Together({chain.rows: chain.lower}))


def time_attention(lab: Lab, chain: Chain, programs: Together[int]) -> dict:
    """Microseconds per call, and the share of the copy's bandwidth at which keys and values were read."""
    caches, chained, per_table = chain.caches, lab.size.chained, chain.batch * chain.width
    lab.check_room(caches * per_table * PAGE * chain.per_token, f"{caches} caches of {chain.batch} x {chain.context} tokens")
    program = taken(lab, programs, chain.rows, chain.name)
    scattered = np.random.default_rng(0).permutation(caches * per_table).reshape(caches, chain.batch, chain.width).astype(np.int32)
    tables = [
        jnp.asarray(np.resize(scattered[first : first + chained], (chained, *scattered.shape[1:])))
        for first in range(0, caches, chained)
    ]
    turn, arguments = itertools.cycle(tables), chain.arguments()
    spread = lab.time(lambda: program(next(turn), *arguments), most_calls=1000)
    microseconds = [1e3 * value / chained for value in spread.values]
    at_least = 1e6 * chain.moved / lab.bandwidth
    return {
        "microseconds": microseconds,
        "bytes": chain.moved,
        "roofline_microseconds": at_least,
        "share": at_least / median(microseconds),
    }
