"""The base classes of all draft heads and of those that draft token by token, from a token and the previous position's feature."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.model_config import ModelConfig
from jaxspec.models.feed_forward import feed_forward_of
from jaxspec.models.layers import AttentionMetadata, DecoderLayer, LayerInputs, LayerOutput, RMSNorm, layer_inputs
from jaxspec.models.linear import DEFAULT_KERNELS, Builder, Kernels, look_up
from jaxspec.models.llama import Llama
from jaxspec.typing import Array, Float, Int, KeysValues


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The fields that all kinds of heads have; each kind adds its own."""

    algorithm: ClassVar[str]
    """The name of the kind: EAGLE, EAGLE3, MTP, DFLASH, DSPARK or STANDALONE."""
    first_slot: ClassVar[int] = 1
    """The first slot of its cache that it uses, whose position is 0. A pair needs a feature before it, and slot 0 has none."""

    layer: ModelConfig
    """Sizes of the head's own `num_layers` layers. The head has its own RoPE too; it never uses the target's."""
    target_hidden_size: int
    captured_layers: tuple[int, ...] = ()
    """The feature is the residual stream entering these layers of the target, concatenated; (): the hidden after its final norm."""
    draft_vocab_size: int | None = None
    """Size of the head's own output vocabulary; None: the target's lm_head and vocabulary."""
    own_embedding: bool = False
    """The head has its own token embedding. False: it uses the target's."""

    @property
    def feature_size(self) -> int:
        """Width of the target's feature."""
        return self.target_hidden_size * max(1, len(self.captured_layers))

    @property
    def max_steps(self) -> int | None:
        """The most tokens that it drafts, one after another; None: any number."""
        return None

    def forwards(self, steps: int) -> int:
        """Forward passes of its layers in a cycle that drafts `steps` levels: one over the emitted tokens, which drafts the first
        level if there is one, and one for each further level."""
        return max(1, steps)


class HeadOutput(NamedTuple):
    """The result of one forward pass of a draft head; nothing is written to the cache."""

    hidden: Float[Array, "b w h"]
    """The head's output: fed back to draft the next level, and read by `logits`."""
    window: tuple[KeysValues, ...]
    """Keys and values of the window so far in each head layer, earlier tokens first."""


class Head(nnx.Module):
    """The base class of draft heads: what all kinds share. A kind defines `build`, and overrides other methods where it differs."""

    def __init__(self, config: HeadConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs, kernels: Kernels = DEFAULT_KERNELS):
        self.config, self.dtype, self.kernels = config, jnp.dtype(dtype), kernels
        builder = Builder(dtype, rngs, kernels, config.layer)
        vocab_size, size = config.layer.vocab_size, config.layer.hidden_size
        if config.own_embedding:
            embedding = builder.embedding(vocab_size, size)
            self.embed_tokens, self.embedding_structure = nnx.Param(jax.tree.leaves(embedding)[0]), jax.tree.structure(embedding)
        if config.draft_vocab_size is not None:
            self.lm_head = builder.output_projection(size, config.draft_vocab_size)
            self.draft_to_target = nnx.Variable(jnp.arange(config.draft_vocab_size, dtype=jnp.int32))
        self.build(builder)

    def build(self, builder: Builder) -> None:
        """Adds the layers of this kind of head."""
        raise NotImplementedError

    def embed(self, tokens: Int[Array, "b w"], target: Llama) -> Float[Array, "b w h"]:
        """Embeddings of target vocabulary ids."""
        if not self.config.own_embedding:
            return target.embed(tokens)
        embedding = jax.tree.unflatten(self.embedding_structure, [self.embed_tokens[...]])
        return look_up(embedding, tokens, self.dtype, self.kernels)

    def project(self, features: Float[Array, "b w f"]) -> Float[Array, "b w h"]:
        """The target's features in the width that the layers take."""
        return features

    def logits(self, hidden: Float[Array, "*rows h"], target: Llama) -> Float[Array, "*rows v"]:
        """Logits over the draft vocabulary, in float32."""
        if self.config.draft_vocab_size is None:
            return target.logits(hidden)
        return self.lm_head(hidden)

    def target_ids(self, draft_ids: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
        """Target vocabulary ids of draft vocabulary ids."""
        return draft_ids if self.config.draft_vocab_size is None else self.draft_to_target[...][draft_ids]

    def token_map(self) -> Int[Array, " v"] | None:
        """The target id of each draft id; None: they are the same."""
        return None if self.config.draft_vocab_size is None else self.draft_to_target[...]


class DraftHead(Head):
    """The base class of heads that draft token by token. The input is pairs: the embedding of token i, a hidden of position i - 1.

    That hidden is the target's feature there (through `project`) or, while drafting, the head's own output at the parent, which
    needs no projection. A kind of head defines `first_layer`, and `output_norm` where it has one.
    """

    later_layers: Sequence[DecoderLayer] = ()
    """Ordinary decoder layers after the first."""

    def build_after_attention(self, builder: Builder) -> None:
        """Adds the first layer's feed-forward, and the later layers."""
        layer = self.config.layer
        self.mlp = feed_forward_of(layer).module(layer, builder.inside("mlp"))
        later = (DecoderLayer(layer, builder.inside("later_layers", index)) for index in range(layer.num_layers - 1))
        self.later_layers = nnx.List(later)

    def __call__(
        self,
        embeddings: Float[Array, "b w h"],
        hidden: Float[Array, "b w h"],
        metadata: AttentionMetadata,
        cache: tuple[KeysValues, ...] | None = None,
        window: tuple[KeysValues, ...] | None = None,
    ) -> HeadOutput:
        """Runs the pairs; `window` holds the keys and values of earlier ones."""
        next_norms = [*(layer.input_layernorm for layer in self.later_layers), self.output_norm]
        first, *later = layer_inputs(metadata, cache, window, next_norms)
        x, normed, keys_values = self.first_layer(embeddings, hidden, first)
        grown = [keys_values]
        for layer, inputs in zip(self.later_layers, later, strict=True):
            x, normed, keys_values = layer(x, normed, inputs)
            grown.append(keys_values)
        return HeadOutput(normed, tuple(grown))

    def first_layer(self, embeddings: Float[Array, "b w h"], hidden: Float[Array, "b w h"], inputs: LayerInputs) -> LayerOutput:
        """Joins embeddings and hidden and runs the first layer."""
        raise NotImplementedError

    @property
    def output_norm(self) -> RMSNorm | None:
        """The norm after the last layer, whose output is fed back; None: the residual stream is."""
        return None
