"""The EAGLE draft head (EAGLE paper, section 3.2); EAGLE-2 uses the same weights and only drafts another tree."""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.models.head import DraftHead, HeadConfig, HeadOutput, layer_of, run_later_layers
from jaxspec.models.layers import MLP, Attention, DecoderLayer, RMSNorm, Rows, linear, rotation
from jaxspec.typing import Array, Float, KeysValues


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

    def __call__(
        self,
        embeddings: Float[Array, "b w h"],
        hidden: Float[Array, "b w h"],
        rows: Rows,
        cache: tuple[KeysValues, ...] | None = None,
        window: tuple[KeysValues, ...] | None = None,
    ) -> HeadOutput:
        by = rotation(self.config.layer.rope, self.config.layer.head_dim, rows.positions)
        x = self.fc(jnp.concatenate([embeddings, hidden], -1))
        attended, keys_values = self.self_attn(x, by, rows, layer_of(cache, 0), layer_of(window, 0))
        x = x + attended
        x = x + self.mlp(self.post_attention_layernorm(x))
        x, later = run_later_layers(self.later_layers, x, by, rows, cache, window)
        return HeadOutput(x, (keys_values, *later))
