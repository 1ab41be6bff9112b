"""Weights of 8 and 4 bits: how matrices are quantised, and who computes their products.

On GPUs `skinny_matmul` unpacks them while it multiplies, so that a forward reads a half or a quarter of the bytes. On CPUs
`row_matmul` does: rows of 8 bits as they are, all others in its blocks of 32.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped, UInt8

from pallas_kernels.dispatch import by_platform, lowered_for
from pallas_kernels.row_matmul import row_matmul, what_is_missing
from pallas_kernels.rows import Blocks, Rows
from pallas_kernels.skinny_matmul import SwiGlu, skinny_matmul
from pallas_kernels.skinny_matmul.packed import BLOCK, Bytes, Nibbles, Packed
from pallas_kernels.skinny_matmul.tiling import MANY_ROWS
from pallas_kernels.skinny_matmul.tiling import ROWS as SKINNY_ROWS
from pallas_kernels.weight import ANYWHERE, Grain, Weight, gated

GROUPS = (128, 64, 32)
"""Numbers of 4 bits that share a scale, the first that divides a row."""
CPU_BLOCK = 32
"""Numbers in a block of row_matmul's formats fp8_32 and int4_32."""


class Numbers(NamedTuple):
    """A quantised matrix before it is packed: what all published layouts have in common. Arrays of JAX's or NumPy's."""

    values: Any
    """[n, k] int8, float8_e4m3fn, or uint8 from 0 to 15."""
    scales: Any
    """float32 [n]; [n / 128, k / 128] for blocks; [n, groups] for 4 bits."""
    zeros: Any = None
    """Zero points of 4 bits, uint8 [n, groups]. None: all are 8."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized(Weight):
    """A matrix of 8 or 4 bits."""

    packed: Packed

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape

    def dot(self, x: Float[Array, "*rows k"], dtype: DTypeLike | None = None, matmul: str = "auto") -> Float[Array, "*rows n"]:
        rows = x.reshape(-1, x.shape[-1])
        return _product(rows, self.packed, dtype or x.dtype, matmul).reshape(*x.shape[:-1], -1)

    def swiglu(self, x: Float[Array, "*rows k"], matmul: str = "auto") -> Float[Array, "*rows half"]:
        if matmul == "xla" or math.prod(x.shape[:-1]) > SKINNY_ROWS:
            return gated(self.dot(x, matmul=matmul))
        rows, static = x.reshape(-1, x.shape[-1]), (("dtype", x.dtype), ("matmul", matmul))
        return by_platform(_gated_on_gpus, _gated, _gated, static)(rows, self.packed).reshape(*x.shape[:-1], -1)

    def parts(self, x: Float[Array, "rows k"], matmul: str = "auto") -> Float[Array, "splits rows2 n"]:
        """Several where the program is known to be a GPU's: on another platform the same product is one part."""
        if lowered_for.value != "cuda" or matmul == "xla" or x.shape[0] > SKINNY_ROWS:
            return self.dot(x, jnp.float32, matmul)[None]
        product: Any = skinny_matmul(x, self.packed, dtype=jnp.float32, parts=True)
        return product

    def columns(self, ids: Int[Array, " ids"]) -> Weight:
        if isinstance(self.packed, Bytes) and not self.packed.is_by_row:
            return Rows(self.packed.dense(jnp.float32)[ids])
        return Quantized(jax.tree.map(lambda array: array[ids], self.packed))

    def dense(self, dtype: DTypeLike) -> Float[Array, "k n"]:
        return self.packed.dense(dtype).T


