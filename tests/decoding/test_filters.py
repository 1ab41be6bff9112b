"""Filters without sorting keep the same tokens as the definition, which sorts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.sampling import apply_filters
from jaxspec.sampling_params import SamplingParams
from pallas_kernels.cutoff.bisection import STEPS_PER_NAT, WHOLE
from pallas_kernels.cutoff.reference import sum_in_order
from tests.decoding.distribution_in_numpy import kept, softmax
from tests.decoding.rows import settings_of
from tests.pallas_kernels.test_cutoff import random_row

VOCAB = 50
filtered = jax.jit(apply_filters, static_argnames="rough")


@jax.jit
def in_order(logits: jax.Array) -> jax.Array:
    """A softmax whose totals have the bits of the filters'."""
    likely = jnp.exp(logits - jnp.max(logits, -1, keepdims=True))
    return likely / sum_in_order(likely)[..., None]


def sort_and_filter(scaled: np.ndarray, probabilities: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The definition: which tokens are kept, from the sorted probabilities and the sums of those before each."""
    order = np.argsort(-scaled, kind="stable")
    shares = (probabilities[order] * np.float32(WHOLE) + np.float32(0.5)).astype(np.int64)
    before = (np.cumsum(shares) - shares).astype(np.float32)
    top_k = params.top_k if params.top_k > 0 else len(scaled)
    in_top_p = (before < np.float32(params.top_p) * np.float32(WHOLE)) | (params.top_p >= 1)
    first = np.arange(len(scaled)) == 0
    keeps = first | ((np.arange(len(scaled)) < top_k) & in_top_p)
    likely = probabilities >= np.float32(params.min_p) * probabilities.max()
    result = np.zeros(len(scaled), bool)
    result[order] = keeps
    return result & likely


def random_filters(rng: np.random.Generator) -> SamplingParams:
    return SamplingParams(
        top_k=int(rng.choice([-1, 0, 1, 2, 7, 30, VOCAB, 2 * VOCAB, 2**31 - 1])),
        top_p=float(rng.choice([1e-30, 1e-6, 0.5, 0.9, 0.95, 1 - 2**-24, 1.0, rng.uniform()])),
        min_p=float(rng.choice([0.0, 0.0, rng.uniform(0, 0.3), 0.5, 1.0])),
    )


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(2, 20))])
def test_the_kept_tokens_are_those_of_the_definition(seed):
    rng = np.random.default_rng(seed)
    params = [random_filters(rng) for _ in range(100)]
    rows = np.stack([[random_row(rng, VOCAB) for _ in range(5)] for _ in params])
    found = np.asarray(filtered(jnp.asarray(rows), settings_of(params, VOCAB)))
    probabilities = np.asarray(in_order(jnp.asarray(rows)))
    for row, scaled, likely, each in zip(found, rows, probabilities, params, strict=True):
        for node in range(5):
            expected = sort_and_filter(scaled[node], likely[node], each)
            np.testing.assert_array_equal(row[node], np.where(expected, scaled[node], -np.inf), str(each))


@pytest.mark.parametrize("seed", range(12))
def test_filters_keep_what_numpy_keeps(seed):
    """Random k, p and min_p, each now and then off; sums in 64 bits."""
    rng = np.random.default_rng(seed)
    params = [
        SamplingParams(
            temperature=float(rng.uniform(0.3, 2)),
            top_k=int(rng.choice([-1, 0, 1, 2, 7, 30, VOCAB, 2 * VOCAB])),
            top_p=float(rng.choice([1.0, rng.uniform(0.01, 1), 0.95])),
            min_p=float(rng.choice([0.0, rng.uniform(0, 0.3), 0.01])),
        )
        for _ in range(6)
    ]
    scaled = jnp.asarray(2 * rng.normal(size=(6, 3, VOCAB)), jnp.float32)
    found = np.isfinite(filtered(scaled, settings_of(params, VOCAB)))
    for row, each in enumerate(params):
        for node in range(3):
            assert (found[row, node] == kept(softmax(np.asarray(scaled)[row, node] / each.temperature), each)).all()


def test_the_docstrings_example():
    logits = jnp.log(jnp.array([[[0.15, 0.5, 0.05, 0.3]]]))
    for filters, kept_ids in (
        ({"top_k": 3}, [0, 1, 3]),
        ({"top_p": 0.9}, [0, 1, 3]),
        ({"min_p": 0.4}, [1, 3]),
        ({"top_k": 3, "top_p": 0.9, "min_p": 0.4}, [1, 3]),
    ):
        found = filtered(logits, settings_of([SamplingParams(**filters)], 4))
        assert np.flatnonzero(np.isfinite(found[0, 0])).tolist() == kept_ids


def test_rough_filters_keep_a_little_more():
    rng = np.random.default_rng(0)
    params = [SamplingParams(top_k=int(rng.integers(1, VOCAB)), top_p=float(rng.uniform(0.3, 1))) for _ in range(50)]
    logits = jnp.asarray(5 * rng.normal(size=(50, 3, VOCAB)), jnp.float32)
    exact, rough = (np.asarray(filtered(logits, settings_of(params, VOCAB), rough=rough)) for rough in (False, True))
    more = np.isfinite(rough) & ~np.isfinite(exact)
    assert (np.isfinite(rough) >= np.isfinite(exact)).all() and 0 < more.sum() < 0.01 * more.size
    last = np.min(exact, -1, where=np.isfinite(exact), initial=np.inf, keepdims=True)
    assert (np.asarray(logits) >= last - 1.001 / STEPS_PER_NAT)[more].all()
