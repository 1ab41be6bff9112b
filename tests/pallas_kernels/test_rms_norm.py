"""RMS norm, alone, of two rows and after an addition, against its formula, in every implementation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu import what_is_missing
from pallas_kernels.product import Product
from pallas_kernels.rms_norm.api import ADD_IMPLEMENTATIONS, IMPLEMENTATIONS, PAIR_IMPLEMENTATIONS, add_norm, norm_pair, rms_norm
from pallas_kernels.weight import Dense
from tests.sets import exhaustive

RUNNABLE, RUNNABLE_PAIR, RUNNABLE_ADD = (
    {name: partial(norm, interpret=True) if name == "pallas_triton" else norm for name, norm in table.items()}
    for table in (IMPLEMENTATIONS, PAIR_IMPLEMENTATIONS, ADD_IMPLEMENTATIONS)
)


def with_dtypes(first: tuple, *others: tuple) -> list:
    """The cases in float32; the first also in bfloat16, and in the exhaustive set the others too. Each with its tolerance."""
    half = [pytest.param(first, "bfloat16", 2e-2), *(exhaustive(other, "bfloat16", 2e-2) for other in others)]
    return [*((case, "float32", 1e-6) for case in (first, *others)), *half]


def formula(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * weight


@pytest.mark.parametrize("implementation", RUNNABLE)
@pytest.mark.parametrize(("shape", "dtype", "tolerance"), with_dtypes((1, 1, 64), (2, 3, 96), (5, 4, 2, 80)), ids=str)
def test_equals_the_formula(implementation, shape, dtype, tolerance):
    rng = np.random.default_rng(shape[-1])
    x, weight = (jnp.asarray(3 * rng.normal(size=size), dtype) for size in (shape, shape[-1:]))
    got = RUNNABLE[implementation](x, weight, 1e-3)
    expected = formula(np.asarray(x, np.float64), np.asarray(weight, np.float64))
    assert got.dtype == x.dtype and got.shape == x.shape
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("implementation", RUNNABLE_PAIR)
@pytest.mark.parametrize("shape", [(1, 1, 64), (2, 3, 96)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pair_is_the_two_norms_side_by_side(implementation, shape, dtype):
    """Bit by bit."""
    rng = np.random.default_rng(shape[-1])
    sides = [jnp.asarray(3 * rng.normal(size=shape), dtype) for _ in range(2)]
    weights = [jnp.asarray(rng.normal(size=shape[-1:]), dtype) for _ in range(2)]
    got = RUNNABLE_PAIR[implementation](*sides, *weights, 1e-3)
    expected = [RUNNABLE[implementation](side, weight, 1e-3) for side, weight in zip(sides, weights, strict=True)]
    assert got.dtype == expected[0].dtype and (got == jnp.concatenate(expected, -1)).all()


@pytest.mark.parametrize("implementation", RUNNABLE_ADD)
@pytest.mark.parametrize(
    ("case", "dtype", "tolerance"), with_dtypes(((1, 1), 1024, False), ((2, 3), 512, True), ((2, 2), 100, True)), ids=str
)
def test_the_sum_and_its_norm_equal_the_formula(implementation, case, dtype, tolerance):
    """The first product is summed up in four parts, the second in two, the third whole."""
    rows, k, bias = case
    rng = np.random.default_rng(k)
    sizes = ((*rows, 80), (*rows, k), (k, 80), (80,), (80,))
    x, inputs, matrix, added, weight = (jnp.asarray(rng.normal(size=size) / size[0] ** 0.5, dtype) for size in sizes)
    got = RUNNABLE_ADD[implementation](x, Product(inputs, Dense(matrix), added if bias else None), weight, 1e-3)
    wide = [np.asarray(each, np.float64) for each in (x, inputs, matrix, added, weight)]
    total = wide[0] + wide[1] @ wide[2] + bias * wide[3]
    for mine, expected in zip(got, (total, formula(total, wide[4])), strict=True):
        assert mine.dtype == x.dtype and mine.shape == x.shape
        np.testing.assert_allclose(np.asarray(mine, np.float64), expected, atol=3 * tolerance, rtol=tolerance)


@pytest.mark.parametrize("implementation", RUNNABLE_ADD)
def test_an_array_is_a_product_of_one_part(implementation):
    """Bit by bit: the product with the identity, in one part, is the array."""
    rng = np.random.default_rng(0)
    x, added, weight = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((2, 3, 100), (2, 3, 100), (100,)))
    expected = RUNNABLE_ADD[implementation](x, Product(added, Dense(jnp.eye(100))), weight, 1e-3)
    for mine, other in zip(RUNNABLE_ADD[implementation](x, added, weight, 1e-3), expected, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_unknown_implementations_are_named():
    with pytest.raises(ValueError, match="unknown rms_norm implementation 'cuda'"):
        rms_norm(jnp.ones((1, 2)), jnp.ones(2), 1e-5, implementation="cuda")


def test_mixed_dtypes_are_refused():
    half = jnp.ones((1, 2), jnp.bfloat16)
    with pytest.raises(ValueError, match="x is bfloat16 and weight is float32: they must have the same dtype"):
        rms_norm(half, jnp.ones(2), 1e-5)
    with pytest.raises(ValueError, match="x is bfloat16 and right_weight is float32: they must have the same dtype"):
        norm_pair(half, half, jnp.ones(2, jnp.bfloat16), jnp.ones(2), 1e-5)
    with pytest.raises(ValueError, match="x is bfloat16 and product is float32: they must have the same dtype"):
        add_norm(half, Product(jnp.ones((1, 2)), Dense(jnp.ones((2, 2)))), jnp.ones(2, jnp.bfloat16), 1e-5)


@pytest.mark.skipif(what_is_missing() is not None, reason=f"no kernels for CPUs here: {what_is_missing()}")
@pytest.mark.parametrize("size", [16, 40, 1000])
def test_on_cpus_a_row_has_the_same_bits_beside_any_others(size):
    rng = np.random.default_rng(size)
    x, added, weight = (jnp.asarray(rng.normal(size=each), jnp.float32) for each in ((70, size), (70, size), (size,)))
    norm, add = jax.jit(partial(rms_norm, eps=1e-5)), jax.jit(partial(add_norm, eps=1e-5))
    for rows in (1, 2, 7, 70):
        np.testing.assert_array_equal(norm(x[-rows:], weight)[-1], norm(x[-1:], weight)[0])
        for mine, alone in zip(add(x[-rows:], added[-rows:], weight), add(x[-1:], added[-1:], weight), strict=True):
            np.testing.assert_array_equal(mine[-1], alone[0])
