"""The product for few rows against its definition, in the interpreter."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.skinny_matmul import SwiGlu, skinny_matmul
from pallas_kernels.skinny_matmul.api import MAX_ROWS
from pallas_kernels.skinny_matmul.pallas_triton import pallas_triton_matmul
from pallas_kernels.skinny_matmul.reference import reference_matmul
from tests.sets import exhaustive

EPILOGUES = {"none": None, "swiglu": SwiGlu()}
SIZES = [(256, 96), (300, 50), (64, 66), (40, 2 * 16500)]
"""k and n: whole tiles, parts of tiles in both, a single step, and the widest tiles."""


def case(k: int, n: int, rows: int, epilogue: str, dtype: str = "bfloat16"):
    """Small whole numbers: their sums are exact in float32, so every order of additions gives the same."""
    rng = np.random.default_rng(k)
    x, weight = (jnp.asarray(rng.integers(-2, 3, size), dtype) for size in ((MAX_ROWS, k), (k, n)))
    return x[:rows], weight, EPILOGUES[epilogue]


@pytest.fixture(scope="module")
def interpreted():
    return jax.jit(partial(pallas_triton_matmul, interpret=True), static_argnames="dtype")


CASES = [
    *((300, 50, "swiglu", dtype) for dtype in ("bfloat16", "float16", "float32")),
    (300, 50, "none", "float32"),
    *(exhaustive(*sizes, epilogue, "bfloat16") for sizes, epilogue in zip(SIZES, ("none", "none", "swiglu", "none"), strict=True)),
]


@pytest.mark.parametrize("implementation", ["interpreted", "reference"])
@pytest.mark.parametrize(("k", "n", "epilogue", "dtype"), CASES)
def test_the_definition(interpreted, implementation, k, n, epilogue, dtype):
    """Against NumPy."""
    run = interpreted if implementation == "interpreted" else reference_matmul
    x, weight, how = case(k, n, 5, epilogue, dtype)
    found, expected = run(x, weight, how, dtype=x.dtype), np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    if epilogue == "swiglu":
        gate, up = np.split(expected, 2, 1)
        expected = gate / (1 + np.exp(-gate)) * up
    assert (found.dtype, found.shape) == (dtype, expected.shape)
    tolerance = {"float32": 1e-5}.get(dtype, 1e-2) * (epilogue == "swiglu")  # nothing else has to be rounded
    expected = expected.astype(x.dtype).astype(np.float64)
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [1, 5, 15, *(exhaustive(rows) for rows in range(1, MAX_ROWS) if rows not in (1, 5, 15))])
@pytest.mark.parametrize("epilogue", ["none", exhaustive("swiglu")])
def test_a_row_has_the_same_bits_among_any_number_of_rows(interpreted, epilogue, rows):
    """Random numbers, whose sums depend on the order."""
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in ((MAX_ROWS, 300), (300, 50)))
    few, all_rows = (interpreted(x[:count], weight, EPILOGUES[epilogue], dtype=x.dtype) for count in (rows, MAX_ROWS))
    np.testing.assert_array_equal(few, all_rows[:rows])


@pytest.mark.parametrize(
    ("x", "weight", "epilogue", "message"),
    [
        ((17, 8), (8, 4), None, "x has 17 rows, expected 1 to 16: use an ordinary product for more"),
        ((2, 0), (0, 4), None, r"x is \[2, 0\] and the weight \[0, 4\], expected \[rows, k\] and \[k, n\], not empty"),
        ((2, 8), (8, 5), SwiGlu(), "the weight has 5 columns, expected as many of the gate as of the up projection"),
    ],
)
def test_what_it_cannot_take_is_refused_by_name(x, weight, epilogue, message):
    with pytest.raises(ValueError, match=f"skinny_matmul: {message}"):
        skinny_matmul(jnp.ones(x), jnp.ones(weight), epilogue)


def test_mixed_dtypes_and_unknown_implementations_are_refused():
    with pytest.raises(ValueError, match="dtypes are float32 and bfloat16, expected bfloat16, float16 or float32 for both"):
        skinny_matmul(jnp.ones((1, 2)), jnp.ones((2, 2), jnp.bfloat16))
    with pytest.raises(ValueError, match="unknown skinny_matmul implementation 'cuda'"):
        skinny_matmul(jnp.ones((1, 2)), jnp.ones((2, 2)), implementation="cuda")
