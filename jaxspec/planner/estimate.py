"""The capacity of a GPU and the least time of a cycle, computed from sizes, not measured."""

import math
from dataclasses import dataclass

import jax.numpy as jnp

from jaxspec.config import FP8
from jaxspec.engine.device import ADDRESSABLE_ENTRIES
from jaxspec.engine.models import cache_bytes_per_token
from jaxspec.model_config import ModelConfig
from jaxspec.models.block import BlockConfig, DSparkConfig
from jaxspec.models.draft_model import DraftModelConfig
from jaxspec.models.head import HeadConfig
from jaxspec.models.sharing import Shares
from jaxspec.planner.gpus import Gpu
from jaxspec.planner.models import Weights, unquantised, weights_of
from jaxspec.tree_shape import TreeShape

LOGIT_BYTES = 4
"""Logits are float32, whatever the dtype of the weights."""


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a target or a head."""

    config: ModelConfig
    """Sizes of its layers."""
    weights: Weights
    dense: Weights
    """The same without quantisation, from which operations are counted."""
    cache: int
    """Bytes kept per token, on all GPUs together."""
    shares: Shares
    most_tokens: float
    """The most tokens that the GPU kernels can address, which limits a cache of 8 bits."""


@dataclass(frozen=True)
class Pair:
    """A target with or without a head, in one dtype, on `tp` GPUs."""

    target: ModelSize
    head: ModelSize | None
    head_config: HeadConfig | None
    dtype: str
    tp: int = 1

    @property
    def weights(self) -> int:
        """Bytes per GPU."""
        return (self.target.weights.total + (self.head.weights.total if self.head else 0)) // self.tp

    @property
    def cache(self) -> int:
        """Bytes per token and GPU."""
        return (self.target.cache + (self.head.cache if self.head else 0)) // self.tp

    @property
    def most_tokens(self) -> float:
        """The most tokens that both caches can hold, whatever the memory."""
        return min(self.target.most_tokens, self.head.most_tokens if self.head else math.inf)

    @property
    def head_logits_from(self) -> ModelSize:
        """The model whose output projection makes the head's logits: the head (always, if it is a small model) or the target."""
        is_own = isinstance(self.head_config, DraftModelConfig) or (self.head and self.head.weights.output)
        return self.head if self.head and is_own else self.target


def pair(
    target: ModelConfig,
    head: HeadConfig | None,
    dtype: str,
    tp: int = 1,
    *,
    kv_cache_dtype: str = "auto",
    draft_kv_cache_dtype: str | None = None,
) -> Pair:
    """The last two as in EngineConfig."""
    models = [
        ModelSize(
            config,
            weights_of(whole, dtype, shares := Shares(config, tp)),
            weights_of(unquantised(whole), dtype, shares),
            tp * cache_bytes_per_token(config, cache, dtype, tp),
            shares,
            ADDRESSABLE_ENTRIES // (shares.kv_heads * config.head_dim) if cache == FP8 else math.inf,
        )
        for whole, config, cache in (
            (target, target, kv_cache_dtype),
            *(((head, head.layer, draft_kv_cache_dtype or kv_cache_dtype),) if head else ()),
        )
    ]
    return Pair(models[0], models[1] if head else None, head, dtype, tp)


