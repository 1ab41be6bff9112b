"""The supported models: target families by the `model_type` of config.json, modules by their config, and loaded models."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.checks import checked, require, short
from jaxspec.config import ModelConfig
from jaxspec.models.block import BlockConfig, BlockHead, DSparkConfig
from jaxspec.models.eagle import Eagle, EagleConfig
from jaxspec.models.eagle3 import Eagle3, Eagle3Config
from jaxspec.models.head import Head, HeadConfig
from jaxspec.models.linear import DEFAULT_KERNELS, Kernels
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


MODULES: dict[type, Callable[..., nnx.Module]] = {
    ModelConfig: Llama,
    EagleConfig: Eagle,
    Eagle3Config: Eagle3,
    MTPConfig: MTP,
    BlockConfig: BlockHead,
    DSparkConfig: BlockHead,
}
"""The module that each kind of config describes."""


@dataclass(frozen=True)
class LoadedModel[Config, Module]:
    """A model as plain dicts of per-layer arrays, so that only arrays cross the jit boundary, and what its module is made of."""

    config: Config
    params: dict
    dtype: np.dtype
    """Of activations and the cache. Matrices may be stored in another."""
    module: Callable[..., Module]
    """Makes the module; called as Llama is."""

    def graph(self, kernels: Kernels = DEFAULT_KERNELS) -> nnx.GraphDef:
        """The module without its parameters."""
        return _split(self.module, self.config, self.dtype, kernels)[0]

    def merge(self, params: dict, kernels: Kernels = DEFAULT_KERNELS) -> Module:
        """The module with these parameters; inside a jitted function they are traced."""
        return nnx.merge(self.graph(kernels), params)


LoadedTarget = LoadedModel[ModelConfig, Llama]
LoadedHead = LoadedModel[HeadConfig, Head]


@cache
def _split(module: Callable[..., Any], config: Any, dtype: np.dtype, kernels: Kernels) -> tuple[nnx.GraphDef, Any]:
    """The module's graph, and the shapes of its parameters; nothing is allocated."""
    return nnx.split(nnx.eval_shape(lambda: module(config, dtype=dtype, rngs=nnx.Rngs(0), kernels=kernels)))


def split_model(model: Llama | Head) -> LoadedModel:
    """The LoadedModel of a module built in Python, as tests and training do."""
    return LoadedModel(model.config, nnx.to_pure_dict(nnx.state(model)), model.dtype, type(model))


def abstract_model(config: ModelConfig | HeadConfig, dtype: DTypeLike) -> LoadedModel:
    """The model with shapes and dtypes in place of parameters."""
    module = MODULES[type(config)]
    shapes = nnx.to_pure_dict(_split(module, config, jnp.dtype(dtype), DEFAULT_KERNELS)[1])
    params = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), shapes)
    return LoadedModel(config, params, jnp.dtype(dtype), module)


def build_model(
    config: ModelConfig | HeadConfig,
    params: dict[str, Any],
    dtype: DTypeLike,
    place: Callable[[dict, ModelConfig], dict] = lambda params, _: params,
) -> LoadedModel:
    """The model with these parameters, as `place` (Placement.weights) makes them of its module's.

    Raises AssertionError unless names, shapes and dtypes are those of its module.
    """
    expected = abstract_model(config, dtype)
    trees = place(expected.params, layer_config(config)), params
    declared, found = (jax.tree.map(lambda array: (array.shape, array.dtype), tree) for tree in trees)
    if declared != found:
        raise AssertionError(f"loader and module disagree:\nexpected {declared}\nfound {found}")
    return replace(expected, params=params)


def layer_config(config: ModelConfig | HeadConfig) -> ModelConfig:
    """The sizes of a model's layers."""
    return config.layer if isinstance(config, HeadConfig) else config
