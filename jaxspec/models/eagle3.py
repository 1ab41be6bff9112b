"""The EAGLE-3 draft head (EAGLE-3 paper, section 3.1), with the variants that later trainers added."""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx

from jaxspec.models.head import DraftHead, HeadConfig
from jaxspec.models.layers import Attention, LayerInputs, LayerOutput, RMSNorm
from jaxspec.models.linear import Builder
from jaxspec.models.llama import Llama
from jaxspec.typing import Array, Float


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(HeadConfig):
    """An EAGLE-3 head. Its feature is the concatenation of several residual streams of the target (`captured_layers`)."""

    algorithm = "EAGLE3"

    fc_bias: bool = False
    """The projection of the features has a bias."""
    fc_norm: bool = False
    """Each residual stream has its own norm before the projection (EAGLE-3.1)."""
    norm_before_fc: bool = False
    """The concatenated streams have one norm before the projection."""
    norm_before_residual: bool = False
    """The first layer's residual is the normed hidden instead of the hidden itself."""
    norm_output: bool = False
    """The output is fed back after the final norm instead of before it (as SGLang and speculators define it)."""

    def __post_init__(self):
        if not self.captured_layers or list(self.captured_layers) != sorted(set(self.captured_layers)):
            raise ValueError(f"an EAGLE-3 head needs ascending, distinct layers of the target, got {list(self.captured_layers)}")
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc exclude each other: the head sets both")


def default_captured_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers whose input EAGLE-3 reads by default: a low, a middle and a high one. Raises ValueError below 7 layers.

    In: 32  Out: (2, 16, 29)
    """
    layers = (2, num_layers // 2, num_layers - 3)
    if not 2 < layers[1] < layers[2]:
        raise ValueError(f"EAGLE-3 reads layers 2, N/2 and N-3 of the target and needs N >= 7 layers, got {num_layers}")
    return layers


class Eagle3(DraftHead):
    """Llama layers; the first reads [embedding of this token, fused features of the previous position], twice as wide."""

    config: Eagle3Config

    def build(self, builder: Builder) -> None:
        config, dtype = self.config, builder.dtype
        layer, size, eps = config.layer, config.layer.hidden_size, config.layer.rms_norm_eps
        if config.fc_norm:
            self.fc_norm = nnx.List([RMSNorm(config.target_hidden_size, eps, dtype) for _ in config.captured_layers])
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.feature_size, eps, dtype)
        self.fc = builder.linear("fc", config.feature_size, size, bias=config.fc_bias)
        self.input_layernorm = RMSNorm(size, eps, dtype)
        self.hidden_norm = RMSNorm(size, eps, dtype)
        self.self_attn = Attention(layer, 2 * size, builder.inside("self_attn"))
        self.post_attention_layernorm = RMSNorm(size, eps, dtype)
        self.build_after_attention(builder)
        self.norm = RMSNorm(size, eps, dtype)

    def project(self, features: Float[Array, "b w f"]) -> Float[Array, "b w h"]:
        if self.config.fc_norm:
            streams = jnp.split(features, len(self.config.captured_layers), -1)
            features = jnp.concatenate([norm(stream) for norm, stream in zip(self.fc_norm, streams, strict=True)], -1)
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        return self.fc(features)

    def first_layer(self, embeddings: Float[Array, "b w h"], hidden: Float[Array, "b w h"], inputs: LayerInputs) -> LayerOutput:
        x = self.input_layernorm.beside(embeddings, self.hidden_norm, hidden)
        attended, keys_values = self.self_attn(x, inputs)
        residual = x[..., hidden.shape[-1] :] if self.config.norm_before_residual else hidden
        x, normed = self.post_attention_layernorm.add(residual, attended)
        return LayerOutput.after(x, self.mlp(normed), inputs, keys_values)

    @property
    def output_norm(self) -> RMSNorm | None:
        return self.norm if self.config.norm_output else None

    def logits(self, hidden: Float[Array, "*rows h"], target: Llama) -> Float[Array, "*rows v"]:
        return super().logits(hidden if self.config.norm_output else self.norm(hidden), target)
