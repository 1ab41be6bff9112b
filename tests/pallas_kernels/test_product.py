"""Split products against whole ones."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.product import Product, choose_splits, partial_sums


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
    parts = partial_sums(Product(x, weight))
    assert parts.shape == (4, 6, 48) and parts.dtype == jnp.float32
    expected = np.asarray(x, np.float32) @ np.asarray(weight, np.float32)
    np.testing.assert_array_equal(parts.sum(0).reshape(2, 3, 48), expected)
    one = partial_sums(Product(x[1, 2], weight))
    np.testing.assert_array_equal(one.sum(0), np.stack([expected[1, 2]] * 2))
