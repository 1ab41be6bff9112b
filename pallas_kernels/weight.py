"""Weights: how a matrix is stored, and products with it.

A `Weight` is a pytree of arrays. Another way to store matrices is a subclass; layers and kernels need no change.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.skinny_matmul import SwiGlu, skinny_matmul
from pallas_kernels.skinny_matmul.tiling import ROWS as SKINNY_ROWS

PROGRAMS = 132
"""Thread blocks that fill a GPU: one per multiprocessor of an H100. An A100 has 108."""
TILE = (128, 128)
"""Rows and columns of one thread block, roughly."""
MAX_SPLITS = 16
MIN_STRETCH = 256
"""A part sums up at least this many products."""


class Grain(NamedTuple):
    """Numbers of a matrix [k, n] that must stay together if it is cut, because they share a scale."""

    inputs: int
    """Along k."""
    outputs: int
    """Along n."""


ANYWHERE = Grain(1, 1)
"""The grain of matrices that can be cut anywhere."""


class Weight(ABC):
    """A matrix [k, n]. Subclasses are frozen dataclasses, registered with `jax.tree_util.register_dataclass`.

    Methods compute in x's dtype, whatever the storage. `matmul` is one of config.MATMULS; a weight without that kernel ignores it.
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """k and n."""

    @abstractmethod
    def dot(self, x: Float[Array, "*rows k"], dtype: DTypeLike | None = None, matmul: str = "auto") -> Float[Array, "*rows n"]:
        """x @ matrix in this dtype, by default x's."""

    @abstractmethod
    def columns(self, ids: Int[Array, " ids"]) -> "Weight":
        """The matrix's columns with these numbers."""

    def lookup(self, ids: Int[Array, "*ids"], dtype: DTypeLike) -> Float[Array, "*ids k"]:
        """The matrix's columns with these numbers, in this dtype."""
        return self.columns(ids.reshape(-1)).dense(dtype).T.reshape(*ids.shape, -1)

    def swiglu(self, x: Float[Array, "*rows k"], matmul: str = "auto") -> Float[Array, "*rows half"]:
        """`gated` of the product."""
        return gated(self.dot(x, matmul=matmul))

    def parts(self, x: Float[Array, "rows k"], matmul: str = "auto") -> Float[Array, "splits rows2 n"]:
        """Parts that add up to x @ matrix: float32, or x's dtype if there is one. Of several, a single row may come twice."""
        return self.dot(x, matmul=matmul)[None]

    def dense(self, dtype: DTypeLike) -> Float[Array, "k n"]:
        """The matrix itself."""
        return self.dot(jnp.eye(self.shape[0], dtype=dtype))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dense(Weight):
    """A matrix as it is, in the dtype of the activations."""

    kernel: Float[Array, "k n"]

    @property
    def shape(self) -> tuple[int, int]:
        k, n = self.kernel.shape
        return k, n

    def dot(self, x: Float[Array, "*rows k"], dtype: DTypeLike | None = None, matmul: str = "auto") -> Float[Array, "*rows n"]:
        if is_skinny(x, matmul):
            return self._skinny(x, None, dtype)
        return jnp.dot(x, self.kernel, preferred_element_type=dtype)

    def columns(self, ids: Int[Array, " ids"]) -> "Dense":
        return Dense(self.kernel[:, ids])

    def swiglu(self, x: Float[Array, "*rows k"], matmul: str = "auto") -> Float[Array, "*rows half"]:
        return self._skinny(x, SwiGlu(), None) if is_skinny(x, matmul) else super().swiglu(x)

    def parts(self, x: Float[Array, "rows k"], matmul: str = "auto") -> Float[Array, "splits rows2 n"]:
        """With several parts, a single row is doubled: XLA would multiply one row without tensor cores, after transposing the
        kernel."""
        if is_skinny(x, matmul):
            return self._skinny(x, None, jnp.float32)[None]
        (rows, k), n = x.shape, self.shape[1]
        splits = choose_splits(rows, k, n)
        if splits == 1:
            return (x @ self.kernel)[None]
        if rows == 1:
            x = jnp.broadcast_to(x, (2, k))
        stretches = x.reshape(-1, splits, k // splits), self.kernel.reshape(splits, k // splits, n)
        return jax.lax.dot_general(*stretches, (((2,), (1,)), ((1,), (0,))), preferred_element_type=jnp.float32)

    def dense(self, dtype: DTypeLike) -> Float[Array, "k n"]:
        return self.kernel.astype(dtype)

    def _skinny(self, x: Float[Array, "*rows k"], epilogue: SwiGlu | None, dtype: DTypeLike | None) -> Float[Array, "*rows _"]:
        product: Any = skinny_matmul(x.reshape(-1, x.shape[-1]), self.kernel, epilogue, dtype=dtype)
        return product.reshape(*x.shape[:-1], -1)


def is_skinny(x: Float[Array, "*rows k"], matmul: str) -> bool:
    """Whether `skinny_matmul` computes the product: it is asked for, and there are at most 16 rows."""
    return matmul == "skinny" and math.prod(x.shape[:-1]) <= SKINNY_ROWS


def gated(x: Float[Array, "*rows n"]) -> Float[Array, "*rows half"]:
    """silu(gate) * up of x's two halves."""
    gate, up = jnp.split(x, 2, -1)
    return jax.nn.silu(gate) * up


def choose_splits(rows: int, k: int, n: int) -> int:
    """The smallest power of two that gives every multiprocessor a tile, if k can be cut so. The same for all rows up to 128.

    In: 4, 14336, 4096  Out: 8        In: 4, 4096, 28672  Out: 1
    """
    tiles = math.ceil(rows / TILE[0]) * math.ceil(n / TILE[1])
    splits = min(MAX_SPLITS, pl.next_power_of_2(math.ceil(PROGRAMS / tiles)))
    while splits > 1 and (k % splits or k // splits < MIN_STRETCH):
        splits //= 2
    return splits
