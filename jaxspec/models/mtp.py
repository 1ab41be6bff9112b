"""MiMo's multi-token-prediction layer as a draft head (MiMo technical report, section 2.2; wiring as SGLang serves it)."""

from dataclasses import dataclass

import jax.numpy as jnp

from jaxspec.models.head import DraftHead, HeadConfig
from jaxspec.models.layers import DecoderLayer, LayerInputs, LayerOutput, RMSNorm
from jaxspec.models.linear import Builder
from jaxspec.typing import Array, Float


@dataclass(frozen=True, kw_only=True)
class MTPConfig(HeadConfig):
    """One MTP layer, reused for every drafted level. Its feature is the target's hidden after the final norm."""

    algorithm = "MTP"


class MTP(DraftHead):
    """A decoder layer over input_proj([normed hidden, normed embedding]); its normed output is read and fed back."""

    def build(self, builder: Builder) -> None:
        size, eps, dtype = self.config.layer.hidden_size, self.config.layer.rms_norm_eps, builder.dtype
        self.token_layernorm = RMSNorm(size, eps, dtype)
        self.hidden_layernorm = RMSNorm(size, eps, dtype)
        self.input_proj = builder.linear("input_proj", 2 * size, size)
        self.layer = DecoderLayer(self.config.layer, builder.inside("layer"))
        self.final_layernorm = RMSNorm(size, eps, dtype)

    def first_layer(self, embeddings: Float[Array, "b w h"], hidden: Float[Array, "b w h"], inputs: LayerInputs) -> LayerOutput:
        # MiMo was trained with the embedding of the first pair masked out.
        embeddings = jnp.where(inputs.metadata.positions[..., None] == 0, 0, embeddings)
        x = self.input_proj(self.hidden_layernorm.beside(hidden, self.token_layernorm, embeddings))
        return self.layer(x, self.layer.input_layernorm(x), inputs)

    @property
    def output_norm(self) -> RMSNorm | None:
        return self.final_layernorm
