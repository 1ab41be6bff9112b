"""Cache writes land where they should, and nowhere else."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cache_write import pallas_triton
from pallas_kernels.cache_write.api import IMPLEMENTATIONS, cache_write
from tests.sets import exhaustive

RUNNABLE = {name: write if name == "reference" else partial(write, interpret=True) for name, write in IMPLEMENTATIONS.items()}
"""Every implementation, as a CPU runs it."""


@pytest.mark.parametrize("implementation", RUNNABLE)
class TestCacheWrite:
    @pytest.mark.parametrize("seed", [0, 1, *map(exhaustive, range(2, 6))])
    @pytest.mark.parametrize("layers", [1, 3])
    def test_equals_a_loop(self, implementation, layers, seed):
        rng = np.random.default_rng(seed)
        b, s, j, page, table = 3, 9, 4, int(rng.integers(1, 6)), 7
        pages = rng.normal(size=(2 * layers, b * table + 1, page, 2, 8 + 4 * (seed % 2))).astype(np.float32)
        windows = rng.normal(size=(2 * layers, b, s, *pages.shape[3:])).astype(np.float32)
        page_table = rng.permutation(b * table).reshape(b, table).astype(np.int32)
        path = rng.integers(0, s, (b, j)).astype(np.int32)
        slots = (rng.integers(0, table * page - j, (b, 1)) + np.arange(j)).astype(np.int32)
        write = rng.random((b, j)) < 0.6
        slots[~write] += 1000  # a row that is not written may name any slot

        arguments = map(jnp.asarray, (page_table, path, slots, write))
        got = RUNNABLE[implementation](tuple(map(jnp.asarray, pages)), tuple(map(jnp.asarray, windows)), *arguments)
        for row, step in zip(*np.nonzero(write), strict=True):
            where = page_table[row, slots[row, step] // page], slots[row, step] % page
            pages[:, *where] = windows[:, row, path[row, step]]
        np.testing.assert_array_equal(np.stack(got), pages)

    def test_writes_nothing_when_told_so(self, implementation):
        pages, window = jnp.arange(16.0).reshape(4, 2, 1, 2), jnp.ones((1, 1, 1, 2))
        nothing = jnp.zeros((1, 1), jnp.int32)
        (got,) = RUNNABLE[implementation]((pages,), (window,), nothing, nothing, nothing, jnp.zeros((1, 1), bool))
        np.testing.assert_array_equal(got, pages)

    def test_windows_may_be_wider_than_the_cache(self, implementation):
        """Say float32 rows into a bfloat16 cache."""
        pages, window = jnp.zeros((1, 2, 1, 2), jnp.bfloat16), jnp.full((1, 1, 1, 2), 1.001, jnp.float32)
        zero = jnp.zeros((1, 1), jnp.int32)
        (got,) = RUNNABLE[implementation]((pages,), (window,), zero, zero, zero + 1, zero == 0)
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(got[0, :, 0, 0].astype(jnp.float32), [0, 1])

    def test_bytes_stay_as_they_are(self, implementation):
        pages, window = jnp.zeros((2, 2, 1, 4), jnp.uint8), jnp.asarray([0x38, 0xAA, 0x7E, 0xFE], jnp.uint8).reshape(1, 1, 1, 4)
        zero = jnp.zeros((1, 1), jnp.int32)
        (got,) = RUNNABLE[implementation]((pages,), (window,), zero + 1, zero, zero + 1, zero == 0)
        expected = np.zeros(pages.shape, np.uint8)
        expected[1, 1, 0] = window[0, 0, 0]
        np.testing.assert_array_equal(got, expected)


def test_bytes_and_numbers_don_t_mix():
    zero = jnp.zeros((1, 1), jnp.int32)
    pages = jnp.zeros((1, 1, 1, 2), jnp.uint8)
    with pytest.raises(ValueError, match="the cache is uint8 and what to write float32: both must be bytes, or neither"):
        cache_write((pages,), (pages.astype(jnp.float32),), zero, zero, zero, zero == 0)


def test_many_layers_take_few_launches(monkeypatch):
    monkeypatch.setattr(pallas_triton, "NUMBERS_PER_LAUNCH", 4 * 2)
    pages, windows = (
        tuple(jnp.zeros((6, 1, 2, 1, 2))),
        tuple(jnp.arange(1.0, 7)[:, None, None, None, None] + jnp.zeros((6, 1, 1, 1, 2))),
    )
    zero = jnp.zeros((1, 1), jnp.int32)
    write = partial(pallas_triton.pallas_triton_write, interpret=True)
    got = write(pages, windows, zero, zero, zero + 1, zero == 0)
    np.testing.assert_array_equal(np.stack(got)[:, 0, :, 0, 0], [[0, number] for number in range(1, 7)])
    assert str(jax.make_jaxpr(write)(pages, windows, zero, zero, zero, zero == 0)).count("pallas_call[") == 2


def test_the_default_on_a_cpu_is_the_reference_and_updates_donated_pages_in_place():
    write = jax.jit(cache_write, donate_argnums=0)
    pages, window, zero = jnp.zeros((64, 16, 2, 8)), jnp.ones((1, 1, 2, 8)), jnp.zeros((1, 1), jnp.int32)
    compiled = write.lower((pages,), (window,), zero, zero, zero, zero == 0).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == pages.nbytes
    assert compiled.memory_analysis().temp_size_in_bytes < pages.nbytes / 2


def test_unknown_implementations_are_named():
    pages, nothing = jnp.zeros((1, 1, 1, 2)), jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match="unknown cache_write implementation 'cuda'; there are: reference, pallas_triton"):
        cache_write((pages,), (pages,), nothing, nothing, nothing, nothing > 0, implementation="cuda")
