"""A model as the engine holds it: a graph definition and plain dicts of per-layer arrays."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.config import ModelConfig
from jaxspec.models.eagle import Eagle, EagleConfig
from jaxspec.models.eagle3 import Eagle3, Eagle3Config
from jaxspec.models.head import DraftHead, HeadConfig
from jaxspec.models.llama import Llama
from jaxspec.models.mtp import MTP, MTPConfig

MODULES: dict[type, Callable[..., nnx.Module]] = {ModelConfig: Llama, EagleConfig: Eagle, Eagle3Config: Eagle3, MTPConfig: MTP}
"""The module that each kind of config describes."""


@dataclass(frozen=True)
class LoadedModel[Config, Module]:
    """A model taken apart so that only plain dicts of arrays cross the jit boundary; `merge` inside puts it together."""

    config: Config
    graph: nnx.GraphDef
    params: dict

    def merge(self, params: dict) -> Module:
        """The module with these parameters (traced ones, inside a jitted function)."""
        return nnx.merge(self.graph, params)


LoadedTarget = LoadedModel[ModelConfig, Llama]
LoadedHead = LoadedModel[HeadConfig, DraftHead]


def take_apart(model: nnx.Module, config: ModelConfig | HeadConfig) -> LoadedModel:
    """A LoadedModel from a module built in Python, as tests and training do."""
    graph, state = nnx.split(model)
    return LoadedModel(config, graph, nnx.to_pure_dict(state))


def abstract(config: ModelConfig | HeadConfig, dtype: DTypeLike) -> tuple[nnx.GraphDef, dict]:
    """The model's graph definition and its parameters as shapes and dtypes; nothing is allocated."""
    graph, state = nnx.split(nnx.eval_shape(lambda: MODULES[type(config)](config, dtype=dtype, rngs=nnx.Rngs(0))))
    return graph, jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), nnx.to_pure_dict(state))


def assemble(config: ModelConfig | HeadConfig, params: dict[str, Any]) -> LoadedModel:
    """The model with these parameters, which must be those that its module has, name by name and shape by shape."""
    dtype = next(array.dtype for array in jax.tree.leaves(params) if jnp.issubdtype(array.dtype, jnp.floating))
    graph, expected = abstract(config, dtype)
    wanted, found = (jax.tree.map(lambda array: (array.shape, array.dtype), tree) for tree in (expected, params))
    if wanted != found:
        raise AssertionError(f"loader and module disagree:\nexpected {wanted}\nfound {found}")
    return LoadedModel(config, graph, params)
