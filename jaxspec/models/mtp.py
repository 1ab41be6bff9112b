"""MiMo's multi-token-prediction layer as a draft head (MiMo technical report, section 2.2; wiring as SGLang serves it)."""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.models.head import DraftHead, HeadConfig, HeadOutput, layer_of
from jaxspec.models.layers import DecoderLayer, RMSNorm, Rows, linear, rotation
from jaxspec.typing import Array, Float, KeysValues


@dataclass(frozen=True, kw_only=True)
class MTPConfig(HeadConfig):
    """One MTP layer, reused for every drafted level. Its feature is the target's hidden after the final norm."""

    algorithm = "MTP"


class MTP(DraftHead):
    """A decoder layer over input_proj([normed hidden, normed embedding]); its normed output is read and fed back."""

    def __init__(self, config: MTPConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        super().__init__(config, dtype, rngs)
        size, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        self.token_layernorm = RMSNorm(size, eps, dtype)
        self.hidden_layernorm = RMSNorm(size, eps, dtype)
        self.input_proj = linear(2 * size, size, dtype, rngs)
        self.layer = DecoderLayer(config.layer, dtype, rngs)
        self.final_layernorm = RMSNorm(size, eps, dtype)

    def __call__(
        self,
        embeddings: Float[Array, "b w h"],
        hidden: Float[Array, "b w h"],
        rows: Rows,
        cache: tuple[KeysValues, ...] | None = None,
        window: tuple[KeysValues, ...] | None = None,
    ) -> HeadOutput:
        by = rotation(self.config.layer.rope, self.config.layer.head_dim, rows.positions)
        # MiMo was trained with the embedding of the first pair masked out.
        embeddings = jnp.where(rows.positions[..., None] == 0, 0, embeddings)
        x = self.input_proj(jnp.concatenate([self.hidden_layernorm(hidden), self.token_layernorm(embeddings)], -1))
        x, keys_values = self.layer(x, by, rows, layer_of(cache, 0), layer_of(window, 0))
        return HeadOutput(self.final_layernorm(x), (keys_values,))
