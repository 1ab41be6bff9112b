"""Weights of 8 and 4 bits: how matrices are rounded, and products by every kernel."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantized import InBlocks, Quantized, QuantizedAs
from pallas_kernels.row_matmul import what_is_missing
from pallas_kernels.rows import Blocks
from pallas_kernels.skinny_matmul import SwiGlu, skinny_matmul
from pallas_kernels.skinny_matmul.pallas_triton import pallas_triton_matmul
from pallas_kernels.weight import Dense
from tests.sets import exhaustive, variants

STORAGES = {
    "int8": QuantizedAs("int8"),
    "FP8": QuantizedAs("fp8"),
    "FP8 in blocks": QuantizedAs("fp8", 128),
    "int4": QuantizedAs("int4", 128, has_zeros=True),
    "int4 in small groups": QuantizedAs("int4", 32),
}
NAMES = ["int8", "FP8 in blocks", "int4", *(exhaustive(name, id=name) for name in ("FP8", "int4 in small groups"))]
K, N = 256, 384


def random(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


MATRIX = np.asarray(random(1, K, N)) * np.linspace(0.1, 3, N, dtype=np.float32)


@pytest.mark.parametrize("name", STORAGES)
def test_numbers_are_rounded_to_the_nearest(name):
    """Errors are at most half a step, and the scales are the least that reach all numbers."""
    how = STORAGES[name]
    found, rows = np.asarray(how(MATRIX).dense(jnp.float32)).T, MATRIX.T
    if how.kind == "fp8" and how.group:
        largest = np.kron(np.abs(rows).reshape(N // 128, 128, K // 128, 128).max((1, 3)), np.ones((128, 128)))
    else:
        groups = rows.reshape(N, -1, how.group or K)
        spread = groups.max(-1) - groups.min(-1) if how.has_zeros else np.abs(groups).max(-1)
        largest = np.repeat(spread, how.group or K, 1)
    steps = {"int8": largest / 127, "fp8": np.maximum(np.abs(rows) / 8, largest / 448 * 2**-9), "int4": largest / 7}[how.kind]
    if how.has_zeros:
        steps = largest / 15 * 1.999  # a zero point is rounded too
    assert np.all(np.abs(found - rows) <= 0.5005 * steps + 1e-7)
    assert np.abs(found - rows).max() > 0.3 * steps.min()


@pytest.mark.parametrize("for_cpu", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_weight_does_what_its_matrix_does(name, for_cpu):
    weight = replace(STORAGES[name], for_cpu=for_cpu)(MATRIX)
    same, x, ids = Dense(weight.dense(jnp.float32)), random(0, 2, 3, K), jnp.array([4, 0, 4])
    np.testing.assert_array_equal(same.kernel, STORAGES[name](MATRIX).dense(jnp.float32))
    assert weight.shape == (K, N) and isinstance(weight, Blocks if for_cpu and "int8" not in name and name != "FP8" else Quantized)
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-3)
    close(weight.dot(x), same.dot(x))
    close(weight.swiglu(x), same.swiglu(x))
    close(weight.parts(x[0]).sum(0), same.dot(x[0]))
    assert weight.dot(x.astype(jnp.bfloat16)).dtype == weight.dense(jnp.bfloat16).dtype == jnp.bfloat16
    assert weight.dot(x.astype(jnp.bfloat16), jnp.float32).dtype == jnp.float32
    np.testing.assert_array_equal(weight.columns(ids).dense(jnp.float32), same.kernel[:, ids])
    np.testing.assert_array_equal(weight.lookup(ids, jnp.float32), same.kernel[:, ids].T)


@pytest.mark.skipif(what_is_missing() is not None, reason=f"no kernels for CPUs here: {what_is_missing()}")
@pytest.mark.parametrize("name", STORAGES)
def test_a_row_has_the_same_bits_among_any_number_of_rows_on_cpus(name):
    weight, x = replace(STORAGES[name], for_cpu=True)(MATRIX), random(0, 20, K)
    whole = np.asarray(weight.dot(x))
    for rows in (1, 2, 5, 16):
        np.testing.assert_array_equal(weight.dot(x[:rows]), whole[:rows])


def test_rows_without_whole_groups_take_8_bits():
    assert QuantizedAs.default("int4", 4096, for_cpu=False).group == 128
    assert QuantizedAs.default("int4", 576, for_cpu=True) == QuantizedAs("int4", 64, has_zeros=True, for_cpu=True)
    assert QuantizedAs.default("int4", 48, for_cpu=False) == QuantizedAs.default("int8", 48, for_cpu=False) == QuantizedAs("int8")


def test_zeros_stay_zeros():
    for how in (*STORAGES.values(), InBlocks()):
        assert not np.any(how(np.zeros((K, N), np.float32)).dense(jnp.float32))
    np.testing.assert_allclose(InBlocks()(MATRIX).dense(jnp.float32), MATRIX, atol=0.51 * np.abs(MATRIX).max() / 127)


@pytest.mark.parametrize("rows", [5, variants(20)])
@pytest.mark.parametrize("dtype", ["bfloat16", exhaustive("float16"), exhaustive("float32")])
@pytest.mark.parametrize("name", STORAGES)
def test_the_gpu_kernel_equals_the_product_with_its_matrix(name, dtype, rows):
    """In the interpreter. Numbers are exact in 16 bits; only sums are rounded, in float32."""
    weight = STORAGES[name](MATRIX)
    assert isinstance(weight, Quantized)
    x = random(0, rows, K).astype(dtype)
    run = jax.jit(partial(pallas_triton_matmul, interpret=True), static_argnames=("dtype", "epilogue", "parts"))
    expected = np.asarray(x, np.float64) @ np.asarray(weight.dense(jnp.float32), np.float64)
    found = run(x, weight.packed, epilogue=None, dtype=jnp.dtype("float32"))
    np.testing.assert_allclose(found, expected, atol=2e-6 * np.abs(expected).max())
    if rows <= 16:
        found = run(x, weight.packed, epilogue=None, dtype=jnp.dtype("float32"), parts=True)
        assert found.shape == ((8 if "small" in name else 2) if dtype != "float32" else 1, rows, N)
        assert all(np.abs(part).max() > 0.1 * np.abs(expected).max() for part in found), "each stretch has its share"
        np.testing.assert_allclose(found.sum(0), expected, atol=2e-6 * np.abs(expected).max())
        gate, up = np.split(expected, 2, 1)
        found = run(x, weight.packed, epilogue=SwiGlu(), dtype=jnp.dtype("float32"))
        product = gate / (1 + np.exp(-gate)) * up
        rounding = 2e-6 * np.abs(expected).max() * (1.2 * np.abs(up) + np.abs(gate))  # of each factor (as above), times the other
        assert (np.abs(found - product) <= 1e-4 * np.abs(product) + rounding).all()


def test_what_the_kernel_cannot_take_is_refused_by_name():
    packed = STORAGES["int8"](MATRIX).packed
    with pytest.raises(ValueError, match="x has 17 rows, expected 1 to 16"):
        skinny_matmul(jnp.ones((17, K)), packed, SwiGlu())
    with pytest.raises(ValueError, match="parts are those of a weight of 8 or 4 bits, without an epilogue"):
        skinny_matmul(jnp.ones((1, K)), packed, SwiGlu(), parts=True)
    with pytest.raises(ValueError, match=r"x is \[1, 8\] and the weight \[256, 384\]"):
        skinny_matmul(jnp.ones((1, 8)), packed)
