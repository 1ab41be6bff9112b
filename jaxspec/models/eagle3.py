"""The EAGLE-3 draft head (EAGLE-3 paper, section 3.1; checkpoint layout of SafeAILab and SGLang)."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.config import Eagle3Config
from jaxspec.models.layers import MLP, Attention, RMSNorm, Rows, linear, rotation
from jaxspec.models.llama import Llama
from jaxspec.typing import Array, Float, Int, KeysValues


class HeadOutput(NamedTuple):
    """What one forward of a draft head returns; nothing is written to the cache."""

    hidden: Float[Array, "b w h"]
    """The head's output: fed back as the next row's hidden, and read by `logits`."""
    window: tuple[KeysValues, ...]
    """Each head layer's keys and values of all window rows so far, the earlier ones first."""


class Eagle3(nnx.Module):
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
        """Fuses the target's features into the head's width; a fed-back hidden needs no projection."""
        return self.fc(features)

    def __call__(
        self,
        embeddings: Float[Array, "b w h"],
        hidden: Float[Array, "b w h"],
        rows: Rows,
        cache: tuple[KeysValues, ...] | None = None,
        window: tuple[KeysValues, ...] | None = None,
    ) -> HeadOutput:
        """Runs the rows (embedding of the token, hidden of the position before it); earlier window rows come in `window`."""
        by = rotation(self.config.layer.rope, self.config.layer.head_dim, rows.positions)
        x = jnp.concatenate([self.input_layernorm(embeddings), self.hidden_norm(hidden)], -1)
        attended, keys_values = self.self_attn(x, by, rows, cache and cache[0], window and window[0])
        x = hidden + attended
        return HeadOutput(x + self.mlp(self.post_attention_layernorm(x)), (keys_values,))

    def logits(self, hidden: Float[Array, "*rows h"], target: Llama) -> Float[Array, "*rows v"]:
        """Logits over the draft vocabulary, in float32; through the target's lm_head where the head has none."""
        if self.config.draft_vocab_size is None:
            return target.logits(self.norm(hidden))
        return self.lm_head(self.norm(hidden)).astype(jnp.float32)

    def target_ids(self, draft_ids: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
        """Target vocabulary ids of draft vocabulary ids."""
        if self.config.draft_vocab_size is None:
            return draft_ids
        return self.draft_to_target[...][draft_ids]
