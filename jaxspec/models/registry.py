"""The supported models: target families by the `model_type` of config.json, modules by their config, and loaded models."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.checks import checked, require, short
from jaxspec.config import EngineConfig, ModelConfig
from jaxspec.models.eagle import Eagle, EagleConfig
from jaxspec.models.eagle3 import Eagle3, Eagle3Config
from jaxspec.models.head import DraftHead, HeadConfig
from jaxspec.models.layers import Attention, Linear
from jaxspec.models.llama import Llama
from jaxspec.models.mtp import MTP, MTPConfig


class Family(NamedTuple):
    """A family's differences from Llama's decoder block."""

    covers: str
    """Models of the family that are known to work, for error messages and docs."""
    qkv_bias: bool = False
    qk_norm: bool = False
    attention_bias_means_more: bool = True
    """In this family `attention_bias: true` also adds a bias to the output projection, which is not supported here."""


FAMILIES = {
    "llama": Family("Llama 2, 3, 3.1, 3.2, 3.3 and models with their layout (Vicuna, DeepSeek-R1-Distill-Llama)"),
    "mistral": Family("Mistral (dense, without a sliding window: 7B from v0.2 on)"),
    "qwen2": Family("Qwen2, Qwen2.5 (dense)", qkv_bias=True, attention_bias_means_more=False),
    "qwen3": Family("Qwen3 (dense)", qk_norm=True),
    "mimo": Family("MiMo-7B, with its MTP layer as a draft head", qkv_bias=True, attention_bias_means_more=False),
}


def target_config(config: dict) -> ModelConfig:
    """The target that a config.json describes. Raises ValueError, listing the families, for any other model_type."""
    name = require(checked(config), "model_type")
    if name not in FAMILIES:
        listed = "".join(f"\n  {model_type}: {family.covers}" for model_type, family in FAMILIES.items())
        raise ValueError(f"config.json: model_type {short(name)} is not supported; supported are:{listed}")
    family = FAMILIES[name]
    if config.get("attention_bias") and family.attention_bias_means_more:
        raise ValueError(f"config.json: attention_bias=True is not supported for {name} (it adds a bias to the output projection)")
    return ModelConfig.from_hf(config, qkv_bias=family.qkv_bias, qk_norm=family.qk_norm)


MODULES: dict[type, Callable[..., nnx.Module]] = {ModelConfig: Llama, EagleConfig: Eagle, Eagle3Config: Eagle3, MTPConfig: MTP}
"""The module that each kind of config describes."""


@dataclass(frozen=True)
class Build[Module]:
    """Makes a module from its parameters, inside jit. Equal ones make equal modules."""

    graph: nnx.GraphDef
    attention_kernel: str | None = None
    matmul: str = EngineConfig.matmul
    """As EngineConfig has both."""

    def __call__(self, params: dict) -> Module:
        module = nnx.merge(self.graph, params)
        for _, layer in nnx.iter_modules(module):
            if isinstance(layer, Attention):
                layer.kernel = self.attention_kernel
            elif isinstance(layer, Linear):
                layer.matmul = self.matmul
        return module


@dataclass(frozen=True)
class LoadedModel[Config, Module]:
    """A module split into its graph and plain dicts of per-layer arrays, so that only arrays cross the jit boundary."""

    config: Config
    graph: nnx.GraphDef
    params: dict

    def merge(self, params: dict) -> Module:
        """The module with these parameters; inside a jitted function they are traced."""
        return nnx.merge(self.graph, params)


LoadedTarget = LoadedModel[ModelConfig, Llama]
LoadedHead = LoadedModel[HeadConfig, DraftHead]


def split_model(model: nnx.Module, config: ModelConfig | HeadConfig) -> LoadedModel:
    """The LoadedModel of a module built in Python, as tests and training do."""
    graph, state = nnx.split(model)
    return LoadedModel(config, graph, nnx.to_pure_dict(state))


def abstract_model(config: ModelConfig | HeadConfig, dtype: DTypeLike) -> tuple[nnx.GraphDef, dict]:
    """The model's graph definition and the shapes and dtypes of its parameters; nothing is allocated."""
    graph, state = nnx.split(nnx.eval_shape(lambda: MODULES[type(config)](config, dtype=dtype, rngs=nnx.Rngs(0))))
    return graph, jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), nnx.to_pure_dict(state))


def build_model(config: ModelConfig | HeadConfig, params: dict[str, Any]) -> LoadedModel:
    """The model with these parameters. Raises AssertionError unless names, shapes and dtypes are those of its module."""
    dtype = next(array.dtype for array in jax.tree.leaves(params) if jnp.issubdtype(array.dtype, jnp.floating))
    graph, expected = abstract_model(config, dtype)
    declared, found = (jax.tree.map(lambda array: (array.shape, array.dtype), tree) for tree in (expected, params))
    if declared != found:
        raise AssertionError(f"loader and module disagree:\nexpected {declared}\nfound {found}")
    return LoadedModel(config, graph, params)
