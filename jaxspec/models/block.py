"""Block heads: one forward drafts several positions at once (DFlash, arXiv 2602.06036; JetSpec, 2606.18394; DSpark, 2607.05147).

The block is the newest token and mask tokens after it. Its layers are Qwen3's, except for what they attend to: the keys and values
of the committed text are computed from the target's features, projected once and read by all layers, not from the head's own hidden
states. So each committed token costs two products per layer, and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx

from jaxspec.models.head import Head, HeadConfig
from jaxspec.models.layers import AttentionMetadata, DecoderLayer, LayerInputs, RMSNorm
from jaxspec.models.linear import Builder
from jaxspec.typing import Array, Float, Int, KeysValues


@dataclass(frozen=True, kw_only=True)
class BlockConfig(HeadConfig):
    """A block head: DFlash, or JetSpec, whose block is causal. It drafts with the target's embedding and output projection."""

    algorithm = "DFLASH"

    target_layers: int
    """Layers of the target."""
    block_size: int
    """Positions of the block, the newest token's included."""
    mask_token_id: int
    """The token of all other positions."""
    causal: tuple[bool, ...]
    """By layer: within the block, a position sees only itself and earlier positions."""
    windows: tuple[int | None, ...]
    """By layer: a position sees only positions nearer than this. None: all."""
    predicts_next: bool = False
    """A position predicts the token after it. False: the token at its own position, so the first predicts nothing."""

    def __post_init__(self):
        layers, ids = self.layer.num_layers, list(self.captured_layers)
        if not ids or ids != sorted(set(ids)):
            raise ValueError(f"a block head needs ascending, distinct layers of the target, got {ids}")
        if len(self.causal) != layers or len(self.windows) != layers:
            raise ValueError(f"causal and windows must have an entry for each of {layers} layers")
        if self.max_steps < 1:
            raise ValueError(f"block_size {self.block_size} has no position to draft: it must be at least 2")
        if self.mask_token_id >= self.layer.vocab_size:
            raise ValueError(f"mask_token_id is {self.mask_token_id}, beyond the vocabulary of {self.layer.vocab_size} tokens")
        for window in self.windows:
            if window is not None and window <= self.block_size:
                raise ValueError(f"sliding_window {window} must be above block_size {self.block_size}")

    @property
    def first(self) -> int:
        """The first position that predicts a token."""
        return 0 if self.predicts_next else 1

    @property
    def max_steps(self) -> int:
        """Tokens that one block drafts, one after another."""
        return self.block_size - self.first

    def forwards(self, steps: int) -> int:
        """One, of the block; the emitted tokens need none."""
        return min(steps, 1)


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(BlockConfig):
    """A block head whose logits get a bias that depends on the previous token."""

    algorithm = "DSPARK"

    markov_rank: int
    """The rank of the matrix of biases, which has a row and a column per token."""


class BlockHead(Head):
    """The layers of a block head."""

    config: BlockConfig

    def build(self, builder: Builder) -> None:
        layer, size, eps = self.config.layer, self.config.layer.hidden_size, self.config.layer.rms_norm_eps
        self.fc = builder.linear("fc", self.config.feature_size, size)
        self.hidden_norm = RMSNorm(size, eps, builder.dtype)
        self.layers = nnx.List([DecoderLayer(layer, builder.inside("layers", index)) for index in range(layer.num_layers)])
        self.norm = RMSNorm(size, eps, builder.dtype)
        if isinstance(self.config, DSparkConfig):
            self.markov_in = nnx.Param(builder.matrix(layer.vocab_size, self.config.markov_rank))
            self.markov_out = builder.linear("markov_out", self.config.markov_rank, layer.vocab_size, result=jnp.float32)

    def project(self, features: Float[Array, "b w f"]) -> Float[Array, "b w h"]:
        return self.hidden_norm(self.fc(features))

    def keys_values(self, features: Float[Array, "b w f"], positions: Int[Array, "b w"]) -> tuple[KeysValues, ...]:
        """The text's keys and values in each layer, computed from the target's features at these positions."""
        context = self.project(features)
        return tuple(layer.self_attn.rotated(context, positions)[1] for layer in self.layers)

    def __call__(
        self,
        embeddings: Float[Array, "b w h"],
        metadata: Sequence[AttentionMetadata],
        cache: Sequence[KeysValues] | None = None,
        windows: Sequence[KeysValues | None] | None = None,
    ) -> Float[Array, "b w h"]:
        """What `logits` reads, for the positions of a block. All but the embeddings is given per layer; `windows`: keys and
        values of the text that are not read from the cache; they come first in the masks."""
        none = (None,) * len(self.layers)
        x = embeddings
        first_norm, *next_norms = [*(layer.input_layernorm for layer in self.layers), self.norm]
        normed = first_norm(x)
        inputs = zip(metadata, cache or none, windows or none, next_norms, strict=True)
        for layer, each in zip(self.layers, inputs, strict=True):
            x, normed, _ = layer(x, normed, LayerInputs(*each))
        return normed

    @property
    def is_conditional(self) -> bool:
        """Whether logits depend on the token before."""
        return isinstance(self.config, DSparkConfig)

    def bias(self, before: Int[Array, "b n"]) -> Float[Array, "b n v"]:
        """What is added to the logits after these tokens, in float32, if the head is conditional."""
        return self.markov_out(self.markov_in[...][before])
