"""Cache writes land where they should, and nowhere else."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cache_write.api import IMPLEMENTATIONS, cache_write


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
class TestCacheWrite:
    @pytest.mark.parametrize("seed", range(6))
    def test_equals_a_loop(self, implementation, seed):
        rng = np.random.default_rng(seed)
        b, s, j, page, table = 3, 9, 4, int(rng.integers(1, 6)), 7
        k_pages, v_pages = rng.normal(size=(2, b * table + 1, page, 2, 8)).astype(np.float32)
        k_window, v_window = rng.normal(size=(2, b, s, 2, 8)).astype(np.float32)
        page_table = rng.permutation(b * table).reshape(b, table).astype(np.int32)
        path = rng.integers(0, s, (b, j)).astype(np.int32)
        slots = (rng.integers(0, table * page - j, (b, 1)) + np.arange(j)).astype(np.int32)
        write = rng.random((b, j)) < 0.6
        slots[~write] += 1000  # a row that is not written may name any slot

        arguments = (k_pages, v_pages, k_window, v_window, page_table, path, slots, write)
        got_k, got_v = cache_write(*map(jnp.asarray, arguments), implementation=implementation)
        for row, step in zip(*np.nonzero(write), strict=True):
            where = page_table[row, slots[row, step] // page], slots[row, step] % page
            k_pages[where], v_pages[where] = k_window[row, path[row, step]], v_window[row, path[row, step]]
        np.testing.assert_array_equal(got_k, k_pages)
        np.testing.assert_array_equal(got_v, v_pages)

    def test_writes_nothing_when_told_so(self, implementation):
        pages, window = jnp.arange(16.0).reshape(4, 2, 1, 2), jnp.ones((1, 1, 1, 2))
        nothing = jnp.zeros((1, 1), jnp.int32)
        got, _ = cache_write(
            pages, pages, window, window, nothing, nothing, nothing, jnp.zeros((1, 1), bool), implementation=implementation
        )
        np.testing.assert_array_equal(got, pages)


def test_unknown_implementations_are_named():
    pages, nothing = jnp.zeros((1, 1, 1, 2)), jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match="unknown cache_write implementation 'cuda'"):
        cache_write(pages, pages, pages, pages, nothing, nothing, nothing, nothing > 0, implementation="cuda")
