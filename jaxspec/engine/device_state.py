"""What a model and its head keep on the device: caches and rows of state, and the modules that programs work with."""

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.config import ModelConfig
from jaxspec.models.head import HeadConfig
from jaxspec.models.layers import Attention
from jaxspec.models.loaded import LoadedHead, LoadedTarget
from jaxspec.spec.state import Caches, Sizes, State, empty_state
from jaxspec.spec.step import Models
from jaxspec.typing import KeysValues


def merger(target: LoadedTarget, head: LoadedHead | None, attention_kernel: str | None = None) -> Callable[[dict], Models]:
    """A function that puts the modules together from {"target": parameters, "head": parameters}, inside a jitted function.

    `attention_kernel`: as EngineConfig has it.
    """
    capture = head.config.captured_layers if head else ()

    def merge(params: dict) -> Models:
        models = Models(target.merge(params["target"]), head.merge(params["head"]) if head else None, capture)
        if attention_kernel is not None:
            for model in models[:2]:
                use_kernel(model, attention_kernel)
        return models

    return merge


def use_kernel(model: nnx.Module | None, attention_kernel: str) -> None:
    """Every attention of the model is computed by this kernel from now on."""
    for _, module in nnx.iter_modules(model) if model else ():
        if isinstance(module, Attention):
            module.kernel = attention_kernel


def state_sizes(target: ModelConfig, head: HeadConfig | None, *, max_length: int, postpone: int) -> Sizes:
    """What the shapes of the state depend on."""
    return Sizes(
        hidden=head.layer.hidden_size if head else target.hidden_size,
        feature=head.feature_size if head else target.hidden_size,
        vocab=target.vocab_size,
        max_length=max_length,
        postpone=postpone,
    )


def new_state(
    target: ModelConfig, head: HeadConfig | None, sizes: Sizes, *, rows: int, num_pages: int, page_size: int, dtype: DTypeLike
) -> State:
    """Empty caches and free rows."""
    caches = Caches(
        empty_cache(target, num_pages, page_size, dtype), empty_cache(head.layer, num_pages, page_size, dtype) if head else ()
    )
    return empty_state(caches, rows, sizes, dtype)


def empty_cache(config: ModelConfig, num_pages: int, page_size: int, dtype: DTypeLike) -> tuple[KeysValues, ...]:
    """Zeroed pages [pages, page, kv_heads, head_dim] for every layer; keys and values are arrays of their own."""
    shape = (num_pages, page_size, config.num_kv_heads, config.head_dim)
    return tuple(KeysValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers))


def cache_bytes_per_token(config: ModelConfig, dtype: DTypeLike) -> int:
    """What a model keeps per token, in bytes."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize
