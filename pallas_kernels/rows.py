"""Weights stored row by row, as files have them: numbers, or blocks of a GGUF file. On CPUs `row_matmul` computes the products."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.dispatch import by_platform
from pallas_kernels.row_matmul import FORMATS, row_matmul, unpacked, what_is_missing
from pallas_kernels.weight import Grain, Weight


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows(Weight):
    """The transposed matrix. Its numbers may have fewer bits than activations: 16-bit weights give the same sums as in float32."""

    rows: Float[Array, "n k"]

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.rows.shape
        return k, n

    def dot(self, x: Float[Array, "*rows k"], dtype: DTypeLike | None = None, matmul: str = "auto") -> Float[Array, "*rows n"]:
        return product(x, self.rows, dtype, matmul)

    def columns(self, ids: Int[Array, " ids"]) -> "Rows":
        return Rows(self.rows[ids])

    def lookup(self, ids: Int[Array, "*ids"], dtype: DTypeLike) -> Float[Array, "*ids k"]:
        return self.rows[ids].astype(dtype)

    def dense(self, dtype: DTypeLike) -> Float[Array, "k n"]:
        return self.rows.T.astype(dtype)


@partial(jax.tree_util.register_dataclass, data_fields=("blocks",), meta_fields=("format",))
@dataclass(frozen=True)
class Blocks(Weight):
    """The transposed matrix as a GGUF file has it: a few weights share a scale. Products are those of its numbers in float32."""

    blocks: UInt8[Array, "n size"]
    format: str
    """A key of row_matmul.FORMATS."""

    @property
    def shape(self) -> tuple[int, int]:
        n, size = self.blocks.shape
        weights, block_size = FORMATS[self.format]
        return size // block_size * weights, n

    def dot(self, x: Float[Array, "*rows k"], dtype: DTypeLike | None = None, matmul: str = "auto") -> Float[Array, "*rows n"]:
        return product(x, self.blocks, dtype, matmul, self.format)

    def columns(self, ids: Int[Array, " ids"]) -> "Blocks":
        return Blocks(self.blocks[ids], self.format)

    def lookup(self, ids: Int[Array, "*ids"], dtype: DTypeLike) -> Float[Array, "*ids k"]:
        return unpacked(self.blocks[ids], self.format).astype(dtype)

    def dense(self, dtype: DTypeLike) -> Float[Array, "k n"]:
        return unpacked(self.blocks, self.format).T.astype(dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Beside(Weight):
    """Several matrices with equal k side by side, each in a storage of its own."""

    weights: tuple[Weight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return self.weights[0].shape[0], sum(weight.shape[1] for weight in self.weights)

    def dot(self, x: Float[Array, "*rows k"], dtype: DTypeLike | None = None, matmul: str = "auto") -> Float[Array, "*rows n"]:
        return jnp.concatenate([weight.dot(x, dtype, matmul) for weight in self.weights], -1)

    def columns(self, ids: Int[Array, " ids"]) -> Rows:
        return Rows(self.dense(jnp.float32).T[ids])

    def dense(self, dtype: DTypeLike) -> Float[Array, "k n"]:
        return jnp.concatenate([weight.dense(dtype) for weight in self.weights], -1)


@dataclass(frozen=True)
class ByRows:
    """Stores matrices as Rows in this dtype. None: in their own."""

    dtype: str | None = None

    def __call__(self, matrix: Float[Array, "k n"]) -> Rows:
        return Rows(matrix.T.astype(self.dtype or matrix.dtype))


@dataclass(frozen=True)
class AsInFile:
    """The storage of a matrix whose tensors stay as they are in a file. Its numbers are zeros until `of` puts the file's there."""

    tensors: tuple[tuple[int, str], ...]
    """Rows and kind of each: a dtype, or a format (a key of row_matmul.FORMATS). Consecutive ones of one kind count as one."""

    @property
    def names(self) -> list[str]:
        """What the weight calls its arrays; those of nested weights are named as in linear.parameters.

        In:  one kind, float32        Out: ["rows"]
        In:  float32, then q8_0       Out: ["weights_0_rows", "weights_1_blocks"]
        """
        own = ["blocks" if kind in FORMATS else "rows" for _, kind in self.tensors]
        return own if len(own) == 1 else [f"weights_{place}_{name}" for place, name in enumerate(own)]

    @property
    def grain(self) -> Grain:
        """Blocks stay whole."""
        return Grain(math.lcm(*(FORMATS[kind][0] for _, kind in self.tensors if kind in FORMATS)), 1)

    def __call__(self, matrix: Float[Array, "k n"]) -> Weight:
        return self.of([self._zeros(matrix.shape[0], *each) for each in self.tensors])

    def of(self, tensors: Sequence[Array]) -> Weight:
        """The weight made of these tensors, [rows, k] or [rows, bytes]."""
        kinds = [kind for _, kind in self.tensors]
        parts = [Blocks(rows, kind) if kind in FORMATS else Rows(rows) for rows, kind in zip(tensors, kinds, strict=True)]
        return parts[0] if len(parts) == 1 else Beside(tuple(parts))

    @staticmethod
    def _zeros(k: int, rows: int, kind: str) -> Array:
        if kind not in FORMATS:
            return jnp.zeros((rows, k), kind)
        weights, size = FORMATS[kind]
        return jnp.zeros((rows, k // weights * size), jnp.uint8)


def product(
    x: Float[Array, "*rows k"], weights: Array, dtype: DTypeLike | None, matmul: str, format: str | None = None
) -> Float[Array, "*rows n"]:
    """x @ W^T in this dtype, by default x's. W [n, k], or its rows in blocks of this format. `matmul` "auto": by `row_matmul` in
    programs for CPUs, if it is there."""
    if matmul != "auto" or what_is_missing() is not None:
        return _by_xla(x, weights, dtype=dtype, format=format)
    return by_platform(_by_xla, _by_rows, _by_xla, (("dtype", dtype), ("format", format)))(x, weights)


def _by_xla(x: Array, weights: Array, *, dtype: DTypeLike | None, format: str | None) -> Array:
    numbers = weights if format is None else unpacked(weights, format)
    return jnp.einsum("...k,nk->...n", x, numbers.astype(x.dtype), preferred_element_type=dtype)


def _by_rows(x: Array, weights: Array, *, dtype: DTypeLike | None, format: str | None) -> Array:
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    return row_matmul(rows, weights, format=format).astype(dtype or x.dtype).reshape(*x.shape[:-1], -1)
