"""How fast attention alone is, and the device's own peaks."""

import itertools
import math
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tree_attention.api import IMPLEMENTATIONS, tree_attention

from .checks import Cases, taken
from .lab import Lab, Together, random_array
from .state import PAGE

LAST = ("reference", "mosaic")
"""The reference gathers whole caches and takes long. How long compiling for Mosaic takes is unknown: should it end the worker, all
the others have been measured."""


def copy(lab: Lab) -> Cases:
    """The device's peaks, as measured: what all other figures are compared with."""

    def measure() -> dict:
        return {"bytes_per_second": lab.bandwidth, "operations_per_second": lab.arithmetic, "copied_bytes": lab.size.copy_bytes}

    yield {}, measure


def times(lab: Lab) -> Cases:
    """Every implementation of attention at all sizes, one after the other."""
    for name in sorted(IMPLEMENTATIONS, key=lambda name: LAST.index(name) if name in LAST else -1):
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

    All caches are stretches of one large pool, told apart by page tables, so a chain needs no slices of the pool.
    """

    lab: Lab
    name: str
    batch: int
    context: int
    rows: int

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
        """How many there are: one, or whole chains."""
        wanted, chained = self.lab.size.more_than_caches / (self.batch * self.context * self.per_token), self.lab.size.chained
        return 1 if wanted <= 1 else -(-math.ceil(wanted) // chained) * chained

    @property
    def width(self) -> int:
        return -(-self.context // PAGE)

    def arguments(self) -> tuple[Any, ...]:
        """Of `run`, but for the page tables."""
        config, dtype = self.lab.size.target, self.lab.dtype
        pages = (self.caches * self.batch * self.width, PAGE, config.num_kv_heads, config.head_dim)
        window = (self.batch, self.rows, config.num_kv_heads, config.head_dim)
        arrays = [random_array(seed, shape, dtype, 1.0) for seed, shape in enumerate((pages, pages, window, window), 1)]
        q = random_array(5, (self.batch, self.rows, config.num_heads, config.head_dim), dtype, 1.0)
        lengths = jnp.full(self.batch, self.context, jnp.int32)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((self.rows, self.rows), bool)), (self.batch, self.rows, self.rows))
        return q, *arrays, jnp.zeros_like(lengths), lengths, mask

    def run(self, tables, q, k_pool, v_pool, k, v, start, length, mask):
        attention = jax.jit(partial(tree_attention, implementation=self.name))  # traced once for the whole chain
        for number in range(self.lab.size.chained):
            q = attention(q, k_pool, v_pool, tables[number], start, length, k, v, mask)
        return q

    def lower(self) -> jax.stages.Lowered:
        tables = jax.ShapeDtypeStruct((self.lab.size.chained, self.batch, self.width), jnp.int32)
        return jax.jit(self.run).lower(tables, *jax.eval_shape(self.arguments))


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
