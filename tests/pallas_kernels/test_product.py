"""Split products against whole ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.product import Product, partial_sums
from pallas_kernels.weight import Dense, choose_splits


@pytest.mark.parametrize(
    ("k", "n", "splits"), [(4096, 4096, 8), (4096, 6144, 4), (4096, 28672, 1), (14336, 4096, 8), (2048, 512, 8)]
)
def test_every_multiprocessor_gets_a_tile(k, n, splits):
    """The sizes of Llama-3.1-8B, and one whose parts would be too short in more splits."""
    assert {choose_splits(rows, k, n) for rows in range(1, 129)} == {splits}


def test_many_rows_and_indivisible_sums_stay_whole():
    assert choose_splits(2048, 4096, 4096) == 1
    assert choose_splits(1, 4095, 4096) == 1
    assert choose_splits(1, 3 * 2**9, 1024) == 4  # 2**9 and 3 parts: 384 in each


def test_the_parts_add_up():
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.integers(-3, 4, size), jnp.bfloat16) for size in ((2, 3, 1024), (1024, 48)))
    parts, bias = partial_sums(Product(x, Dense(weight)))
    assert bias is None and parts.shape == (4, 6, 48) and parts.dtype == jnp.float32
    expected = np.asarray(x, np.float32) @ np.asarray(weight, np.float32)
    np.testing.assert_array_equal(parts.sum(0).reshape(2, 3, 48), expected)
    one, _ = partial_sums(Product(x[1, 2], Dense(weight)))
    np.testing.assert_array_equal(one.sum(0), np.stack([expected[1, 2]] * 2))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "skinny"), [((2, 8), True), ((17,), False)], ids=str)
def test_the_skinny_product_takes_the_place_of_xlas_up_to_16_rows(rows, skinny, bias):
    """Which one computes it is seen in the program; the numbers are the same."""
    rng = np.random.default_rng(0)
    x, weight, added = (jnp.asarray(rng.integers(-3, 4, size), jnp.bfloat16) for size in ((*rows, 512), (512, 48), (48,)))
    products = [Product(x, Dense(weight), added if bias else None, name) for name in ("xla", "skinny")]
    for finish in (Product.value, lambda product: product.value(jnp.float32), lambda product: partial_sums(product)[0].sum(0)):
        programs = [str(jax.make_jaxpr(finish)(product)) for product in products]
        assert [program.count("platform_index") > 0 for program in programs] == [False, skinny]
        results = [np.asarray(finish(product), np.float32) for product in products]
        np.testing.assert_array_equal(*results)
    swiglu = [np.asarray(product.swiglu(), np.float32) for product in products]
    np.testing.assert_allclose(*swiglu, rtol=3e-2)  # the skinny one rounds once
