"""Everything on the device: the modules that programs use, the caches, and one row of state per request."""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.config import EngineConfig, ModelConfig
from jaxspec.decoding.block_drafter import BlockDrafter
from jaxspec.decoding.drafter import Drafter, Merged, Models, NoDrafter
from jaxspec.decoding.head_drafter import HeadDrafter, SlidingWindow
from jaxspec.decoding.ngram import NgramDrafter
from jaxspec.decoding.prefill import Chunk
from jaxspec.decoding.programs import PrefillProgram
from jaxspec.decoding.sampling import Thresholds
from jaxspec.decoding.settings import SamplingKind, Settings, settings_row
from jaxspec.decoding.state import Admission, Sizes, State, empty_state, stored_dtype
from jaxspec.engine.request import Request
from jaxspec.engine.scheduler import PrefillChunk
from jaxspec.engine.text_store import LENT
from jaxspec.models.block import BlockConfig
from jaxspec.models.linear import Kernels
from jaxspec.models.registry import LoadedHead, LoadedModel
from jaxspec.models.sharing import Shares
from jaxspec.sampling_params import SamplingParams

GRAPHS_SINCE = (12, 3)
"""The CUDA version of the first driver (545) whose graphs have conditionals. With an older one XLA makes no graph of a cycle."""
ADDRESSABLE_ENTRIES = 2**31
"""Of an array of an 8-bit cache, on one GPU. Pallas computes offsets in 32 bits unless an array has more than 2**32 bytes, and they
count entries, so those of one byte would overflow from here on."""


@dataclass(frozen=True)
class Merger:
    """Builds the models from {"target": weights, "draft": weights}, inside jit. Equal Mergers build equal models."""

    target: nnx.GraphDef
    drafter: Drafter
    """Without arrays."""
    thresholds: Thresholds | None = None

    @classmethod
    def of(cls, target: nnx.GraphDef, drafter: Drafter, thresholds: Thresholds | None = None) -> "Merger":
        return cls(target, drafter.with_weights(jax.tree.map(lambda _: None, drafter.weights)), thresholds)

    def __call__(self, params: dict) -> Models:
        return Models(nnx.merge(self.target, params["target"]), self.drafter.with_weights(params["draft"]), self.thresholds)


def drafter_of(source: LoadedHead | Drafter | None, config: EngineConfig) -> Drafter:
    """The drafter behind what an engine is given (one, a head, or nothing to draft with) and what its options add."""
    sources = [] if source is None else [head_drafter(source, config) if isinstance(source, LoadedModel) else source]
    if config.ngram:
        sources.append(NgramDrafter(config.ngram_min_match, config.ngram_max_match, LENT if config.ngram_share else 0))
    return sources[0] if len(sources) == 1 else Merged(tuple(sources)) if sources else NoDrafter()


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
    """Bytes of keys and values per token on each of several devices, beside activations of this dtype."""
    return 2 * config.num_layers * Shares(config, devices).kv_heads * config.head_dim * stored_dtype(kv_cache_dtype, dtype).itemsize


def check_kernel(name: str | None, device: jax.Device) -> None:
    """Raises ValueError if the attention kernel can't run on the device."""
    if name in (None, "reference"):
        return
    if device.platform != "gpu":
        raise ValueError(f"attention_kernel={name!r} needs an NVIDIA GPU, and JAX runs on the {device.platform}: leave it out")
    if name == "mosaic" and device.compute_capability != "9.0":
        raise ValueError(
            f"attention_kernel='mosaic' is for Hopper, compute capability 9.0, and this is {device.compute_capability}"
        )


def driver_version() -> str | None:
    """The CUDA version of this machine's NVIDIA driver. None: it has none."""
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return None if failed else f"{number.value // 1000}.{number.value % 1000 // 10}"


def makes_graphs(driver: str) -> bool:
    """Whether cycles are CUDA graphs with a driver of this CUDA version, such as 12.8.0."""
    return tuple(map(int, driver.split(".")[:2])) >= GRAPHS_SINCE


def memory_limit(device: jax.Device) -> int | None:
    """Bytes that JAX may use on the device; None on a CPU.

    Raises:
        ValueError: the device does not tell.
    """
    if device.platform == "cpu":
        return None
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None:
        raise ValueError(
            f"the {device.platform} does not tell how much memory JAX may use, as with XLA_PYTHON_CLIENT_ALLOCATOR=platform: "
            "unset that, or give num_pages"
        )
    return limit


