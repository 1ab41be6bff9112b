"""Linear layers over weights of any storage, and what all layers of a model are built with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.config import ModelConfig
from jaxspec.typing import Array, Float
from pallas_kernels.product import Product
from pallas_kernels.rows import ByRows
from pallas_kernels.tree_attention import tree_attention
from pallas_kernels.weight import Dense, Weight

Storage = Callable[[Float[Array, "k n"]], Weight]
"""Stores a matrix: the class of the weight, or a function that makes one."""


def parameters(weight: Weight) -> dict[str, Array]:
    """A weight's arrays, by the names that they have as parameters.

    In:  Dense(array)
    Out: {"kernel": array}
    In:  Beside((Rows(array), Blocks(blocks, "q8_0")))
    Out: {"weights_0_rows": array, "weights_1_blocks": blocks}
    """
    return {jax.tree_util.keystr(keys, simple=True, separator="_"): array for keys, array in jax.tree.leaves_with_path(weight)}


def storage_of(config: ModelConfig, *path: str | int) -> Storage:
    """How a model stores the matrix of the layer at this path."""
    return dict(config.storages).get(path) or config.storage or Dense


def table_storage_of(config: ModelConfig, *path: str | int) -> Storage:
    """How a model stores the transpose of this embedding, in one array."""
    return dict(config.storages).get(path) or ByRows()


@dataclass(frozen=True)
class Kernels:
    """Implementations that a model's layers use."""

    attention: str | None = None
    """As EngineConfig.attention_kernel."""
    matmul: str = "auto"
    """As EngineConfig.matmul."""
    attend: Callable[..., Array] = tree_attention
    """The attention function; training has one that needs less memory."""
    kv_cache_dtype: str = "auto"
    """As EngineConfig.kv_cache_dtype, of this model: what keys and values are rounded to."""
    split: frozenset[str] = frozenset()
    """The axes of parameters (placement.AXES) of which each device holds a part."""


DEFAULT_KERNELS = Kernels()
MESH_AXIS = "devices"
"""The name of the axis along which devices stand."""


class Linear(nnx.Module):
    """x @ weight + bias. The weight's arrays are parameters of the layer: `kernel` alone, [inputs, outputs], if it is dense."""

    def __init__(
        self,
        weight: Weight,
        bias: Float[Array, " n"] | None,
        kernels: Kernels,
        result: DTypeLike | None,
        sums_over: str | None = None,
    ):
        """`result`: the output's dtype; None: the input's. `sums_over`: as for Builder.linear."""
        self.names = tuple(parameters(weight))
        for name, array in parameters(weight).items():
            setattr(self, name, nnx.Param(array))
        self.bias = None if bias is None else nnx.Param(bias)
        self.structure = jax.tree.structure(weight)
        self.matmul, self.result = kernels.matmul, result
        self.axis = MESH_AXIS if sums_over in kernels.split else None

    @property
    def weight(self) -> Weight:
        return jax.tree.unflatten(self.structure, [getattr(self, name)[...] for name in self.names])

    def assign(self, weight: Weight) -> None:
        """Replaces the weight's arrays. The new weight has the same storage and shape."""
        for name, array in parameters(weight).items():
            getattr(self, name)[...] = array

    def product(self, x: Float[Array, "*rows inputs"]) -> Product:
        """The layer's output, which the kernel that reads it finishes."""
        return Product(x, self.weight, None if self.bias is None else self.bias[...], self.matmul, self.axis)

    def __call__(self, x: Float[Array, "*rows inputs"]) -> Float[Array, "*rows outputs"]:
        return self.product(x).value(self.result)


class Builder(NamedTuple):
    """Builds the parts of one model, with random weights."""

    dtype: DTypeLike
    """Of activations, norms, biases and embeddings, and of matrices before they are stored."""
    rngs: nnx.Rngs
    kernels: Kernels
    config: ModelConfig
    """It knows how matrices are stored."""
    path: tuple[str | int, ...] = ()
    """Of the part that is being built."""

    def inside(self, *path: str | int) -> "Builder":
        """The builder of a part of this part."""
        return self._replace(path=(*self.path, *path))

    def linear(
        self,
        name: str,
        inputs: int,
        outputs: int,
        *,
        bias: bool = False,
        result: DTypeLike | None = None,
        sums_over: str | None = None,
    ) -> Linear:
        """A linear layer. `name`: of the attribute that holds it. `result`: the output's dtype; None: the input's. `sums_over`: the
        axis of its inputs, over which devices add up their products if they share it."""
        weight = storage_of(self.config, *self.path, name)(self.matrix(inputs, outputs))
        zeros = nnx.initializers.zeros(self.rngs.params(), (outputs,), self.dtype) if bias else None
        return Linear(weight, zeros, self.kernels, result, sums_over)

    def output_projection(self, hidden_size: int, vocab_size: int) -> Linear:
        """A linear layer with float32 output, the logits. In bfloat16, those above 16 would be rounded to steps of 0.125, which
        makes different logits equal.
        """
        return self.linear("lm_head", hidden_size, vocab_size, result=jnp.float32)

    def embedding(self, vocab_size: int, size: int) -> Weight:
        """An embedding, transposed: its columns are the tokens', which `lookup` returns. It has one array."""
        return table_storage_of(self.config, *self.path, "embed_tokens")(self.matrix(vocab_size, size).T)

    def matrix(self, rows: int, columns: int) -> Float[Array, "rows columns"]:
        """Small random numbers."""
        return nnx.initializers.normal(0.02)(self.rngs.params(), (rows, columns), self.dtype)