@dataclass(frozen=True)
class QuantizedAs:
    """Stores matrices in 8 or 4 bits. Calling it rounds each number to the nearest, with the smallest scale that covers all."""

    kind: str
    """int8, fp8 (e4m3) or int4."""
    group: int | None = None
    """Numbers of a row that share a scale. None: all. FP8's groups are blocks of 128 x 128."""
    has_zeros: bool = False
    """4 bits: a group has a zero point too."""
    for_cpu: bool = False
    """As `row_matmul` reads it."""

    @classmethod
    def default(cls, kind: str, k: int, *, for_cpu: bool) -> "QuantizedAs":
        """A scale per row in 8 bits, a scale and zero point per group in 4. Rows that have no whole groups take 8 bits."""
        group = next((size for size in GROUPS if k % size == 0), None)
        if kind != "int4" or group is None:
            return cls("int8" if kind == "int4" else kind, for_cpu=for_cpu)
        return cls(kind, group, has_zeros=True, for_cpu=for_cpu)

    @property
    def grain(self) -> Grain:
        """Numbers with one scale."""
        if self.group is None:
            return ANYWHERE
        if self.for_cpu:
            return Grain(CPU_BLOCK, 1)
        return Grain(self.group, 1) if self.kind == "int4" else Grain(BLOCK, BLOCK)

    def __call__(self, matrix: Any) -> Weight:
        """The weight for a matrix [k, n] of JAX's or NumPy's."""
        return self.of(_quantised(jnp.asarray(matrix).T, self))

    def of(self, numbers: Numbers) -> Weight:
        """The weight made of these numbers, whose scales must be grouped as the fields say."""
        return _packed(jax.tree.map(jnp.asarray, numbers), self)


def numbers_of(packed: Packed) -> Numbers:
    """The numbers that `QuantizedAs.of` has packed for a GPU."""
    if isinstance(packed, Bytes):
        return Numbers(packed.rows, packed.scales)
    groups = packed.halves.reshape(*packed.scales.shape, -1)
    values = jnp.concatenate([groups & 15, groups >> 4], -1)
    return Numbers(values.reshape(len(values), -1), packed.scales, packed.zeros)


@dataclass(frozen=True)
class InBlocks:
    """Stores matrices in GGUF's Q8_0: 8 bits with a scale per 32 numbers, in one array."""

    grain: ClassVar[Grain] = Grain(CPU_BLOCK, 1)

    def __call__(self, matrix: Any) -> Blocks:
        """The weight for a matrix [k, n] of JAX's or NumPy's."""
        return _q8_0(jnp.asarray(matrix).T)


@jax.jit
def _q8_0(rows: Float[Array, "n k"]) -> Blocks:
    blocks = rows.astype(jnp.float32).reshape(rows.shape[0], -1, CPU_BLOCK)
    scales = _not_zero((jnp.max(jnp.abs(blocks), -1, keepdims=True) / 127).astype(jnp.float16))
    values = jnp.clip(jnp.round(blocks / scales.astype(jnp.float32)), -127, 127).astype(jnp.int8)
    return _blocks("q8_0", scales, values)


