"""Matrix products whose sum is finished by the kernel that reads them.

Few rows times a narrow matrix give too few tiles for a GPU, so the sum over k has to be split, and the parts be added. XLA does
that in a launch of its own. Here the parts are an array, and the next kernel (a norm, the rotation) adds them while it reads.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.skinny_matmul import SwiGlu, skinny_matmul
from pallas_kernels.skinny_matmul.tiling import ROWS as SKINNY_ROWS

PROGRAMS = 132
"""Thread blocks that fill a GPU: one per multiprocessor of an H100. An A100 has 108."""
TILE = (128, 128)
"""Rows and columns of one thread block, roughly."""
MAX_SPLITS = 16
MIN_STRETCH = 256
"""A part sums up at least this many products."""


@partial(jax.tree_util.register_dataclass, data_fields=("x", "weight", "bias"), meta_fields=("matmul",))
@dataclass(frozen=True)
class Product:
    """x @ weight + bias, not computed yet."""

    x: Float[Array, "*rows k"]
    weight: Float[Array, "k n"]
    bias: Float[Array, " n"] | None = None
    matmul: str = "xla"
    """"skinny": by `skinny_matmul`, if there are at most 16 rows."""

    @property
    def dtype(self) -> jnp.dtype:
        return self.x.dtype

    @property
    def is_skinny(self) -> bool:
        return self.matmul == "skinny" and math.prod(self.x.shape[:-1]) <= SKINNY_ROWS

    def value(self, dtype: DTypeLike | None = None) -> Float[Array, "*rows n"]:
        """The product in this dtype, by default x's."""
        product = self._skinny(None, dtype) if self.is_skinny else jnp.dot(self.x, self.weight, preferred_element_type=dtype)
        return product if self.bias is None else product + self.bias

    def swiglu(self) -> Float[Array, "*rows half"]:
        """silu(gate) * up of the product's two halves."""
        if self.is_skinny and self.bias is None:
            return self._skinny(SwiGlu(), None)
        gate, up = jnp.split(self.value(), 2, -1)
        return jax.nn.silu(gate) * up

    def _skinny(self, epilogue: SwiGlu | None, dtype: DTypeLike | None) -> Float[Array, "*rows _"]:
        rows = self.x.reshape(-1, self.x.shape[-1])
        product: Any = skinny_matmul(rows, self.weight, epilogue, dtype=dtype)
        return product.reshape(*self.x.shape[:-1], -1)


def partial_sums(product: Product) -> Float[Array, "splits rows n"]:
    """Parts that add up to x @ weight, without the bias: float32, or x's dtype if XLA computes it as one part.

    With several parts, a single row is doubled: XLA would multiply one row without tensor cores, after transposing the weight.
    """
    k, n = product.weight.shape
    x = product.x.reshape(-1, k)
    if product.is_skinny:
        whole: Any = skinny_matmul(x, product.weight, dtype=jnp.float32)
        return whole[None]
    splits = choose_splits(x.shape[0], k, n)
    if splits == 1:
        return (x @ product.weight)[None]
    if x.shape[0] == 1:
        x = jnp.broadcast_to(x, (2, k))
    stretches = x.reshape(-1, splits, k // splits), product.weight.reshape(splits, k // splits, n)
    return jax.lax.dot_general(*stretches, (((2,), (1,)), ((1,), (0,))), preferred_element_type=jnp.float32)


def choose_splits(rows: int, k: int, n: int) -> int:
    """The smallest power of two that gives every multiprocessor a tile, if k can be cut so. The same for all rows up to 128.

    In: 4, 14336, 4096  Out: 8        In: 4, 4096, 28672  Out: 1
    """
    tiles = math.ceil(rows / TILE[0]) * math.ceil(n / TILE[1])
    splits = min(MAX_SPLITS, pl.next_power_of_2(math.ceil(PROGRAMS / tiles)))
    while splits > 1 and (k % splits or k // splits < MIN_STRETCH):
        splits //= 2
    return splits


def load_sum(parts_ref: Any, bias_ref: Any | None, row: Any, columns: Any, inside: Any) -> Float[Array, " columns"]:
    """In a Triton kernel: these columns of one row of the product, in float32, from `partial_sums` and the bias."""
    parts = [
        pltriton.load(parts_ref.at[part, row, columns], mask=inside, other=0).astype(jnp.float32)
        for part in range(parts_ref.shape[0])
    ]
    if bias_ref is not None:
        parts.append(pltriton.load(bias_ref.at[columns], mask=inside, other=0).astype(jnp.float32))
    return sum(parts[1:], start=parts[0])
