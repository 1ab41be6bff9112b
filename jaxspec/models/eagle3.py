"""The EAGLE-3 draft head (EAGLE-3 paper, section 3.1; checkpoint layout of SafeAILab and SGLang)."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.config import Eagle3Config
from jaxspec.models.head import DraftHead, HeadOutput
from jaxspec.models.layers import MLP, Attention, RMSNorm, Rows, linear, rotation
from jaxspec.models.llama import Llama
from jaxspec.typing import Array, Float, Int, KeysValues


class Eagle3(DraftHead):
    """One decoder layer that reads [embedding of this token, fused features of the previous position]."""

    def __init__(self, config: Eagle3Config, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        layer, size = config.layer, config.layer.hidden_size
        self.config = config
        self.fc = linear(config.num_features * config.target_hidden_size, size, dtype, rngs)
        self.input_layernorm = RMSNorm(size, layer.rms_norm_eps, dtype)
        self.hidden_norm = RMSNorm(size, layer.rms_norm_eps, dtype)
        self.self_attn = Attention(layer, 2 * size, dtype, rngs)
        self.post_attention_layernorm = RMSNorm(size, layer.rms_norm_eps, dtype)
        self.mlp = MLP(layer, dtype, rngs)
        self.norm = RMSNorm(size, layer.rms_norm_eps, dtype)
        if config.draft_vocab_size is not None:
            self.lm_head = linear(size, config.draft_vocab_size, dtype, rngs)
            self.draft_to_target = nnx.Variable(jnp.arange(config.draft_vocab_size, dtype=jnp.int32))

    def project(self, features: Float[Array, "b w f"]) -> Float[Array, "b w h"]:
        return self.fc(features)

    def __call__(
        self,
        embeddings: Float[Array, "b w h"],
        hidden: Float[Array, "b w h"],
        rows: Rows,
        cache: tuple[KeysValues, ...] | None = None,
        window: tuple[KeysValues, ...] | None = None,
    ) -> HeadOutput:
        by = rotation(self.config.layer.rope, self.config.layer.head_dim, rows.positions)
        x = jnp.concatenate([self.input_layernorm(embeddings), self.hidden_norm(hidden)], -1)
        attended, keys_values = self.self_attn(x, by, rows, cache[0] if cache else None, window[0] if window else None)
        x = hidden + attended
        return HeadOutput(x + self.mlp(self.post_attention_layernorm(x)), (keys_values,))

    def logits(self, hidden: Float[Array, "*rows h"], target: Llama) -> Float[Array, "*rows v"]:
        if self.config.draft_vocab_size is None:
            return target.logits(self.norm(hidden))  # the head has no lm_head of its own
        return self.lm_head(self.norm(hidden)).astype(jnp.float32)

    def target_ids(self, draft_ids: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
        if self.config.draft_vocab_size is None:
            return draft_ids
        return self.draft_to_target[...][draft_ids]
