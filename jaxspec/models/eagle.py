"""The EAGLE draft head (EAGLE paper, section 3.1); EAGLE-2 uses the same weights and drafts a different tree."""

from dataclasses import dataclass

import jax.numpy as jnp

from jaxspec.models.head import DraftHead, HeadConfig
from jaxspec.models.layers import Attention, LayerInputs, LayerOutput, RMSNorm
from jaxspec.models.linear import Builder
from jaxspec.typing import Array, Float


@dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadConfig):
    """An EAGLE head. Its feature is the target's hidden after the final norm."""

    algorithm = "EAGLE"

    fc_bias: bool = False
    """The projection of [embedding, hidden] has a bias."""


class Eagle(DraftHead):
    """Llama layers over fc([embedding, hidden]); the first has no input norm, and nothing norms the output."""

    config: EagleConfig

    def build(self, builder: Builder) -> None:
        layer, size = self.config.layer, self.config.layer.hidden_size
        self.fc = builder.linear("fc", 2 * size, size, bias=self.config.fc_bias)
        self.self_attn = Attention(layer, size, builder.inside("self_attn"))
        self.post_attention_layernorm = RMSNorm(size, layer.rms_norm_eps, builder.dtype)
        self.build_after_attention(builder)

    def first_layer(self, embeddings: Float[Array, "b w h"], hidden: Float[Array, "b w h"], inputs: LayerInputs) -> LayerOutput:
        x = self.fc(jnp.concatenate([embeddings, hidden], -1))
        attended, keys_values = self.self_attn(x, inputs)
        x, normed = self.post_attention_layernorm.add(x, attended)
        return LayerOutput.after(x, self.mlp(normed), inputs, keys_values)
