"""The parts that target and draft heads share: norm, rotation, attention over cache and window, decoder layer."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.config import FP8
from jaxspec.model_config import ModelConfig
from jaxspec.models.feed_forward import feed_forward_of
from jaxspec.models.linear import Builder, only_rows
from jaxspec.rope import inverse_frequencies
from jaxspec.typing import Array, Bool, Float, Int, KeysValues
from pallas_kernels.fp8 import Scales
from pallas_kernels.product import Product, value
from pallas_kernels.rms_norm import add_norm, norm_pair, rms_norm
from pallas_kernels.rotate_qkv import QkvLayout, rotate_qkv


class AttentionMetadata(NamedTuple):
    """Positions of the w window tokens, and the range of cache slots and the part of the window that each one sees."""

    positions: Int[Array, "b w"]
    """Positions for RoPE."""
    page_table: Int[Array, "b p"]
    """The pages of each sequence, in order."""
    start: Int[Array, " b"]
    length: Int[Array, " b"]
    """All tokens see the cache slots start <= i < length."""
    mask: Bool[Array, "b w s"]
    """The window keys that each token sees: its ancestors and itself."""

    @classmethod
    def of_window(cls, positions: Int[Array, "b w"], mask: Bool[Array, "b w s"]) -> "AttentionMetadata":
        """Without a cache."""
        zeros = jnp.zeros(len(positions), jnp.int32)
        return cls(positions, jnp.zeros((len(positions), 0), jnp.int32), zeros, zeros, mask)

    def of_rows(self, exist: Bool[Array, "b w"]) -> "AttentionMetadata":
        """The same, if only these rows exist."""
        return self._replace(mask=only_rows(self.mask, exist))


def causal_metadata(batch: int, width: int) -> AttentionMetadata:
    """Whole sequences without a cache, as in training.

    In:  batch=1, width=3
    Out: positions [[0, 1, 2]], no pages, mask [[1,0,0], [1,1,0], [1,1,1]]
    """
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
    return AttentionMetadata.of_window(positions, jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (batch, width, width)))


class RMSNorm(nnx.Module):
    """Root-mean-square norm with its weight."""

    def __init__(self, size: int, eps: float, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.ones(size, dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows h"]) -> Float[Array, "*rows h"]:
        return rms_norm(x, self.weight[...], self.eps)

    def beside(self, x: Float[Array, "b w h"], other: "RMSNorm", right: Float[Array, "b w h"]) -> Float[Array, "b w 2*h"]:
        """The norm of x and, to its right, `other`'s norm of `right`."""
        return norm_pair(x, right, self.weight[...], other.weight[...], self.eps)

    def add(
        self, x: Float[Array, "b w h"], product: Product | Float[Array, "b w h"]
    ) -> tuple[Float[Array, "b w h"], Float[Array, "b w h"]]:
        """x + product, and the norm of that sum."""
        return add_norm(x, product, self.weight[...], self.eps)


class LayerInputs(NamedTuple):
    """Inputs of one layer besides the residual stream."""

    metadata: AttentionMetadata
    cache: KeysValues | None
    """The layer's pages; None: no cache."""
    window: KeysValues | None
    """Keys and values of earlier window tokens; None: there are none."""
    next_norm: RMSNorm | None
    """The norm that follows the layer; None: none does."""


def layer_inputs(
    metadata: AttentionMetadata,
    cache: tuple[KeysValues, ...] | None,
    window: tuple[KeysValues, ...] | None,
    next_norms: Sequence[RMSNorm | None],
) -> list[LayerInputs]:
    """The inputs of each of a model's layers; `cache`, `window` and `next_norms` have one entry per layer."""
    none = (None,) * len(next_norms)
    return [LayerInputs(metadata, *each) for each in zip(cache or none, window or none, next_norms, strict=True)]