@dataclass(frozen=True)
class Memory:
    """One GPU's memory in bytes, divided as the engine does it."""

    total: float
    jax_share: float
    """The share that JAX manages."""
    mem_fraction: float
    """The share of that for weights and cache; the rest is for temporaries."""
    weights: int
    cache_per_token: int
    page_size: int
    most_tokens: float = math.inf
    """As Pair.most_tokens."""

    @property
    def managed(self) -> float:
        return self.total * self.jax_share

    @property
    def left_free(self) -> float:
        """For temporaries."""
        return self.managed * (1 - self.mem_fraction)

    @property
    def room(self) -> float:
        """For the cache; negative if the weights alone are too large."""
        return self.managed * self.mem_fraction - self.weights

    @property
    def tokens(self) -> int:
        """Tokens that fit in the cache, in whole pages."""
        return max(0, int(min(self.room // self.cache_per_token, self.most_tokens) // self.page_size)) * self.page_size

    def requests(self, context: int) -> int:
        """The number of requests with `context` tokens each that fit at once."""
        return self.tokens // self.taken(context)

    def taken(self, context: int) -> int:
        """Tokens of the cache that a request with `context` tokens takes: whole pages."""
        return -(-context // self.page_size) * self.page_size


@dataclass(frozen=True)
class CycleCost:
    """The least that one cycle of a batch moves and computes, per GPU."""

    moved: dict[str, float]
    """Bytes by kind of data."""
    operations: float

    def memory_seconds(self, gpu: Gpu) -> float:
        """At the data sheet's bandwidth."""
        return sum(self.moved.values()) / gpu.bandwidth

    def arithmetic_seconds(self, gpu: Gpu) -> float:
        """At the data sheet's arithmetic peak."""
        return self.operations / gpu.arithmetic

    def seconds(self, gpu: Gpu) -> float:
        """The lower bound of a cycle's time: the longer of both."""
        return max(self.memory_seconds(gpu), self.arithmetic_seconds(gpu))


def cycle_cost(models: Pair, tree: TreeShape, batch: int, context: int) -> CycleCost:
    """The cost of a cycle of `batch` requests with `context` committed tokens each; plain decoding needs no head.

    Every matrix is read once per forward, every forward reads the cache once; logits are written and read once. Registers
    and on-chip memory are free, and so are arrays of a few rows (norms, embeddings, the committed keys).
    """
    nodes, size = tree.num_draft_tokens, jnp.dtype(models.dtype).itemsize
    target = models.target
    moved: dict[str, float] = {
        "target weights": target.weights.layers + target.weights.projection,
        "target cache": batch * context * target.cache,
    }
    logits = batch * nodes * target.config.vocab_size
    operations = _operations(target, batch * nodes, context, size) + 2.0 * batch * nodes * target.dense.projection / size
    if tree.num_steps:
        head, steps, beam = models.head, tree.of_head.num_steps, tree.topk
        if head is None or models.head_config is None:
            raise ValueError(f"the tree {tree} needs a draft head: give --draft")
        config, forwards = models.head_config, models.head_config.forwards(steps)
        block = config.block_size if isinstance(config, BlockConfig) else None
        # Levels 2 .. steps, or the block, and the extension by accepted tokens, which costs a block head less than is counted here.
        further = max(0, steps - 1)
        rows = batch * ((block or further * beam if steps else 0) + tree.num_steps + 1)
        drafted = batch * (1 + further * beam if block is None and steps else steps)
        biases = (
            config.markov_rank * config.layer.vocab_size * size * models.tp if isinstance(config, DSparkConfig) else 0
        )  # per level
        moved |= {
            "head weights": further * biases + forwards * head.weights.layers + head.weights.fusion,
            "head logits' weights": (forwards if steps else 0) * models.head_logits_from.weights.projection,
            "head cache": forwards * batch * context * head.cache,
        }
        logits += drafted * (models.head_config.draft_vocab_size or target.config.vocab_size)
        operations += _operations(head, rows, context, size) + 2.0 * drafted * models.head_logits_from.dense.projection / size
        operations += 2.0 * batch * (tree.num_steps + 1) * head.dense.fusion / size
    moved["logits"] = 2 * LOGIT_BYTES * logits
    return CycleCost({name: count / models.tp for name, count in moved.items()}, operations / models.tp)


def _operations(model: ModelSize, rows: int, context: int, size: int) -> float:
    """Multiplications and additions of a model's layers over some rows that attend to the context; `size`: bytes per weight."""
    queries = model.config.num_layers * model.shares.devices * model.shares.heads * model.config.head_dim
    return rows * (2.0 * model.dense.layers / size + 4.0 * context * queries)
