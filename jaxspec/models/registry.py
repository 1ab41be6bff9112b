"""The supported models: modules by their config, and loaded models."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.model_config import ModelConfig
from jaxspec.models.block import BlockConfig, BlockHead, DSparkConfig
from jaxspec.models.draft_model import DraftModel, DraftModelConfig
from jaxspec.models.eagle import Eagle, EagleConfig
from jaxspec.models.eagle3 import Eagle3, Eagle3Config
from jaxspec.models.head import Head, HeadConfig
from jaxspec.models.linear import DEFAULT_KERNELS, Kernels
from jaxspec.models.llama import Llama
from jaxspec.models.mtp import MTP, MTPConfig

MODULES: dict[type, Callable[..., nnx.Module]] = {
    ModelConfig: Llama,
    EagleConfig: Eagle,
    Eagle3Config: Eagle3,
    MTPConfig: MTP,
    BlockConfig: BlockHead,
    DSparkConfig: BlockHead,
    DraftModelConfig: DraftModel,
}
"""The module that each kind of config describes."""


@dataclass(frozen=True)
class LoadedModel[Config, Module]:
    """A model as plain dicts of per-layer arrays, so that only arrays cross the jit boundary, and what its module is made of."""

    config: Config
    params: dict
    dtype: np.dtype
    """The dtype of activations and the cache. Matrices may be stored in another."""
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
    """The model with these parameters, which are laid out as `place` (Placement.weights) lays out its module's own.

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