class Attention(nnx.Module):
    """Grouped-query attention over the cache and the window; queries, keys and values come from one fused projection."""

    def __init__(self, config: ModelConfig, input_size: int, builder: Builder):
        norm_eps = config.rms_norm_eps if config.qk_norm else None
        shares = builder.shares
        self.layout = QkvLayout(
            shares.heads,
            shares.kv_heads,
            config.head_dim,
            norm_eps,
            config.rope.attention_factor,
            fp8=builder.kernels.kv_cache_dtype == FP8,
        )
        qkv_size = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.rope, self.kernels = config.rope, builder.kernels
        self.qkv_proj = builder.linear("qkv_proj", input_size, qkv_size, bias=config.qkv_bias)
        self.o_proj = builder.linear("o_proj", config.num_heads * config.head_dim, config.hidden_size)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, builder.dtype)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, builder.dtype)
        self.has_scales = config.kv_scales
        if config.kv_scales:
            self.k_scale, self.v_scale = (nnx.Param(jnp.ones(config.num_kv_heads, jnp.float32)) for _ in "kv")

    def __call__(self, x: Float[Array, "b w _"], inputs: LayerInputs) -> tuple[Product, KeysValues]:
        """The attention's output, and keys and values of the window so far."""
        metadata, cache, window, _ = inputs
        batch, width = x.shape[:2]
        q, (k, v) = self.rotated(x, metadata.positions)
        if window is not None:
            k, v = jnp.concatenate([window.k, k], 1), jnp.concatenate([window.v, v], 1)
        if cache is None:
            cache = KeysValues(*(jnp.zeros((1, 1, *k.shape[2:]), k.dtype),) * 2)
        _, pages, start, length, mask = metadata
        attend, implementation = self.kernels.attend, self.kernels.attention
        out = attend(q, cache.k, cache.v, pages, start, length, k, v, mask, self.scales, implementation=implementation)
        # Writing the window to the cache must wait for this read; otherwise XLA copies the cache to keep the old one.
        out, k, v = jax.lax.optimization_barrier((out, k, v))
        return self.o_proj.product(out.reshape(batch, width, -1)), KeysValues(k, v)

    @property
    def scales(self) -> Scales | None:
        """The scales of an 8-bit cache."""
        return Scales(self.k_scale[...], self.v_scale[...]) if self.has_scales and self.layout.fp8 else None

    def rotated(
        self, x: Float[Array, "b w _"], positions: Int[Array, "b w"]
    ) -> tuple[Float[Array, "b w heads head_dim"], KeysValues]:
        """Queries, and keys and values, at these positions, as attention reads them."""
        norms = (self.q_norm.weight[...], self.k_norm.weight[...]) if self.layout.norm_eps is not None else None
        frequencies = jnp.asarray(inverse_frequencies(self.rope, self.layout.head_dim))
        q, k, v = rotate_qkv(self.qkv_proj.product(x), positions, frequencies, norms, self.layout, self.scales)
        return q, KeysValues(k, v)


class LayerOutput(NamedTuple):
    """The result of one decoder layer."""

    x: Float[Array, "b w h"]
    """The residual stream."""
    normed: Float[Array, "b w h"]
    """x after the norm that follows the layer, or x itself if none does."""
    window: KeysValues
    """Keys and values of the window so far."""

    @classmethod
    def after(
        cls, x: Float[Array, "b w h"], fed: Product | Float[Array, "b w h"], inputs: LayerInputs, window: KeysValues
    ) -> "LayerOutput":
        """Adds what the feed-forward returned to the residual stream, and applies the norm that follows, if there is one."""
        if inputs.next_norm is None:
            total = x + value(fed)
            return cls(total, total, window)
        return cls(*inputs.next_norm.add(x, fed), window)


class DecoderLayer(nnx.Module):
    """One pre-norm Llama layer. It applies the norm of the *next* layer, because one kernel does that and the last addition."""

    def __init__(self, config: ModelConfig, builder: Builder):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, builder.dtype)
        self.self_attn = Attention(config, config.hidden_size, builder.inside("self_attn"))
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, builder.dtype)
        self.mlp = feed_forward_of(config).module(config, builder.inside("mlp"))

    def __call__(self, x: Float[Array, "b w h"], normed: Float[Array, "b w h"], inputs: LayerInputs) -> LayerOutput:
        """`normed` is x after this layer's `input_layernorm`."""
        attended, keys_values = self.self_attn(normed, inputs)
        x, normed = self.post_attention_layernorm.add(x, attended)
        return LayerOutput.after(x, self.mlp(normed), inputs, keys_values)
