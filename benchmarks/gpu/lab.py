"""Shared by all measurements of benchmarks.gpu: the models, the device and its peaks, random weights, timing, and compiling."""

import os
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxspec.checkpoints.storing import Storing, config_stored_as
from jaxspec.decoding.drafter import Models
from jaxspec.decoding.head_drafter import HeadDrafter
from jaxspec.engine.models import Merger
from jaxspec.model_config import ModelConfig
from jaxspec.models.eagle3 import Eagle3Config
from jaxspec.models.linear import DEFAULT_KERNELS, Kernels
from jaxspec.models.registry import LoadedHead, LoadedTarget, abstract_model
from jaxspec.placement import Placement
from jaxspec.planner.estimate import Pair, pair
from jaxspec.rope import RopeConfig
from jaxspec.tree_shape import PLAIN, TreeShape

MOST_CALLS = 16
"""The most cycles per sample: the context grows meanwhile."""
Cases = Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]
"""Of a part, in order: the first columns of a row, and a function that returns the others. It raises Skip if it can't."""


class Skip(Exception):
    """A case is not measured; the message says why."""


@dataclass(frozen=True)
class Size:
    target: ModelConfig
    head: Eagle3Config
    trees: tuple[TreeShape, ...]
    """The most important first: plain decoding, then those of tables.ANCHORS."""
    context: int
    """Of the cycles at batch 1."""
    contexts: tuple[int, ...]
    """Of what is measured at several."""
    few: int | None
    """How many values of each list are measured; None: all."""
    copy_bytes: int
    more_than_caches: int
    """Bytes that one timing of attention reads at least, so that the GPU's cache does not serve it."""
    samples: int
    sample_seconds: float
    """About the time of a sample, filled with repeated calls."""
    cycles: int
    """Steps of an engine that are timed at a time."""


def head_of(target: ModelConfig, captured_layers: tuple[int, ...], draft_vocab_size: int) -> Eagle3Config:
    """An EAGLE-3 head of one layer with the target's sizes."""
    return Eagle3Config(
        layer=replace(target, num_layers=1), target_hidden_size=target.hidden_size, captured_layers=captured_layers,
        draft_vocab_size=draft_vocab_size,
    )  # fmt: skip


LLAMA_8B = ModelConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
    rms_norm_eps=1e-5, max_position_embeddings=131072, dtype="bfloat16",
    rope=RopeConfig(theta=500000.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
)  # fmt: skip
"""Llama 3.1 8B."""
TINY = ModelConfig(
    vocab_size=128, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16,
    max_position_embeddings=4096, dtype="bfloat16",
)  # fmt: skip
FULL = Size(
    LLAMA_8B, head_of(LLAMA_8B, (2, 16, 29), 32000),
    trees=(PLAIN, TreeShape(3, 1, 4), TreeShape(7, 1, 8), TreeShape(5, 4, 8), TreeShape(5, 8, 32)),
    context=1024, contexts=(512, 4096, 32768), few=None,
    copy_bytes=1 << 30, more_than_caches=256 << 20, samples=7, sample_seconds=0.06, cycles=48,
)  # fmt: skip
SMALL = Size(
    TINY, head_of(TINY, (0, 1), 64),
    trees=(PLAIN, TreeShape(1, 2, 3)), context=32, contexts=(32,), few=1,
    copy_bytes=1 << 16, more_than_caches=1 << 14, samples=3, sample_seconds=0.002, cycles=4,
)  # fmt: skip
SIZES = {"full": FULL, "tiny": SMALL}


