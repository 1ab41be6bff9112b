"""The target model: Llama's decoder and its relatives (registry.py), over a paged cache."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.model_config import ModelConfig
from jaxspec.models.layers import AttentionMetadata, DecoderLayer, RMSNorm, layer_inputs
from jaxspec.models.linear import DEFAULT_KERNELS, NO_TOKEN, Builder, Kernels, look_up, put_together
from jaxspec.typing import Array, Float, Int, KeysValues
from pallas_kernels.weight import Weight


class TargetOutput(NamedTuple):
    """The result of one forward pass of the target; nothing is written to the cache."""

    hidden: Float[Array, "b w h"]
    """After the final norm; the output projection reads it."""
    features: Float[Array, "b w f"]
    """The captured residual streams, concatenated in layer order; `hidden` itself when none are captured."""
    window: tuple[KeysValues, ...]
    """Keys and values of the window in each layer, [b, w, kv_heads, head_dim]."""


class Llama(nnx.Module):
    """The decoder of Llama, Qwen2, Qwen3 and MiMo. Each layer has its own weight arrays, because XLA copies slices of a stack."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs, kernels: Kernels = DEFAULT_KERNELS):
        self.config, self.dtype, self.kernels = config, jnp.dtype(dtype), kernels
        builder = Builder(dtype, rngs, kernels, config)
        embedding = builder.embedding(config.vocab_size, config.hidden_size)
        self.embed_tokens, self.embedding_structure = nnx.Param(jax.tree.leaves(embedding)[0]), jax.tree.structure(embedding)
        self.layers = nnx.List([DecoderLayer(config, builder.inside("layers", index)) for index in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        if not config.tie_word_embeddings:
            self.lm_head = builder.output_projection(config.hidden_size, config.vocab_size)

    @property
    def embedding(self) -> Weight:
        """The embedding, transposed: [h, v]."""
        return jax.tree.unflatten(self.embedding_structure, [self.embed_tokens[...]])

    def embed(self, tokens: Int[Array, "b w"]) -> Float[Array, "b w h"]:
        return look_up(self.embedding, tokens, self.dtype, self.kernels)

    def __call__(
        self,
        tokens: Int[Array, "b w"],
        metadata: AttentionMetadata,
        cache: tuple[KeysValues, ...] | None = None,
        capture: tuple[int, ...] = (),
    ) -> TargetOutput:
        """Runs the window; `capture` lists the layers whose input residual stream becomes the feature. Where a token is NO_TOKEN
        the results mean nothing.

        Layer number num_layers, one past the last, means the output of the last layer.
        """
        x, metadata = self.embed(tokens), metadata.of_rows(tokens != NO_TOKEN)
        first_norm, *next_norms = [*(layer.input_layernorm for layer in self.layers), self.norm]
        normed = first_norm(x)
        features, window = [], []
        for index, inputs in enumerate(layer_inputs(metadata, cache, None, next_norms)):
            if index in capture:
                features.append(x)
            with jax.named_scope(f"layer_{index}"):
                x, normed, keys_values = self.layers[index](x, normed, inputs)
            window.append(keys_values)
        if len(self.layers) in capture:
            features.append(x)
        return TargetOutput(normed, jnp.concatenate(features, -1) if capture else normed, tuple(window))

    def logits(self, hidden: Float[Array, "*rows h"]) -> Float[Array, "*rows v"]:
        """Output projection of normed hidden states, in float32."""
        if not self.config.tie_word_embeddings:
            return self.lm_head(hidden)
        part = self.embedding.dot(hidden, jnp.float32, self.kernels.matmul)
        return part if self.kernels.devices == 1 else put_together(part, self.config.vocab_size)

    def output_columns(self, ids: Int[Array, " ids"]) -> Weight:
        """The output projection of these tokens only, [h, ids] (FR-Spec, section 3.2)."""
        return (self.embedding if self.config.tie_word_embeddings else self.lm_head.weight).columns(ids)
