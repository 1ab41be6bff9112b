"""The cut-off, in every implementation, against the definition that sorts. (tests/decoding/test_filters.py tries more rows.)"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from pallas_kernels.cutoff.api import IMPLEMENTATIONS, Cutoff, cutoff
from pallas_kernels.cutoff.bisection import STEPS_PER_NAT, WHOLE, Limits, float_of, largest, ordered_bits
from pallas_kernels.cutoff.reference import sum_in_order
from tests.sets import variants

RUNNABLE = IMPLEMENTATIONS | {"pallas_triton": partial(IMPLEMENTATIONS["pallas_triton"], interpret=True)}
ROUNDING = np.float32(2**-20)
"""How far rounding of exponentials and their total, which differs between compiled programs, moves a sum of probabilities."""


def random_row(rng: np.random.Generator, vocab: int) -> np.ndarray:
    """Logits of every kind: ties, -inf, one token, all equal, coarse grids, enormous and tiny spreads."""
    kind = rng.integers(8)
    row = rng.normal(size=vocab) * 10 ** rng.uniform(-3, 2)
    if kind == 1:
        row = np.zeros(vocab)
    if kind == 2:
        row = np.round(row)  # many ties
    if kind == 3:
        row = row.astype(np.float16)
    if kind == 4:
        row[rng.random(vocab) < 0.9] = -np.inf
        row[rng.integers(vocab)] = 1.0
    if kind == 5:
        row[:] = -np.inf
        row[rng.integers(vocab)] = 3.0
    if kind == 6:
        row = np.where(rng.random(vocab) < 0.5, 0.0, -0.0)
        row[rng.integers(vocab)] = rng.choice([0.0, 1e-30, 5.0])
    if kind == 7:
        row = np.log(rng.dirichlet(np.full(vocab, 0.05)) + 1e-38)
    return row.astype(np.float32)


def arguments(rng: np.random.Generator, rows: int, vocab_size: int) -> list[np.ndarray]:
    logits = np.stack([random_row(rng, vocab_size) for _ in range(rows)])
    inverse_temperature = rng.uniform(0.5, 2, rows).astype(np.float32)
    top_k = rng.choice([1, 2, 7, 40, vocab_size // 2 + 1, vocab_size, 2**31 - 1], rows).astype(np.int32)
    top_p = np.where(rng.random(rows) < 0.5, rng.choice([1, 1 - 2**-24, 0.95, 1e-9], rows), rng.random(rows)).astype(np.float32)
    min_p = rng.choice([0, 0, 0, 1e-4, 0.05, 1], rows).astype(np.float32)
    return [logits, inverse_temperature, top_k, top_p, min_p]


def kept_tokens(logits: np.ndarray, *numbers: np.ndarray) -> np.ndarray:
    """From each row's sorted tokens and the sums before each: [rows, v] bool."""
    inverse_temperature, top_k, top_p, min_p = (number[:, None] for number in numbers)
    order = np.argsort(-logits, -1, kind="stable")
    weights = jnp.exp((logits - logits.max(-1, keepdims=True)) * inverse_temperature)
    total = np.asarray(sum_in_order(weights))[:, None]
    likely = np.take_along_axis(np.asarray(weights / total), order, -1)
    shares = (likely * np.float32(WHOLE) + np.float32(0.5)).astype(np.int64)
    before = (np.cumsum(shares, -1) - shares).astype(np.float32)
    kept = (np.arange(logits.shape[-1]) < top_k) & ((before < top_p * np.float32(WHOLE)) | (top_p >= 1))
    kept &= likely >= min_p * (1 / total)
    kept[:, 0] = True
    return np.take_along_axis(kept, np.argsort(order, -1), -1)


@partial(jax.jit, static_argnames=("implementation", "rough"))
def found(implementation: str, logits: Array, *limits: Array, rough: bool = False):
    """Which tokens are kept."""
    return Cutoff(*RUNNABLE[implementation](logits, Limits(*limits), rough=rough)).keeps(logits)


@pytest.mark.parametrize(
    ("vocab_size", "rows"),
    [
        (9000, 6),
        variants(9000, 100),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in ((50, 200), (9000, 200), (1, 100), (50, 10_000), (9000, 10_000))
        ),
    ],
)
@pytest.mark.parametrize("implementation", RUNNABLE)
def test_the_kept_tokens_are_those_of_the_definition(implementation, vocab_size, rows):
    """9000 tokens are several blocks of each launch; of rows that are all equal the kernel copies none. On a CPU they are more than
    the candidates, among which the cut-off of some rows is not.

    The kernel's exponentials, and a total that it sums in its own order, differ from XLA's in their last bits: in the few rows
    where top_p or min_p lies so near to what is compared with it, the kept tokens lie between those of two limits near by.
    """
    different = 0
    for seed, first in enumerate(range(0, rows, 100)):
        arrays = arguments(np.random.default_rng(seed), min(rows - first, 100), vocab_size)
        kept = np.asarray(found(implementation, *arrays))
        different += (kept != kept_tokens(*arrays)).any(-1).sum()
        *others, top_p, min_p = arrays
        fewer = kept_tokens(*others, np.where(top_p < 1, top_p - ROUNDING, top_p), min_p * (1 + ROUNDING))
        more = kept_tokens(*others, top_p + ROUNDING, min_p * (1 - ROUNDING))
        assert ((fewer <= kept) & (kept <= more)).all(), seed
    print(f"{different} of {rows} rows are different")
    assert different <= (-(-rows // 100) if implementation == "pallas_triton" else 0)


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_a_row_is_cut_alike_however_many_rows_there_are(implementation):
    """Also of small vocabularies, where XLA sums several rows in another order than one."""
    rng, count = np.random.default_rng(0), 8
    for _ in range(20):
        logits, one = rng.normal(0, 3, (count, 1500)).astype(np.float32), np.ones(count, np.float32)
        rows = (logits, one, np.full(count, 1500), 0.999999 * one, 0 * one)
        together = found(implementation, *rows)
        alone = [found(implementation, *(each[row : row + 1] for each in rows)) for row in range(count)]
        assert (together == jnp.concatenate(alone)).all()


@pytest.mark.variants
@pytest.mark.parametrize("implementation", RUNNABLE)
def test_a_rough_cut_keeps_a_little_more(implementation):
    given = arguments(np.random.default_rng(7), 12, 3000)
    exact, rough = (np.asarray(found(implementation, *given, rough=rough)) for rough in (False, True))
    assert (rough >= exact).all() and (rough > exact).any()
    lowest = np.min(given[0], -1, where=exact, initial=np.inf, keepdims=True)
    assert (given[0] >= lowest - 1.001 / STEPS_PER_NAT / given[1][:, None])[rough & ~exact].all()


def test_kept_tokens_are_those_up_to_the_last():
    logits = jnp.array([2.0, 1.0, 3.0, 1.0, 1.0, 0.0])
    assert Cutoff(ordered_bits(jnp.array(1.0)), jnp.array(3)).keeps(logits).tolist() == [True, True, True, True, False, False]


def test_the_docstrings_example():
    likely = jnp.array([0.5, 0.3, 0.15, 0.05])
    one = jnp.ones(())
    cut = cutoff(jnp.log(likely), one, jnp.array(4), 0.9 * one, 0 * one)
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
        cutoff(jnp.ones(2), row, jnp.array(1), row, row, implementation="sort")
