"""What every draft head does: reads a token and the feature of the position before it, and proposes the next token."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.config import ModelConfig
from jaxspec.models.layers import DecoderLayer, Rotation, Rows, linear
from jaxspec.models.llama import Llama
from jaxspec.typing import Array, Float, Int, KeysValues


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """What any draft head is; each kind adds its own switches."""

    algorithm: ClassVar[str]
    """The name of the kind: EAGLE, EAGLE3 or MTP."""

    layer: ModelConfig
    """Sizes of the head's own layers, `num_layers` of them. The rope is the head's own too and never the target's."""
    target_hidden_size: int
    captured_layers: tuple[int, ...] = ()
    """The feature is the residual stream entering these layers of the target, concatenated; (): the hidden after its final norm."""
    draft_vocab_size: int | None = None
    """Size of the head's own output vocabulary; None: the target's lm_head and vocabulary."""
    own_embedding: bool = False
    """The head embeds tokens itself. False: it takes the target's embedding."""

    @property
    def feature_size(self) -> int:
        """Width of the target's feature."""
        return self.target_hidden_size * max(1, len(self.captured_layers))


class HeadOutput(NamedTuple):
    """What one forward of a draft head returns; nothing is written to the cache."""

    hidden: Float[Array, "b w h"]
    """The head's output: fed back as the next row's hidden, and read by `logits`."""
    window: tuple[KeysValues, ...]
    """Each head layer's keys and values of all window rows so far, the earlier ones first."""


class DraftHead(nnx.Module):
    """A row is a pair: the embedding of token i with what is known of position i - 1.

    That is the target's feature there (through `project`), or, while drafting, the head's own output at the row's parent.
    """

    def __init__(self, config: HeadConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        vocab_size, size = config.layer.vocab_size, config.layer.hidden_size
        if config.own_embedding:
            self.embed_tokens = nnx.Param(0.02 * jax.random.normal(rngs.params(), (vocab_size, size), dtype))
        if config.draft_vocab_size is not None:
            self.lm_head = linear(size, config.draft_vocab_size, dtype, rngs)
            self.draft_to_target = nnx.Variable(jnp.arange(config.draft_vocab_size, dtype=jnp.int32))

    def embed(self, tokens: Int[Array, "b w"], target: Llama) -> Float[Array, "b w h"]:
        """Embeddings of target vocabulary ids."""
        return self.embed_tokens[...][tokens] if self.config.own_embedding else target.embed(tokens)

    def project(self, features: Float[Array, "b w f"]) -> Float[Array, "b w h"]:
        """The target's features in the width that `__call__` takes as `hidden`; a fed-back hidden needs no projection."""
        return features

    def __call__(
        self,
        embeddings: Float[Array, "b w h"],
        hidden: Float[Array, "b w h"],
        rows: Rows,
        cache: tuple[KeysValues, ...] | None = None,
        window: tuple[KeysValues, ...] | None = None,
    ) -> HeadOutput:
        """Runs the rows; the keys and values of earlier window rows come in `window`."""
        raise NotImplementedError

    def logits(self, hidden: Float[Array, "*rows h"], target: Llama) -> Float[Array, "*rows v"]:
        """Logits over the draft vocabulary, in float32."""
        if self.config.draft_vocab_size is None:
            return target.logits(hidden)
        return self.lm_head(hidden).astype(jnp.float32)

    def target_ids(self, draft_ids: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
        """Target vocabulary ids of draft vocabulary ids."""
        return draft_ids if self.config.draft_vocab_size is None else self.draft_to_target[...][draft_ids]


def layer_of(caches: tuple[KeysValues, ...] | None, index: int) -> KeysValues | None:
    """One layer's keys and values, if there are any."""
    return None if caches is None else caches[index]


def run_later_layers(
    layers: Iterable[DecoderLayer],
    x: Float[Array, "b w h"],
    by: Rotation,
    rows: Rows,
    cache: tuple[KeysValues, ...] | None,
    window: tuple[KeysValues, ...] | None,
) -> tuple[Float[Array, "b w h"], tuple[KeysValues, ...]]:
    """Layers 1, 2, ... of a head, behind its own kind of first layer; each reads its own cache and window."""
    grown = []
    for index, layer in enumerate(layers, 1):
        x, keys_values = layer(x, by, rows, layer_of(cache, index), layer_of(window, index))
        grown.append(keys_values)
    return x, tuple(grown)