class Lab:
    """The device of this process, and the models. Weights are made on first use."""

    def __init__(self, size: Size, bandwidth: float | None = None, *, tp: int = 1):
        """`bandwidth`: if another process has measured it. `tp`: devices that share the models."""
        self.size, self._bandwidth, self.tp = size, bandwidth, tp
        self._newest: tuple[Any, Any] = (None, None)
        self.dtype = jnp.dtype(size.target.dtype)

    @cached_property
    def placement(self) -> Placement:
        return Placement.of(self.tp)

    @property
    def on_gpu(self) -> bool:
        return self.placement.device.platform == "gpu"

    def need_gpu(self) -> None:
        """Raises Skip elsewhere."""
        if not self.on_gpu:
            raise Skip("it runs on GPUs only")

    def few[Value](self, values: Sequence[Value]) -> Sequence[Value]:
        """The values that are measured, the most important first."""
        return values[: self.size.few]

    def newest[Made](self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` returns, or returned if this key was the last one: cases in a row share a program, and its memory is freed
        before the next."""
        if self._newest[0] != key:
            self._newest = (None, None)
            self._newest = (key, make())
        return self._newest[1]

    def with_weights(self, kind: str) -> "Lab":
        """The same laboratory with the matrices of both models stored in 8 or 4 bits, as `--quantization` does it."""
        target, head = (config_stored_as(model, Storing.DENSE, kind) for model in self.graphs)
        return Lab(replace(self.size, target=target, head=head), self._bandwidth, tp=self.tp)

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second, read and written, of a copy of a large array: the roofline of everything else."""
        if self._bandwidth is not None:
            return self._bandwidth
        array = jnp.ones(self.size.copy_bytes // 4, jnp.float32)
        copy = jax.jit(lambda array: array + 1.0)
        return 2 * array.nbytes / (min(self.time(lambda: copy(array))) / 1e3)

    @cached_property
    def pair(self) -> Pair:
        """The models as jaxspec.planner counts them."""
        return pair(self.size.target, self.size.head, self.size.target.dtype, self.tp)

    @cached_property
    def graphs(self) -> tuple[LoadedTarget, LoadedHead]:
        """Both models with shapes in place of arrays."""
        return abstract_model(self.size.target, self.dtype), abstract_model(self.size.head, self.dtype)

    @property
    def parameter_shapes(self) -> dict:
        (target, head), weights = self.graphs, self.placement.weights
        return {"target": weights(target.params, target.config), "draft": weights(head.params, head.config.layer)}

    @cached_property
    def params(self) -> dict:
        """Random weights: small matrices, norms of 1, and a map of draft tokens spread over the vocabulary."""
        stride = self.size.target.vocab_size // (self.size.head.draft_vocab_size or self.size.target.vocab_size)
        made = {}
        for seed, (path, shape) in enumerate(flatten_dict(self.parameter_shapes).items()):
            if jnp.issubdtype(shape.dtype, jnp.int32):
                values = jnp.arange(shape.size, dtype=shape.dtype).reshape(shape.shape) * stride
            else:
                values = random_matrix(seed, shape) if len(shape.shape) > 1 else jnp.ones(shape.shape, shape.dtype)
            made[path] = jax.device_put(values, shape.sharding)
        return jax.block_until_ready(unflatten_dict(made))

    def merger(self, kernels: Kernels = DEFAULT_KERNELS) -> Callable[[dict], Models]:
        """The models with parameters like these, inside a jitted function."""
        return Merger.of(self.graphs[0].graph(replace(kernels, devices=self.tp)), self.drafter(kernels))

    def drafter(self, kernels: Kernels = DEFAULT_KERNELS) -> HeadDrafter:
        """The head as a drafter, with shapes in place of weights."""
        return HeadDrafter.of(self.graphs[1], kernels=replace(kernels, devices=self.tp))

    def time(
        self, call: Callable[[], Any], prepare: Callable[[], None] = lambda: None, most_calls: int = MOST_CALLS
    ) -> list[float]:
        """Milliseconds per call: several samples of consecutive calls, waiting for the last, after two untimed calls.

        `prepare` runs before each sample, untimed.
        """
        prepare()
        for _ in range(2):
            started = time.perf_counter()
            jax.block_until_ready(call())
            once = time.perf_counter() - started
        calls, values = max(1, min(most_calls, round(self.size.sample_seconds / max(once, 1e-6)))), []
        for _ in range(self.size.samples):
            prepare()
            started = time.perf_counter()
            for _ in range(calls):
                out = call()
            jax.block_until_ready(out)
            values.append((time.perf_counter() - started) / calls * 1e3)
        return values


class Together[Key]:
    """Small programs that are compiled in parallel when the first is needed; each can be taken once."""

    def __init__(self, lowerings: Mapping[Key, Callable[[], jax.stages.Lowered]]):
        self._lowerings = lowerings
        self._programs: dict[Key, Future[jax.stages.Compiled]] = {}

    def take(self, key: Key) -> jax.stages.Compiled:
        """Raises what tracing or compiling this program raised."""
        if not self._programs:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                self._programs = {name: pool.submit(lambda make: make().compile(), make) for name, make in self._lowerings.items()}
        return self._programs.pop(key).result()  # dropped after use, which frees the memory of its CUDA graphs


def random_matrix(seed: int, like: Any) -> jax.Array:
    """Of the shape and dtype of `like`: small numbers, or bytes below 112, of which none is FP8's NaN."""
    if like.dtype.itemsize > 1:
        return random_array(seed, like.shape, like.dtype, 0.02)
    return jax.random.randint(jax.random.key(seed, impl="unsafe_rbg"), like.shape, 0, 112, jnp.uint8).view(like.dtype)


@partial(jax.jit, static_argnums=(1, 2))
def random_array(seed: int, shape: tuple[int, ...], dtype: Any, scale: float) -> jax.Array:
    """Normal numbers, made on the device with its fastest generator; one small program per shape."""
    return jax.random.normal(jax.random.key(seed, impl="unsafe_rbg"), shape, dtype) * jnp.asarray(scale, dtype)
