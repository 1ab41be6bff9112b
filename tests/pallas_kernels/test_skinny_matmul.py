"""The product for few rows against its definition, in the interpreter."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.skinny_matmul import AddResidual, Best, SwiGlu, best_of_blocks, skinny_matmul
from pallas_kernels.skinny_matmul.api import MAX_ROWS
from pallas_kernels.skinny_matmul.pallas_triton import pallas_triton_matmul
from pallas_kernels.skinny_matmul.reference import reference_matmul
from tests.sets import exhaustive

EPILOGUES = {"none": None, "residual": AddResidual, "swiglu": SwiGlu, "best": Best}
SIZES = [(256, 96), (300, 50), (64, 66), (40, 2 * 16500)]
"""k and n: whole tiles, parts of tiles in both, a single step, and the widest tiles."""


def case(k: int, n: int, rows: int, epilogue: str, dtype: str = "bfloat16"):
    """Small whole numbers: their sums are exact in float32, so every order of additions gives the same."""
    rng = np.random.default_rng(k)
    x, weight, residual = (jnp.asarray(rng.integers(-2, 3, size), dtype) for size in ((MAX_ROWS, k), (k, n), (MAX_ROWS, n)))
    made = EPILOGUES[epilogue]
    return x[:rows], weight, made(residual[:rows]) if made is AddResidual else made and made()


@pytest.fixture(scope="module")
def interpreted():
    return jax.jit(partial(pallas_triton_matmul, interpret=True), static_argnames="dtype")


CASES = [
    *((300, 50, epilogue, "bfloat16") for epilogue in EPILOGUES),
    *((*sizes, epilogue, "bfloat16") for sizes, epilogue in zip(SIZES, ("residual", "none", "swiglu", "best"), strict=True)),
    (300, 50, "swiglu", "float16"),
    (300, 50, "best", "float32"),
]


@pytest.mark.parametrize(
    ("k", "n", "epilogue", "dtype"), [each if each[:3] == (300, 50, "swiglu") else exhaustive(*each) for each in CASES]
)
def test_equals_the_reference(interpreted, k, n, epilogue, dtype):
    arguments = case(k, n, 5, epilogue, dtype)
    result = jnp.dtype(jnp.float32 if epilogue == "best" else dtype)
    got, expected = (jax.tree.leaves(each(*arguments, dtype=result)) for each in (interpreted, reference_matmul))
    assert len(got) == len(expected)
    for mine, other in zip(got, expected, strict=True):
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
        tolerance = 1e-2 * (epilogue == "swiglu")  # nothing else has to be rounded
        np.testing.assert_allclose(*(np.asarray(each, np.float64) for each in (mine, other)), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [1, 5, 15, *(exhaustive(rows) for rows in range(1, MAX_ROWS) if rows not in (1, 5, 15))])
@pytest.mark.parametrize("epilogue", ["none", "residual", *map(exhaustive, ("swiglu", "best"))])
def test_a_row_has_the_same_bits_among_any_number_of_rows(interpreted, epilogue, rows):
    """Random numbers, whose sums depend on the order."""
    rng = np.random.default_rng(0)
    sizes = ((MAX_ROWS, 300), (300, 50), (MAX_ROWS, 50))
    x, weight, residual = (jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in sizes)
    made = EPILOGUES[epilogue]
    few, all_rows = (
        interpreted(x[:count], weight, made(residual[:count]) if made is AddResidual else made and made(), dtype=x.dtype)
        for count in (rows, MAX_ROWS)
    )
    for mine, expected in zip(jax.tree.leaves(few), jax.tree.leaves(all_rows), strict=True):
        np.testing.assert_array_equal(mine, expected[:rows])


@pytest.mark.parametrize("implementation", ["interpreted", "reference"])
def test_the_definition(interpreted, implementation):
    """Against NumPy, for every epilogue."""
    run = interpreted if implementation == "interpreted" else reference_matmul
    x, weight, epilogue = case(300, 50, 3, "residual", "float32")
    wide = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    np.testing.assert_array_equal(run(x, weight, None, dtype=x.dtype), wide)
    total, squares = run(x, weight, epilogue, dtype=x.dtype)
    np.testing.assert_array_equal(total, wide + epilogue.residual)
    np.testing.assert_allclose(squares.sum(1), ((wide + epilogue.residual) ** 2).sum(1), rtol=1e-6)
    swiglu = run(x, weight, SwiGlu(), dtype=x.dtype)
    np.testing.assert_allclose(swiglu, wide[:, :25] / (1 + np.exp(-wide[:, :25])) * wide[:, 25:], rtol=1e-5, atol=1e-6)
    logits, *blocks = run(x, weight, Best(), dtype=x.dtype)
    greatest, column = best_of_blocks(*blocks)
    np.testing.assert_array_equal(logits, wide)
    np.testing.assert_array_equal(greatest, wide.max(1))
    np.testing.assert_array_equal(column, wide.argmax(1))


def test_the_lowest_column_of_equal_ones_is_best(interpreted):
    """Ties within a block, across blocks, and with the columns behind the last."""
    weight = jnp.zeros((16, 80), jnp.bfloat16).at[:, jnp.array([37, 38, 70])].set(1)
    x = jnp.stack([jnp.ones(16), -jnp.ones(16), jnp.zeros(16)]).astype(jnp.bfloat16)
    for run in (interpreted, reference_matmul):
        _, *blocks = run(x, weight, Best(), dtype=jnp.dtype("float32"))
        greatest, column = best_of_blocks(*blocks)
        np.testing.assert_array_equal(greatest, [16, 0, 0])
        np.testing.assert_array_equal(column, [37, 0, 0])


@pytest.mark.parametrize(
    ("x", "weight", "epilogue", "message"),
    [
        ((17, 8), (8, 4), None, "x has 17 rows, expected 1 to 16: use an ordinary product for more"),
        ((2, 0), (0, 4), None, r"x is \[2, 0\] and the weight \[0, 4\], expected \[rows, k\] and \[k, n\], not empty"),
        ((2, 8), (8, 5), SwiGlu(), "the weight has 5 columns, expected as many of the gate as of the up projection"),
        ((2, 8), (8, 4), AddResidual(jnp.ones((1, 4))), r"the residual is float32 \[1, 4\], expected float32 \[2, 4\]"),
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
