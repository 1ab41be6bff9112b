"""The cut-off, in every implementation, against the definition that sorts. (tests/decoding/test_filters.py tries more rows.)"""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cutoff.api import IMPLEMENTATIONS, Cutoff, cutoff
from pallas_kernels.cutoff.bisection import STEPS_PER_NAT, WHOLE, float_of, largest, ordered_bits

RUNNABLE = {name: each if name == "reference" else partial(each, interpret=True) for name, each in IMPLEMENTATIONS.items()}


def arguments(rng: np.random.Generator, rows: int, vocab_size: int) -> list[np.ndarray]:
    """Every second row is full of ties."""
    logits = 3 * rng.normal(size=(rows, vocab_size)).astype(np.float32)
    logits[::2] = np.round(logits[::2])
    most, inverse_temperature = logits.max(-1), rng.uniform(0.5, 2, rows).astype(np.float32)
    total = np.asarray(jnp.sum(jnp.exp((logits - most[:, None]) * inverse_temperature[:, None]), -1))
    top_k = rng.integers(1, vocab_size + 5, rows).astype(np.int32)
    top_p, min_p = (rng.choice(values, rows).astype(np.float32) for values in ([1.0, 0.95, 0.5, 1e-9], [0.0, 0.0, 0.01, 1.0]))
    return [logits, most, total, inverse_temperature, top_k, top_p, min_p]


def kept_tokens(logits, most, total, inverse_temperature, top_k, top_p, min_p) -> np.ndarray:
    """Of one row, from its sorted tokens and the sums before each: [v] bool."""
    order = np.argsort(-logits, kind="stable")
    likely = np.asarray(jnp.exp((logits[order] - most) * inverse_temperature) / total)
    shares = (likely * np.float32(WHOLE) + np.float32(0.5)).astype(np.int64)
    before = (np.cumsum(shares) - shares).astype(np.float32)
    kept = (np.arange(len(logits)) < top_k) & ((before < top_p * np.float32(WHOLE)) | (top_p >= 1))
    kept &= likely >= min_p * (1 / total)
    kept[0] = True
    return kept[np.argsort(order)]


def found(implementation: str, given: list[np.ndarray], *, rough: bool = False) -> np.ndarray:
    arrays = [jnp.asarray(each) for each in given]
    return np.asarray(Cutoff(*RUNNABLE[implementation](*arrays, rough=rough)).keeps(arrays[0]))


@pytest.mark.parametrize("implementation", RUNNABLE)
@pytest.mark.parametrize("vocab_size", [1, 50, 5000])
def test_the_kept_tokens_are_those_of_the_definition(implementation, vocab_size):
    given = arguments(np.random.default_rng(vocab_size), 12, vocab_size)
    for row, kept in enumerate(found(implementation, given)):
        np.testing.assert_array_equal(kept, kept_tokens(*(each[row] for each in given)), str(row))


@pytest.mark.parametrize("implementation", RUNNABLE)
def test_a_rough_cut_keeps_a_little_more(implementation):
    given = arguments(np.random.default_rng(7), 12, 300)
    exact, rough = (found(implementation, given, rough=rough) for rough in (False, True))
    assert (rough >= exact).all() and (rough > exact).any()
    lowest = np.min(given[0], -1, where=exact, initial=np.inf, keepdims=True)
    assert (given[0] >= lowest - 1.001 / STEPS_PER_NAT / given[3][:, None])[rough & ~exact].all()


def test_kept_tokens_are_those_up_to_the_last():
    logits = jnp.array([2.0, 1.0, 3.0, 1.0, 1.0, 0.0])
    assert Cutoff(ordered_bits(jnp.array(1.0)), jnp.array(3)).keeps(logits).tolist() == [True, True, True, True, False, False]


def test_the_docstrings_example():
    likely = jnp.array([0.5, 0.3, 0.15, 0.05])
    one = jnp.ones(())
    cut = cutoff(jnp.log(likely), jnp.log(likely[0]), 2 * one, one, jnp.array(4), 0.9 * one, 0 * one)
    assert cut.keeps(jnp.log(likely)).tolist() == [True, True, True, False]


def test_ordered_bits_are_in_the_order_of_the_floats():
    values = jnp.array([-jnp.inf, -1.0, -0.0, 0.0, 1.0])
    assert ordered_bits(values).tolist() == [-2139095041, -1065353217, 0, 0, 1065353216]
    assert (float_of(ordered_bits(values)) == values).all()


@pytest.mark.parametrize("limit", [0, 1, 5, 12, 15, 40])
def test_largest_finds_every_number(limit):
    number = largest(lambda number: number <= jnp.array([limit, 3]), jnp.zeros(2), bits=4)
    assert number.tolist() == [min(limit, 15), 3]


def test_unknown_implementations_are_named():
    row = jnp.ones(())
    with pytest.raises(ValueError, match="unknown cutoff implementation 'sort'"):
        cutoff(jnp.ones(2), row, row, row, jnp.array(1), row, row, implementation="sort")
