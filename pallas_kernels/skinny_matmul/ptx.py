"""Numbers of 8 and 4 bits as numbers of 16 bits, inside a Triton kernel: four bytes at a time, in PTX.

Triton converts one number at a time, and whole numbers with an instruction that a GPU runs at a quarter of its speed: on an H200
a product with 8-bit weights then took as long as one with 16-bit weights (jax 0.11.2, 26 November 2026). Here two numbers share a
register, as the tensor cores read them, and take four or five instructions together. Each function's second branch defines what
the first computes; interpreters and float32 run it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8, UInt8

from pallas_kernels.fp8 import decode

FMA = {"bfloat16": "fma.rn.bf16x2", "float16": "fma.rn.f16x2"}
ONE = {"bfloat16": 0x3F80, "float16": 0x3C00}
MAGIC = {"bfloat16": (0x4300, 128), "float16": (0x6400, 1024)}
"""Bits and value of a number whose lowest bit is worth 1, so that its low bits can hold a small whole number."""
LOW, HIGH = (0x4140, 0x4342), (0x1404, 0x3424)
"""prmt's selectors: the first two and the last two of four bytes, as the low or high bytes of halves that are 0 otherwise."""
AND_OR, XOR_OR = 0xEA, 0xBE
"""lop3's tables for (a & b) | c and (a ^ b) | c."""


def from_int8(packed: Int8[Array, "k n"], dtype: DTypeLike, *, inline: bool) -> Float[Array, "k n"]:
    """The same whole numbers."""
    name = jnp.dtype(dtype).name
    if not inline or name not in FMA:
        return packed.astype(dtype)
    if name == "bfloat16":  # 7 bits fit into its last bits: 128 + them, less 128, or 256 if the number is negative
        body = [
            f"lop3.b32 m, t, {_twice(0x7F)}, {_twice(0x4300)}, {AND_OR};",
            f"lop3.b32 s, t, {_twice(0x80)}, {_twice(0xC300)}, {AND_OR};",
        ]
    else:  # 1024 + 128 + the number, less 1152
        body = [f"lop3.b32 m, t, {_twice(0x80)}, {_twice(0x6400)}, {XOR_OR};", f"mov.b32 s, {_twice(0xE480)};"]
    return _inline(LOW, [*body, f"mov.b32 f, {_twice(ONE[name])};", f"{FMA[name]} OUT, m, f, s;"], packed, None, dtype)


def from_fp8(packed: UInt8[Array, "k n"], dtype: DTypeLike, *, inline: bool) -> Float[Array, "k n"]:
    """The e4m3 numbers with these bits."""
    name = jnp.dtype(dtype).name
    if not inline or name not in FMA:
        return decode(packed, dtype)
    shift, factor = {"bfloat16": (4, 0x7B80), "float16": (1, 0x5C00)}[name]  # 2**120 and 2**8: the exponents' offsets differ so
    body = [
        f"and.b32 m, t, {_twice(0x7F00)};",
        f"shr.u32 m, m, {shift};",
        f"lop3.b32 m, t, {_twice(0x8000)}, m, {AND_OR};",
        f"mov.b32 f, {_twice(factor)};",
        f"mov.b32 s, {_twice(0x8000)};",  # -0
        f"{FMA[name]} OUT, m, f, s;",
    ]
    return _inline(HIGH, body, packed, None, dtype)


def from_halves(
    packed: UInt8[Array, "half n"], zeros: Float[Array, " n"], dtype: DTypeLike, *, inline: bool
) -> tuple[Float[Array, "half n"], Float[Array, "half n"]]:
    """The numbers in the bytes' low and in their high halves, less their column's zero point."""
    name = jnp.dtype(dtype).name
    if not inline or name not in FMA:
        low, high = ((half.astype(jnp.float32) - zeros[None]).astype(dtype) for half in (packed & 15, packed >> 4))
        return low, high
    bits, value = MAGIC[name]
    offset = jnp.broadcast_to((-value - zeros).astype(dtype)[None], packed.shape)

    def half(shift: list[str]) -> Any:
        body = [f"lop3.b32 m, t, {_twice(15)}, {_twice(bits)}, {AND_OR};", f"mov.b32 f, {_twice(ONE[name])};"]
        return _inline(LOW, [*shift, *body, f"{FMA[name]} OUT, m, f, OFFSET;"], packed, offset, dtype)

    return half([]), half(["shr.u32 t, t, 4;"])


def program(selectors: tuple[int, int], body: list[str]) -> str:
    """PTX for four bytes in $2: `body` makes two numbers OUT of the two bytes in t, with the registers m, s and f."""
    pairs = [
        f"prmt.b32 t, $2, 0, {selector};\n" + "\n".join(body).replace("OUT", f"${number}").replace("OFFSET", f"${3 + number}")
        for number, selector in enumerate(selectors)
    ]
    return "{\n.reg .b32 t, m, s, f;\n" + "\n".join(pairs) + "\n}"


def _inline(selectors: tuple[int, int], body: list[str], packed: Any, offset: Any, dtype: DTypeLike) -> Any:
    arguments = [packed] if offset is None else [packed, offset]
    (result,) = pltriton.elementwise_inline_asm(
        program(selectors, body),
        args=arguments,
        constraints="=r,=r,r" if offset is None else "=r,=r,r,r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(packed.shape, dtype)],
    )
    return result


def _twice(half: int) -> str:
    """The same 16 bits in both halves of a register."""
    return hex(half << 16 | half)
