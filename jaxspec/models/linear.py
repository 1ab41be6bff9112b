"""Linear layers over weights of any storage, and what all layers of a model are built with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.model_config import ModelConfig
from jaxspec.models.sharing import AXES, GATHERED, MESH_AXIS, Shares
from jaxspec.typing import Array, Bool, Float, Int
from pallas_kernels.dispatch import choose
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
    devices: int = 1
    """Devices that share the model (sharing.py)."""


DEFAULT_KERNELS = Kernels()


class Linear(nnx.Module):
    """x @ weight + bias. The weight's arrays are parameters of the layer: `kernel` alone, [inputs, outputs], if it is dense."""

    def __init__(
        self,
        weight: Weight,
        bias: Float[Array, " n"] | None,
        kernels: Kernels,
        result: DTypeLike | None,
        *,
        sums: bool = False,
        gathered: int | None = None,
    ):
        """`result`: the output's dtype; None: the input's. `sums`: devices divide its inputs and add up their products. `gathered`:
        the number of its outputs, if devices divide them and a call puts them together."""
        self.names = tuple(parameters(weight))
        for name, array in parameters(weight).items():
            setattr(self, name, nnx.Param(array))
        self.bias = None if bias is None else nnx.Param(bias)
        self.structure = jax.tree.structure(weight)
        self.matmul, self.result = kernels.matmul, result
        self.axis, self.gathered = MESH_AXIS if sums else None, gathered

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
        out = self.product(x).value(self.result)
        return out if self.gathered is None else put_together(out, self.gathered)


def put_together(part: Float[Array, "*rows part"], size: int) -> Float[Array, "*rows size"]:
    """The columns of all devices, without what pads the last ones."""
    return jax.lax.all_gather(part, MESH_AXIS, axis=part.ndim - 1, tiled=True)[..., :size]


NO_TOKEN = -1
"""Stands where there is no token. Results there mean nothing, and CPUs skip most of the work: see `only_rows`."""


def only_rows(x: Array, exist: Bool[Array, "*rows"]) -> Array:
    """x [*rows, n], in programs for CPUs with zeros in the rows that don't exist. There products skip rows of zeros (row_matmul),
    and attention rows that see nothing, not even themselves. On GPUs that would save nothing."""
    return choose(
        x, exist, on_gpu=lambda x, _: x, elsewhere=lambda x, exist: jnp.where(exist[..., None], x, jnp.zeros((), x.dtype))
    )


def look_up(embedding: Weight, tokens: Int[Array, "*tokens"], dtype: DTypeLike, kernels: Kernels) -> Float[Array, "*tokens h"]:
    """The tokens' columns of an embedding [h, v]; zeros for NO_TOKEN. If devices divide it, each looks up the tokens
    that it holds, and the results are added up."""
    if kernels.devices == 1:
        return only_rows(embedding.lookup(jnp.maximum(tokens, 0), dtype), tokens >= 0)
    own = tokens - jax.lax.axis_index(MESH_AXIS) * embedding.shape[1]
    is_here = (own >= 0) & (own < embedding.shape[1])
    found = embedding.lookup(jnp.where(is_here, own, 0), dtype)
    return jax.lax.psum(jnp.where(is_here[..., None], found, 0), MESH_AXIS)


class Builder(NamedTuple):
    """Builds the parts of one model, with random weights."""

    dtype: DTypeLike
    """The dtype of activations, norms, biases and embeddings, and of matrices before they are stored."""
    rngs: nnx.Rngs
    kernels: Kernels
    config: ModelConfig
    """It knows how matrices are stored."""
    path: tuple[str | int, ...] = ()
    """The path of the part that is being built."""

    @property
    def shares(self) -> Shares:
        """What each device has of the model."""
        return Shares(self.config, self.kernels.devices)

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
    ) -> Linear:
        """A linear layer. `name`: the attribute that holds it, its key in sharing.AXES. `result`: the output's dtype; None: the
        input's."""
        weight = storage_of(self.config, *self.path, name)(self.matrix(inputs, outputs))
        zeros = nnx.initializers.zeros(self.rngs.params(), (outputs,), self.dtype) if bias else None
        axis = AXES.get(name)
        if axis is None or not self.shares.divides(axis):
            return Linear(weight, zeros, self.kernels, result)
        gathered = outputs if axis.name in GATHERED else None
        return Linear(weight, zeros, self.kernels, result, sums=axis.is_input, gathered=gathered)

    def output_projection(self, hidden_size: int, vocab_size: int) -> Linear:
        """A linear layer with float32 output, the logits. In bfloat16, logits above 16 would be rounded to steps of 0.125,
        which makes different ones equal.
        """
        return self.linear("lm_head", hidden_size, vocab_size, result=jnp.float32)

    def embedding(self, vocab_size: int, size: int) -> Weight:
        """An embedding, transposed: `lookup` returns its columns, one per token. It is stored in one array."""
        return table_storage_of(self.config, *self.path, "embed_tokens")(self.matrix(vocab_size, size).T)

    def matrix(self, rows: int, columns: int) -> Float[Array, "rows columns"]:
        """Small random numbers."""
        return nnx.initializers.normal(0.02)(self.rngs.params(), (rows, columns), self.dtype)
