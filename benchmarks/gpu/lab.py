"""Shared by all measurements of benchmarks.gpu: the device and its peaks, random weights, timing, and compiling."""

import os
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxspec.checkpoints.storing import MATRIX, with_storage
from jaxspec.config import ModelConfig
from jaxspec.decoding.drafter import Models
from jaxspec.decoding.head_drafter import HeadDrafter
from jaxspec.engine.device_state import Merger
from jaxspec.models.eagle3 import Eagle3Config
from jaxspec.models.linear import DEFAULT_KERNELS, Kernels
from jaxspec.models.registry import LoadedHead, LoadedTarget, abstract_model
from jaxspec.planner.estimate import Pair, pair
from pallas_kernels.quantized import QuantizedAs

from ..record import Spread
from .sizes import MOST_CALLS, Size

RESERVED = 0.03
"""Share of the memory that stays free."""
Cases = Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]
"""Of a part, in order: the first columns of a row, and a function that returns the others. It raises Skip if it can't."""


class Skip(Exception):
    """A case is not measured; the message says why."""


class Lab:
    """The device of this process, and the models. Weights are made on first use."""

    def __init__(
        self, size: Size, bandwidth: float | None = None, arithmetic: float | None = None, cache: str | Path | None = None
    ):
        """`cache`: the directory of compiled programs."""
        self.size = size
        self.cache = None if cache is None else Path(cache)
        self._bandwidth, self._arithmetic = bandwidth, arithmetic
        self._newest: tuple[Any, Any] = (None, None)
        self.dtype = jnp.dtype(size.target.dtype)

    @cached_property
    def device(self) -> jax.Device:
        return jax.devices()[0]

    def use_cache(self) -> None:
        """Keeps compiled programs and the results of autotuning in the cache directory."""
        jax.config.update("jax_compilation_cache_dir", None if self.cache is None else str(self.cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

    def newest[Made](self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` returns, or returned if this key was the last one: cases in a row share a program, and its memory is freed
        before the next."""
        if self._newest[0] != key:
            self._newest = (None, None)
            self._newest = (key, make())
        return self._newest[1]

    def of_one_layer(self) -> "Lab":
        """The same laboratory with a target of one layer."""
        return Lab(self.size.one_layer(), self._bandwidth, self._arithmetic, self.cache)

    def with_weights(self, kind: str) -> "Lab":
        """The same laboratory with the matrices of both models stored in 8 or 4 bits, as `--quantization` does it."""
        size = replace(self.size, target=_stored_as(self.size.target, kind), head=_stored_as(self.size.head, kind))
        return Lab(size, self._bandwidth, self._arithmetic, self.cache)

    @property
    def on_gpu(self) -> bool:
        return self.device.platform == "gpu"

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second, read and written, of a copy of a large array: the roofline of everything else."""
        if self._bandwidth is not None:
            return self._bandwidth
        array = jnp.ones(self.size.copy_bytes // 4, jnp.float32)
        copy = jax.jit(lambda array: array + 1.0)
        times = self.time(lambda: copy(array))
        return 2 * array.nbytes / (min(times.values) / 1e3)

    @property
    def known_bandwidth(self) -> float | None:
        """The bandwidth if this or an earlier process has measured it: a process with torch can't."""
        return self.__dict__.get("bandwidth", self._bandwidth)

    @cached_property
    def arithmetic(self) -> float:
        """Operations per second of a large product of square matrices in the model's dtype."""
        if self._arithmetic is not None:
            return self._arithmetic
        side = self.size.matrix
        left, right = (random_array(seed, (side, side), self.dtype, 1.0) for seed in (1, 2))
        product = jax.jit(lambda left, right: left @ right)
        times = self.time(lambda: product(left, right))
        return 2 * side**3 / (min(times.values) / 1e3)

    @property
    def memory_limit(self) -> int | None:
        """Bytes that weights, caches and temporaries may take together; None: not known."""
        stats = self.device.memory_stats() if self.on_gpu else None
        return self.size.memory_limit or (stats or {}).get("bytes_limit")

    @cached_property
    def pair(self) -> Pair:
        """The models as jaxspec.planner counts them."""
        return pair(self.size.target, self.size.head, self.size.target.dtype)

    def check_room(self, needed: int, what: str) -> None:
        """Raises Skip if these bytes do not fit next to the weights."""
        limit = self.memory_limit
        total = needed + self.pair.weights
        if limit is not None and total > (1 - RESERVED) * limit:
            raise Skip(f"{what} needs {total / 1e9:.2f} GB with the weights, of {limit / 1e9:.2f} GB")

    @cached_property
    def graphs(self) -> tuple[LoadedTarget, LoadedHead]:
        """Both models with shapes in place of arrays."""
        target, head = self.size.target, self.size.head
        return abstract_model(target, self.dtype), abstract_model(head, self.dtype)

    @property
    def parameter_shapes(self) -> dict:
        target, head = self.graphs
        return {"target": target.params, "draft": head.params}

    @cached_property
    def params(self) -> dict:
        """Random weights: small matrices, norms of 1, and a map of draft tokens spread over the vocabulary."""
        flat = flatten_dict(self.parameter_shapes)
        stride = self.size.target.vocab_size // (self.size.head.draft_vocab_size or self.size.target.vocab_size)
        made = {}
        for seed, (path, shape) in enumerate(flat.items()):
            if jnp.issubdtype(shape.dtype, jnp.int32):
                made[path] = jnp.arange(shape.size, dtype=shape.dtype).reshape(shape.shape) * stride
            elif len(shape.shape) == 1:
                made[path] = jnp.ones(shape.shape, shape.dtype)
            else:
                made[path] = random_matrix(seed, shape)
        return jax.block_until_ready(unflatten_dict(made))

    def merger(self, kernels: Kernels = DEFAULT_KERNELS) -> Callable[[dict], Models]:
        """The models with parameters like these, inside a jitted function."""
        return Merger.of(self.graphs[0].graph(kernels), self.drafter(kernels))

    def drafter(self, kernels: Kernels = DEFAULT_KERNELS) -> HeadDrafter:
        """The head as a drafter, with shapes in place of weights."""
        return HeadDrafter.of(self.graphs[1], kernels=kernels)

    def time(self, call: Callable[[], Any], prepare: Callable[[], None] = lambda: None, most_calls: int = MOST_CALLS) -> Spread:
        """Milliseconds per call: several samples of consecutive calls, waiting for the last, after two untimed calls.

        `prepare` runs before each sample, untimed.
        """
        prepare()
        for _ in range(2):
            started = time.perf_counter()
            jax.block_until_ready(call())
            once = time.perf_counter() - started
        calls = max(1, min(most_calls, round(self.size.sample_seconds / max(once, 1e-6))))
        values = []
        for _ in range(self.size.samples):
            prepare()
            started = time.perf_counter()
            for _ in range(calls):
                out = call()
            jax.block_until_ready(out)
            values.append((time.perf_counter() - started) / calls * 1e3)
        return Spread(values)


class Together[Key]:
    """Small programs that are compiled in parallel when the first is needed; each can be taken once."""

    def __init__(self, lowerings: Mapping[Key, Callable[[], jax.stages.Lowered]]):
        self._lowerings = lowerings
        self._programs: dict[Key, jax.stages.Compiled | Exception] = {}

    def __getitem__(self, key: Key) -> jax.stages.Compiled:
        """Raises what tracing or compiling this program raised."""
        if not self._programs:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                self._programs = dict(zip(self._lowerings, pool.map(self._compile, self._lowerings.values()), strict=True))
        program = self._programs.pop(key)  # dropped after use, which frees the memory of its CUDA graphs
        if isinstance(program, Exception):
            raise program
        return program

    @staticmethod
    def _compile(lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Compiled | Exception:
        try:
            return lower().compile()
        except Exception as error:  # the other programs may be fine
            return error


@partial(jax.jit, static_argnums=1)
def _bytes(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.randint(key, shape, 0, 112, jnp.uint8)


@partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any, scale: jax.Array) -> jax.Array:
    return (jax.random.normal(key, shape, dtype) * scale).astype(dtype)


def _stored_as[Config: (ModelConfig, Eagle3Config)](config: Config, kind: str) -> Config:
    """The config with all matrices quantised as checkpoints.storing.planned does it."""
    found = flatten_dict(abstract_model(config, jnp.bfloat16).params)
    matrices = {path[:-1]: array.shape for path, array in found.items() if path[-1] == MATRIX}
    storages = tuple((path, QuantizedAs.default(kind, shape[0], for_cpu=False)) for path, shape in matrices.items())
    return with_storage(config, None, storages)


def random_matrix(seed: int, like: Any) -> jax.Array:
    """Of the shape and dtype of `like`: small numbers, or bytes below 112, of which none is FP8's NaN."""
    if like.dtype.itemsize > 1:
        return random_array(seed, like.shape, like.dtype, 0.02)
    return _bytes(jax.random.key(seed, impl="unsafe_rbg"), like.shape).view(like.dtype)


def random_array(seed: int, shape: tuple[int, ...], dtype: Any, scale: float) -> jax.Array:
    """Normal numbers, made on the device with its fastest generator; one small program per shape."""
    return _normal(jax.random.key(seed, impl="unsafe_rbg"), tuple(shape), jnp.dtype(dtype), jnp.asarray(scale, dtype))