def addressable_pages(one_page: State) -> float:
    """The number of pages that the GPU kernels can address in this state's 8-bit caches."""
    caches = [each for each in jax.tree.leaves(one_page) if each.dtype == np.uint8]
    return min((ADDRESSABLE_ENTRIES // math.prod(each.sharding.shard_shape(each.shape)) for each in caches), default=math.inf)


def admission(request: Request, vocab_size: int, max_length: int, no_bias: jax.Array | None) -> Admission:
    """The input of decoding.state.admit. `no_bias`: an array of zeros for requests without a bias, which saves a copy."""
    return Admission(
        row=row(request.row, np.int32),
        tokens=padded(request.tokens, max_length),
        remaining=row(request.params.max_tokens - request.generated, np.int32),
        settings=settings(request, vocab_size),
        bias=bias_row(request.params, vocab_size) if no_bias is None or request.params.biases else no_bias,
    )


def prefill_chunk(chunks: Sequence[PrefillChunk], program: PrefillProgram, padding_row: int, page_size: int) -> Chunk:
    """The program's input for these chunks, in NumPy arrays. What is left of its rows are empty chunks of the padding row."""
    rows, is_last = np.full(program.batch, padding_row, np.int32), np.zeros(program.batch, bool)
    first_slot, size, cached = np.zeros((3, program.batch), np.int32)
    tokens, tables = np.zeros((program.batch, program.chunk), np.int32), []
    for place, chunk in enumerate(chunks):
        end = chunk.first_slot + chunk.size
        rows[place], is_last[place] = chunk.request.row, chunk.is_last
        first_slot[place], size[place], cached[place] = chunk.first_slot, chunk.size, chunk.cached
        tokens[place, : chunk.size] = chunk.request.tokens[chunk.first_slot : end]
        tables.append(chunk.pages[: end // page_size + 1])  # slot `end` is the head's, after the last chunk
    arrays: Any = rows, padded_table(tables, program.batch, program.pages), tokens, first_slot, size, cached, is_last
    return Chunk(*arrays)


def settings(request: Request, vocab_size: int) -> Settings:
    """One row of Settings: fields of SamplingParams by name, and fields with another form on the device."""
    params = request.params
    values = {name: value for name, value in vars(params).items() if name in Settings._fields} | {
        "kind": SamplingKind.of(params),
        "seed": (request.seed >> 32, request.seed & 0xFFFFFFFF),
        "top_k": min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size,
        "prompt_length": len(request.prompt),
        "min_length": len(request.prompt) + params.min_tokens,
        "stop_tokens": request.stop_token_ids,
        "wants_logprobs": params.logprobs is not None,
    }
    return settings_row(**values)


def bias_row(params: SamplingParams, vocab_size: int) -> Any:
    """[1, vocab] float32: logit_bias, and -inf for banned tokens.

    In:  logit_bias {1: 5}, bad_token_ids [2], allowed_token_ids [1, 2, 3], vocabulary of 5
    Out: [[-inf, 5, -inf, 0, -inf]]
    """
    bias = np.zeros((1, vocab_size), np.float32)
    for token, value in dict(params.logit_bias).items():
        bias[0, token] = value
    if params.allowed_token_ids is not None:
        banned = np.ones(vocab_size, bool)
        banned[list(params.allowed_token_ids)] = False
        bias[0, banned] = -np.inf
    bias[0, list(params.bad_token_ids)] = -np.inf
    return bias


def row(value: float | int, dtype: type[np.generic]) -> Any:
    """[1]: one sequence's value. Untyped, because programs take NumPy and JAX arrays alike."""
    return np.array([value], dtype)


def padded(values: tuple[int, ...] | list[int], width: int) -> Any:
    """One row [1, width] int32 that begins with the values.

    In:  (5, 6), 4
    Out: [[5, 6, 0, 0]]
    """
    line = np.zeros((1, width), np.int32)
    line[0, : len(values)] = values
    return line


def padded_table(tables: Sequence[Sequence[int]], batch: int, width: int) -> np.ndarray:
    """[batch, width] int32; unused entries are page 0.

    In:  [[5, 6], [7]], 3, 4
    Out: [[5, 6, 0, 0], [7, 0, 0, 0], [0, 0, 0, 0]]
    """
    padded = np.zeros((batch, width), np.int32)
    for row, pages in zip(padded, tables, strict=False):
        row[: len(pages)] = pages
    return padded
