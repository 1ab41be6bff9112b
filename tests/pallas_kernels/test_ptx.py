"""Conversions in PTX: run by a small emulator, they give the numbers that their definitions give."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.skinny_matmul import ptx

BYTES = np.arange(256, dtype=np.uint8)
DTYPES = ("bfloat16", "float16")


def run(text: str, packed: np.ndarray, offset: np.ndarray | None, dtype: str) -> np.ndarray:
    """The results of a program for four bytes at a time, as Triton packs them into registers."""
    made = []
    for start in range(0, len(packed), 4):
        registers = {"$2": int(packed[start : start + 4].view(np.uint32)[0])}
        if offset is not None:
            registers |= {f"${3 + n}": int(offset[start + 2 * n : start + 2 * n + 2].view(np.uint32)[0]) for n in (0, 1)}
        for operation, operands in re.findall(r"^([a-z]\w+\.[\w.]+) (.*);$", text, re.MULTILINE):
            to, *names = operands.split(", ")
            values = [registers[name] if name in registers else int(name, 0) for name in names]
            registers[to] = compute(operation, values, dtype)
        made += [registers["$0"], registers["$1"]]
    return np.array(made, np.uint32).view(jnp.dtype(dtype))


def compute(operation: str, values: list[int], dtype: str) -> int:
    match operation.split(".")[0]:
        case "mov":
            return values[0]
        case "shr":
            return values[0] >> values[1]
        case "and":
            return values[0] & values[1]
        case "prmt":
            source = values[0].to_bytes(4, "little") + values[1].to_bytes(4, "little")
            return int.from_bytes(bytes(source[values[2] >> 4 * place & 7] for place in range(4)), "little")
        case "lop3":
            *inputs, table = values
            bits = (sum((each >> bit & 1) << place for each, place in zip(inputs, (2, 1, 0), strict=True)) for bit in range(32))
            return sum((table >> index & 1) << bit for bit, index in enumerate(bits))
        case "fma":
            a, b, c = (np.array([each], np.uint32).view(jnp.dtype(dtype)).astype(np.float64) for each in values)
            exact = a * b + c
            assert (exact.astype(jnp.dtype(dtype)).astype(np.float64) == exact).all(), "nothing may be rounded"
            return int(exact.astype(jnp.dtype(dtype)).view(np.uint32)[0])
    raise AssertionError(operation)


@pytest.fixture
def inline(monkeypatch):
    """Runs what a kernel would contain."""

    def emulated(text: str, *, args, constraints, pack, result_shape_dtypes):
        packed, *offset = (np.asarray(each) for each in args)
        assert pack == 4 and constraints == ",".join(["=r"] * 2 + ["r"] * (1 + 2 * len(offset)))
        dtype = jnp.dtype(result_shape_dtypes[0].dtype).name
        flat = run(text, packed.ravel().view(np.uint8), offset[0].ravel() if offset else None, dtype)
        return [jnp.asarray(flat.reshape(packed.shape))]

    monkeypatch.setattr(ptx.pltriton, "elementwise_inline_asm", emulated)


def same(got: jax.Array, expected: jax.Array) -> None:
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(got, np.float64), np.asarray(expected, np.float64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_bytes(inline, dtype):
    """Every whole number, and every e4m3 number but those that are none."""
    numbers = np.where((BYTES & 127) < 127, BYTES, 0).astype(np.uint8)
    for convert, packed in ((ptx.from_int8, BYTES.view(np.int8)), (ptx.from_fp8, numbers)):
        column = jnp.asarray(packed)[:, None]
        same(convert(column, jnp.dtype(dtype), inline=True), convert(column, jnp.dtype(dtype), inline=False))


@pytest.mark.variants
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_halves_with_all_zero_points(inline, dtype):
    packed = jnp.asarray(np.repeat(BYTES[:, None], 256, 1))
    zeros = jnp.arange(256, dtype=jnp.float32) % 16
    for got, expected in zip(
        ptx.from_halves(packed, zeros, jnp.dtype(dtype), inline=True),
        ptx.from_halves(packed, zeros, jnp.dtype(dtype), inline=False),
        strict=True,
    ):
        same(got, expected)
