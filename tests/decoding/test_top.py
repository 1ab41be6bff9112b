"""The largest values: the ways of a GPU against lax.top_k."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding import top as ways


def coarse(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Numbers of which many are equal, zeros of both signs and infinities among them."""
    return rng.choice(np.float32([-np.inf, -3, -1, -0.0, 0, 2, 2.5, np.inf]), shape)


@pytest.mark.parametrize(("candidates", "count"), [(16, 4), (4, 4), (5, 1), (68, 7), (264, 31)])
def test_counting_finds_what_a_sort_finds(candidates, count):
    """Among equals the earlier ones come first, whether ranks are unrolled (up to 16 candidates) or summed."""
    for rng in map(np.random.default_rng, range(20)):
        values = jnp.asarray(coarse(rng, 2, candidates))
        simple = ways.top_k(values, count=count)
        for found, expected in zip(ways.ranked_by_counting(values, count=count), simple, strict=True):
            np.testing.assert_array_equal(found, expected)
        places = ways.numbered_by_counting(values, count=count)
        np.testing.assert_array_equal(places, ways.sorted_places(values, count=count))


@pytest.mark.parametrize("count", [1, 16, 17, 20, 40])
def test_rounds_find_what_one_sort_finds(count):
    """Also where a round ends between equal values."""
    for rng in map(np.random.default_rng, range(10)):
        values = jnp.asarray(rng.integers(0, 12, (2, 3, 100)).astype(np.float32))
        simple = ways.top_at_once(values, count=count)
        for found, expected in zip(ways.top_in_rounds(values, count=count), simple, strict=True):
            np.testing.assert_array_equal(found, expected)


def test_a_broken_model_gets_places_that_exist():
    for values in (jnp.full((1, 16), jnp.nan), jnp.full((1, 68), jnp.nan).at[0, 3].set(1.0)):
        for places in (ways.ranked_by_counting(values, count=7)[1], ways.numbered_by_counting(values, count=7)):
            assert ((places >= 0) & (places < values.shape[1])).all()
