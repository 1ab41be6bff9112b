"""The EAGLE draft head (EAGLE paper, section 3.1); EAGLE-2 uses the same weights and drafts a different tree."""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.models.head import DraftHead, HeadConfig
from jaxspec.models.layers import MLP, Attention, AttentionInputs, DecoderLayer, LayerOutput, RMSNorm, linear
from jaxspec.typing import Array, Float


@dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadConfig):
    """An EAGLE head. Its feature is the target's hidden after the final norm."""

    algorithm = "EAGLE"

    fc_bias: bool = False
    """The projection of [embedding, hidden] has a bias."""


class Eagle(DraftHead):
    """Llama layers over fc([embedding, hidden]); the first has no input norm, and nothing norms the output."""

    def __init__(self, config: EagleConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        super().__init__(config, dtype, rngs)
        layer, size = config.layer, config.layer.hidden_size
        self.fc = linear(2 * size, size, dtype, rngs, bias=config.fc_bias)
        self.self_attn = Attention(layer, size, dtype, rngs)
        self.post_attention_layernorm = RMSNorm(size, layer.rms_norm_eps, dtype)
        self.mlp = MLP(layer, dtype, rngs)
        self.later_layers = nnx.List([DecoderLayer(layer, dtype, rngs) for _ in range(layer.num_layers - 1)])

    def first_layer(
        self,
        embeddings: Float[Array, "b w h"],
        hidden: Float[Array, "b w h"],
        inputs: AttentionInputs,
        next_norm: RMSNorm | None,
    ) -> LayerOutput:
        x = self.fc(jnp.concatenate([embeddings, hidden], -1))
        attended, keys_values = self.self_attn(x, inputs)
        x, normed = self.post_attention_layernorm.add(x, attended)
        return LayerOutput.after(x, self.mlp(normed), next_norm, keys_values)
