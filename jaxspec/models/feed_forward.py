"""The feed-forward part of a decoder layer. A model's config chooses its kind, and the kind knows its module and its tensors."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from flax import nnx

from jaxspec.model_config import ModelConfig
from jaxspec.models.linear import Builder
from jaxspec.typing import Array, Float
from pallas_kernels.product import Product


class Projection(NamedTuple):
    """A linear layer, fused of several tensors of a checkpoint."""

    inputs: int
    outputs: tuple[tuple[str, int], ...]
    """Name, without `.weight`, and output size of each tensor."""


class FeedForward(ABC):
    """A kind of feed-forward, as in ModelConfig.feed_forward. Subclasses are frozen dataclasses; their fields are its sizes."""

    @abstractmethod
    def module(self, config: ModelConfig, builder: Builder) -> nnx.Module:
        """A module that takes [b, w, hidden_size] and returns such an array or a Product of that shape."""

    @abstractmethod
    def projections(self, config: ModelConfig) -> Mapping[tuple[str | int, ...], Projection]:
        """The module's linear layers by their path in it, with the tensors that they are loaded from."""


def feed_forward_of(config: ModelConfig) -> FeedForward:
    """The kind that a model has."""
    return config.feed_forward or SwiGluMLP()


@dataclass(frozen=True)
class SwiGluMLP(FeedForward):
    """Llama's: down(silu(gate(x)) * up(x)), `intermediate_size` wide."""

    def module(self, config: ModelConfig, builder: Builder) -> "MLP":
        return MLP(config, builder)

    def projections(self, config: ModelConfig) -> Mapping[tuple[str | int, ...], Projection]:
        size, wide = config.hidden_size, config.intermediate_size
        return {
            ("gate_up_proj",): Projection(size, (("gate_proj", wide), ("up_proj", wide))),
            ("down_proj",): Projection(wide, (("down_proj", size),)),
        }


class MLP(nnx.Module):
    """SwiGLU; gate and up are one fused projection."""

    def __init__(self, config: ModelConfig, builder: Builder):
        self.gate_up_proj = builder.linear("gate_up_proj", config.hidden_size, 2 * config.intermediate_size)
        self.down_proj = builder.linear("down_proj", config.intermediate_size, config.hidden_size)

    def __call__(self, x: Float[Array, "b w h"]) -> Product:
        return self.down_proj.product(self.gate_up_proj.product(x).swiglu())