@partial(jax.jit, static_argnums=1)
def _quantised(rows: Float[Array, "n k"], how: QuantizedAs) -> Numbers:
    n, k = rows.shape
    rows = rows.astype(jnp.float32)
    if how.kind != "int4":
        largest, dtype = (127.0, jnp.int8) if how.kind == "int8" else (448.0, jnp.float8_e4m3fn)
        blocks = rows.reshape(n, 1, 1, k) if how.group is None else rows.reshape(n // BLOCK, BLOCK, k // BLOCK, BLOCK)
        scales = _not_zero(jnp.max(jnp.abs(blocks), (1, 3), keepdims=True) / largest)
        values = (jnp.round(blocks / scales) if how.kind == "int8" else blocks / scales).astype(dtype)
        return Numbers(values.reshape(n, k), scales.reshape(-1) if how.group is None else scales[:, 0, :, 0])
    assert how.group is not None
    groups = rows.reshape(n, k // how.group, how.group)
    least, most = jnp.minimum(groups.min(-1), 0), jnp.maximum(groups.max(-1), 0)
    spread = (most - least) / 15 if how.has_zeros else jnp.maximum(most, -least) / 7
    scales = _not_zero(spread.astype(jnp.float16).astype(jnp.float32))  # a CPU's blocks have 16 bits for them
    zeros = jnp.clip(jnp.round(-least / scales), 0, 15) if how.has_zeros else jnp.full_like(scales, 8)
    values = jnp.clip(jnp.round(groups / scales[..., None]) + zeros[..., None], 0, 15).astype(jnp.uint8)
    return Numbers(values.reshape(n, k), scales, zeros.astype(jnp.uint8) if how.has_zeros else None)


def _not_zero(scales: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.where(scales == 0, 1, scales)


@partial(jax.jit, static_argnums=1)
def _packed(numbers: Numbers, how: QuantizedAs) -> Weight:
    n = len(numbers.values)
    if how.kind != "int4":
        if how.group is None or not how.for_cpu:
            return Quantized(Bytes(numbers.values, numbers.scales))
        scales = jnp.repeat(jnp.repeat(numbers.scales, BLOCK, 0), BLOCK // CPU_BLOCK, 1)
        return _blocks("fp8_32", scales[..., None], numbers.values.reshape(n, -1, CPU_BLOCK))
    assert how.group is not None
    if not how.for_cpu:
        return Quantized(Nibbles(_halves(numbers.values.reshape(n, -1, how.group)).reshape(n, -1), numbers.scales, numbers.zeros))
    zeros = jnp.full(numbers.scales.shape, 8) if numbers.zeros is None else numbers.zeros
    both = jnp.stack([numbers.scales, zeros], -1).astype(jnp.float16)
    both = jnp.repeat(both, how.group // CPU_BLOCK, 1)
    return _blocks("int4_32", both, _halves(numbers.values.reshape(n, -1, CPU_BLOCK)))


def _halves(groups: UInt8[Array, "n groups size"]) -> UInt8[Array, "n groups half"]:
    """Numbers of the first half of each group in the low halves of bytes, those of the second in the high ones."""
    first, second = jnp.split(groups, 2, -1)
    return first | second << 4


def _blocks(format: str, scales: Shaped[Array, "n blocks few"], values: Shaped[Array, "n blocks size"]) -> Blocks:
    """Blocks that begin with the bytes of their scales."""
    front = jax.lax.bitcast_convert_type(scales, jnp.uint8).reshape(*scales.shape[:2], -1)
    blocks = jnp.concatenate([front, jax.lax.bitcast_convert_type(values, jnp.uint8)], -1)
    return Blocks(blocks.reshape(blocks.shape[0], -1), format)


def _product(x: Array, packed: Packed, dtype: DTypeLike, matmul: str) -> Float[Array, "rows n"]:
    static = (("dtype", jnp.dtype(dtype)),)
    if matmul == "xla" or _is_left_to_xla(x, packed):
        on_gpu: Any = _by_xla
    else:
        on_gpu = _by_kernel
    is_for_rows = matmul == "auto" and isinstance(packed, Bytes) and packed.is_by_row and what_is_missing() is None
    return by_platform(on_gpu, _by_rows if is_for_rows else _by_xla, _by_xla, static)(x, packed)


def _is_left_to_xla(x: Array, packed: Packed) -> bool:
    """For prefill with int8 and a scale per row: XLA converts these while it multiplies, but would unpack others into memory."""
    return x.shape[0] > MANY_ROWS and isinstance(packed, Bytes) and packed.is_by_row and packed.rows.dtype == jnp.int8


def _by_xla(x: Array, packed: Packed, *, dtype: DTypeLike) -> Array:
    return packed.product(x).astype(dtype)


def _by_kernel(x: Array, packed: Packed, *, dtype: DTypeLike) -> Array:
    product: Any = skinny_matmul(x, packed, dtype=dtype)
    return product


def _by_rows(x: Array, packed: Bytes, *, dtype: DTypeLike) -> Array:
    return row_matmul(x.astype(jnp.float32), packed.rows, packed.scales).astype(dtype)


def _gated_on_gpus(x: Array, packed: Packed, *, dtype: DTypeLike, matmul: str) -> Array:
    product: Any = skinny_matmul(x, packed, SwiGlu(), dtype=dtype)
    return product


def _gated(x: Array, packed: Packed, *, dtype: DTypeLike, matmul: str) -> Array:
    return gated(_product(x, packed, dtype, matmul))
