"""A small model as a draft head: it reads tokens only, as the target does, and none of the target's features."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.model_config import ModelConfig
from jaxspec.models.head import DraftHead, HeadConfig
from jaxspec.models.layers import DecoderLayer, LayerInputs, LayerOutput, RMSNorm
from jaxspec.models.linear import DEFAULT_KERNELS, Kernels
from jaxspec.models.llama import Llama
from jaxspec.typing import Array, Float, Int

PADDING = 0.01
"""Published vocabularies are padded, Qwen2.5's to 151936 and 152064 tokens: they may differ by this share of the target's."""


@dataclass(frozen=True, kw_only=True)
class DraftModelConfig(HeadConfig):
    """A small model, `layer`, that drafts."""

    algorithm = "STANDALONE"
    first_slot = 0

    target_hidden_size: int = 0
    """It has no feature."""
    own_embedding: bool = True

    @classmethod
    def beside(cls, model: ModelConfig, target: ModelConfig) -> "DraftModelConfig":
        """The config of a model that drafts for a target. Raises ValueError if it has another vocabulary."""
        own, expected = model.vocab_size, target.vocab_size
        if abs(own - expected) > PADDING * expected:
            raise ValueError(
                f"the draft model's vocabulary has {own} tokens, the target's {expected}: give a draft model with the target's "
                "tokenizer, such as a smaller one of its family"
            )
        return cls(layer=model, draft_vocab_size=None if own == expected else min(own, expected))


class DraftModel(DraftHead):
    """A whole model with a head's interface. A pair's hidden is ignored: slot i of its cache follows from tokens 0 .. i alone.

    The vocabularies begin alike; what either has beyond the other is padding (`DraftModelConfig.draft_vocab_size`).
    """

    config: DraftModelConfig

    def __init__(
        self, config: DraftModelConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs, kernels: Kernels = DEFAULT_KERNELS
    ):
        self.config, self.dtype, self.kernels = config, jnp.dtype(dtype), kernels
        self.model = Llama(config.layer, dtype=dtype, rngs=rngs, kernels=kernels)

    def embed(self, tokens: Int[Array, "b w"], target: Llama) -> Float[Array, "b w h"]:
        return self.model.embed(jnp.minimum(tokens, self.config.layer.vocab_size - 1))

    def project(self, features: Float[Array, "b w f"]) -> Float[Array, "b w h"]:
        return jnp.zeros((*features.shape[:2], self.config.layer.hidden_size), features.dtype)

    def first_layer(self, embeddings: Float[Array, "b w h"], hidden: Float[Array, "b w h"], inputs: LayerInputs) -> LayerOutput:
        first = self.model.layers[0]
        return first(embeddings, first.input_layernorm(embeddings), inputs)

    @property
    def later_layers(self) -> Sequence[DecoderLayer]:  # type: ignore[override]
        return self.model.layers[1:]

    @property
    def output_norm(self) -> RMSNorm:
        return self.model.norm

    def logits(self, hidden: Float[Array, "*rows h"], target: Llama) -> Float[Array, "*rows v"]:
        return self.model.logits(hidden)[..., : self.config.draft_vocab_size]

    def target_ids(self, draft_ids: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
        return draft_ids

    def token_map(self) -> Int[Array, " v"] | None:
        size = self.config.draft_vocab_size
        return None if size is None else jnp.arange(size, dtype=jnp.int32)
