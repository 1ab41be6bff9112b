"""Kernels on this device: is each of them right (against its reference), and how fast is attention alone?"""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cache_write.api import IMPLEMENTATIONS as WRITES
from pallas_kernels.cache_write.api import cache_write
from pallas_kernels.rms_norm.api import IMPLEMENTATIONS as NORMS
from pallas_kernels.rms_norm.api import PAIR_IMPLEMENTATIONS, norm_pair, rms_norm
from pallas_kernels.rotate_qkv.api import IMPLEMENTATIONS as ROTATIONS
from pallas_kernels.rotate_qkv.api import rotate_qkv
from pallas_kernels.tree_attention.api import IMPLEMENTATIONS as ATTENTIONS
from pallas_kernels.tree_attention.api import tree_attention
from pallas_kernels.tree_attention.pallas_triton import pallas_triton_attention
from pallas_kernels.tree_attention.triton_tiling import MERGE_SPLITS, Tiling, choose_tiling

from . import arrays
from .arrays import PAGE
from .lab import Lab, Skip, Together, random_array

BOUND = 2e-2
"""The largest allowed error in bfloat16; results are of order 1."""
Cases = Iterator[tuple[dict, Callable[[], dict]]]


class WrongResult(Exception):
    """An implementation differs from the reference."""


@dataclass(frozen=True)
class Checked:
    """A kernel and the calls of it that are compared."""

    kernel: str
    function: Callable
    """Takes the arguments that `calls` make, and `implementation`."""
    implementations: Collection[str]
    bound: float
    """The largest allowed difference from the reference."""
    calls: Mapping[str, Callable[[], tuple[Any, ...]]]
    """Functions that make the arguments, by the name of the shape."""


def check(lab: Lab, run: str) -> Cases:
    """One implementation at a time, because one may break the device."""
    for checked in checked_kernels(lab):
        for name in checked.implementations:
            programs = Together(lab, {shape: partial(lower, checked, name, make) for shape, make in checked.calls.items()})
            for shape in checked.calls:
                case = {"kernel": checked.kernel, "implementation": name, "shape": shape}
                yield case, partial(compare_with_reference, lab, checked, name, shape, programs)


def checked_kernels(lab: Lab) -> Iterator[Checked]:
    """Every kernel; attention last, because its Mosaic kernel is the most likely to end the worker."""

    def calls(make: Callable) -> dict[str, Callable]:
        return {str(shape): partial(make, lab, shape) for shape in lab.size.shapes}

    def row_calls(make: Callable, note: str = "") -> dict[str, Callable]:
        return {f"{rows} rows{note}, batch {batch}": partial(make, lab, batch, rows) for batch, rows in lab.size.row_shapes}

    yield Checked("cache_write", cache_write, WRITES, 0.0, calls(arrays.write))  # it copies, so it must be exact
    eps = lab.size.target.rms_norm_eps
    yield Checked("rms_norm", partial(rms_norm, eps=eps), NORMS, BOUND, row_calls(arrays.norm))
    yield Checked("norm_pair", partial(norm_pair, eps=eps), PAIR_IMPLEMENTATIONS, BOUND, row_calls(arrays.norm_pair))
    for layout in arrays.layouts(lab):
        made = row_calls(partial(arrays.rotation, layout), "" if layout.norm_eps is None else " with norms")
        yield Checked("rotate_qkv", partial(rotate_qkv, layout=layout), ROTATIONS, BOUND, made)
    yield Checked("tree_attention", tree_attention, ATTENTIONS, BOUND, calls(arrays.attention))


def lower(checked: Checked, name: str, make: Callable[[], tuple[Any, ...]]) -> jax.stages.Lowered:
    return jax.jit(partial(checked.function, implementation=name)).lower(*jax.eval_shape(make))


def compare_with_reference(lab: Lab, checked: Checked, name: str, shape: str, programs: Together[str]) -> dict:
    """Largest error against the reference in float32 on the same numbers."""
    return errors(lab, checked, taken(lab, programs, shape, name), shape)


def errors(lab: Lab, checked: Checked, program: Callable[..., Any], shape: str) -> dict:
    """As `compare_with_reference`, for a program that is compiled."""
    arguments = checked.calls[shape]()
    wide = jax.tree.map(lambda array: array.astype(jnp.float32) if array.dtype == lab.dtype else array, arguments)
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(partial(checked.function, implementation="reference"))(*wide)
    got = program(*arguments)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    return {"error": max(compare(*each, checked.bound) for each in pairs), "bound": checked.bound}


def taken[Key](lab: Lab, programs: Together[Key], key: Key, name: str) -> jax.stages.Compiled:
    """The program. Raises Skip if the implementation does not support this shape or device."""
    try:
        return programs[key]
    except Exception as error:
        refuses = isinstance(error, ValueError | NotImplementedError) or not lab.on_gpu
        if refuses and name != "reference":
            raise Skip(f"refused: {type(error).__name__}: {str(error)[:200]}") from error
        raise


def compare(got: jax.Array, expected: jax.Array, bound: float) -> float:
    """The largest difference. Raises WrongResult if it is above the bound, or not a number."""
    error = float(jnp.max(jnp.abs(got.astype(jnp.float32) - expected.astype(jnp.float32))))
    if not error <= bound:
        raise WrongResult(f"the largest difference from the reference is {error:g}, allowed are {bound:g}")
    return error


# Speed

LAST = ("reference", "mosaic")
"""The reference is slow. How long compiling for Mosaic takes is unknown: if it ends the worker, the others have been measured."""


def copy(lab: Lab, run: str) -> Cases:
    """The measured peaks of the device, which all other figures are compared with."""

    def measure() -> dict:
        return {"bytes_per_second": lab.bandwidth, "operations_per_second": lab.arithmetic, "copied_bytes": lab.size.copy_bytes}

    yield {}, measure


def times(lab: Lab, run: str) -> Cases:
    """Every implementation of attention at all sizes."""
    for name in sorted(ATTENTIONS, key=lambda name: LAST.index(name) if name in LAST else -1):
        for batch in lab.size.kernel_batches:
            for context in lab.size.contexts:
                chains = {rows: Chain(lab, name, batch, context, rows) for rows in lab.size.kernel_rows}
                programs = Together(lab, {rows: chain.lower for rows, chain in chains.items()})
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


def tiles(lab: Lab, run: str) -> Cases:
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
    if not lab.on_gpu:
        raise Skip("it runs on GPUs only")
    return time_attention(lab, chain, Together(lab, {chain.rows: chain.lower}))


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
