"""The models and the state of an engine, from what it is given."""

from dataclasses import dataclass, replace

import jax
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.config import EngineConfig
from jaxspec.decoding.block_drafter import BlockDrafter
from jaxspec.decoding.drafter import Drafter, Merged, Models, NoDrafter
from jaxspec.decoding.head_drafter import HeadDrafter, SlidingWindow
from jaxspec.decoding.ngram import NgramDrafter
from jaxspec.decoding.sampling import Thresholds
from jaxspec.decoding.state import Sizes, State, empty_state, stored_dtype
from jaxspec.engine.text_store import LENT
from jaxspec.model_config import ModelConfig
from jaxspec.models.block import BlockConfig
from jaxspec.models.linear import Kernels
from jaxspec.models.registry import LoadedHead, LoadedModel
from jaxspec.models.sharing import Shares


@dataclass(frozen=True)
class Merger:
    """Builds the models from {"target": weights, "draft": weights}, inside jit. Equal Mergers build equal models."""

    target: nnx.GraphDef
    drafter: Drafter
    """Without arrays."""
    thresholds: Thresholds | None = None
    row_cost: float = 0.0

    @classmethod
    def of(
        cls, target: nnx.GraphDef, drafter: Drafter, thresholds: Thresholds | None = None, row_cost: float = 0.0
    ) -> "Merger":  # fmt: skip
        return cls(target, drafter.with_weights(jax.tree.map(lambda _: None, drafter.weights)), thresholds, row_cost)

    def __call__(self, params: dict) -> Models:
        target, drafter = nnx.merge(self.target, params["target"]), self.drafter.with_weights(params["draft"])
        return Models(target, drafter, self.thresholds, self.row_cost)


def drafter_of(source: LoadedHead | Drafter | None, config: EngineConfig) -> Drafter:
    """The drafter behind what an engine is given (one, a head, or nothing to draft with) and what its options add."""
    sources = [] if source is None else [head_drafter(source, config) if isinstance(source, LoadedModel) else source]
    if config.ngram:
        sources.append(NgramDrafter(config.ngram_min_match, config.ngram_max_match, LENT if config.ngram_share else 0))
    if not sources:
        return NoDrafter()
    is_merged = len(sources) > 1 or (config.row_cost and not sources[0].traits.from_text)
    return Merged(tuple(sources)) if is_merged else sources[0]


def head_drafter(source: LoadedHead, config: EngineConfig) -> Drafter:
    """The drafter with this head. Raises ValueError for options that its kind does not have."""
    window = None if config.draft_window_size is None else SlidingWindow(config.draft_window_size, config.draft_sink_size)
    kernels = kernels_of(config)
    kernels = replace(kernels, kv_cache_dtype=config.draft_kv_cache_dtype or kernels.kv_cache_dtype)
    if not isinstance(source.config, BlockConfig):
        return HeadDrafter.of(source, window, kernels)
    if window is not None:
        raise ValueError(f"draft_window_size is not supported for a {source.config.algorithm} head: its config has its windows")
    return BlockDrafter.of(source, kernels)


def kernels_of(config: EngineConfig) -> Kernels:
    """The implementations that the target uses; a head differs in the dtype of its cache."""
    return Kernels(config.attention_kernel, config.matmul, kv_cache_dtype=config.kv_cache_dtype, devices=config.tp_size)


def thresholds_of(config: EngineConfig) -> Thresholds | None:
    """The thresholds under which drafts are accepted; None: only the target's own choices are."""
    return Thresholds(config.accept_threshold_single, config.accept_threshold_acc) if config.is_lossy else None


def new_state(target: ModelConfig, drafter: Drafter, sizes: Sizes) -> State:
    """Empty caches and free rows."""
    return empty_state(target, sizes, drafter.feature_size, drafter.empty(sizes))


def cache_bytes_per_token(config: ModelConfig, kv_cache_dtype: str, dtype: DTypeLike, devices: int = 1) -> int:
    """Bytes of keys and values per token on each of several devices, with activations of this dtype."""
    return 2 * config.num_layers * Shares(config, devices).kv_heads * config.head_dim * stored_dtype(kv_cache_dtype, dtype).itemsize
