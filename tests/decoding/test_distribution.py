"""Sampled speculation has exactly the distribution that SamplingParams describes: chi-square over a tiny vocabulary."""

import dataclasses
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.decoding.cycle import cycle
from jaxspec.decoding.drafter import Models
from jaxspec.decoding.prefill import prefill
from jaxspec.decoding.sampling import Thresholds
from jaxspec.decoding.settings import SamplingKind
from jaxspec.decoding.state import admit
from jaxspec.decoding.verify import REPORT_HEADER
from jaxspec.models.layers import causal_metadata
from jaxspec.models.llama import Llama
from jaxspec.models.registry import LoadedHead, LoadedTarget, split_model
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import random_eagle, tiny_config
from jaxspec.tree_shape import TreeShape
from tests.decoding.distribution_in_numpy import distribution, threshold_distribution
from tests.decoding.rows import admission_of, chunk_of, models_of, poisoned_state
from tests.sets import exhaustive

VOCAB, PROMPT = 8, [1, 4, 2, 4, 5]
BATCH, ROUNDS, PAGE = 512, 20, 8
SPEC, ONE_LEVEL = TreeShape(3, 3, 8), TreeShape(1, 3, 4)
LOSSY = Thresholds(0.35, 0.8)

FILTERS = {"temperature": 0.7, "top_k": 4, "top_p": 0.85, "min_p": 0.3}
NARROWER = {"temperature": 0.7, "top_k": 5, "top_p": 0.7, "min_p": 0.3}  # here top_p takes what the others leave
ADJUSTMENTS = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.4,
    "logit_bias": {0: 0.8, 3: -0.7},
    "bad_token_ids": [6],
    "stop_token_ids": [2],
    "min_tokens": 2,  # the third token may be the stop token, the first two can't
}
SETTINGS = {
    "temperature": SamplingParams(temperature=0.7),
    "top_k": SamplingParams(top_k=3),
    "top_p": SamplingParams(top_p=0.8),
    "min_p": SamplingParams(min_p=0.2),
    "filters": SamplingParams(**FILTERS),
    "narrower filters": SamplingParams(**NARROWER),
    "adjustments": SamplingParams(**ADJUSTMENTS),
    "everything": SamplingParams(**FILTERS, **ADJUSTMENTS),
    "allowed": SamplingParams(allowed_token_ids=[0, 1, 4, 5, 7]),
}


class Draws(NamedTuple):
    """What BATCH * ROUNDS requests with different seeds got."""

    tokens: np.ndarray
    """The first three tokens of each, [draws, 3]."""
    mean_emitted: float
    """Tokens per cycle."""
    children: np.ndarray
    """The tree's other nodes, by first token, [VOCAB, nodes]: each text before it has one lossy tree; others depend on noise."""


@cache
def models() -> tuple[LoadedTarget, LoadedHead]:
    """Logits within a few units, so that every token has a chance and counts are large enough to test."""
    config = tiny_config(vocab_size=VOCAB, num_layers=1)
    target = split_model(Llama(config, rngs=nnx.Rngs(3)))
    target = dataclasses.replace(target, params=jax.tree.map(lambda array: array * 6 if array.ndim == 2 else array, target.params))
    return target, random_eagle(config)


@cache
def program(spec: TreeShape, thresholds: Thresholds | None):
    """Prefill and two cycles, compiled once; what is sampled, and how, is data."""
    target, head = models()
    state = poisoned_state(target, head, rows=BATCH, pages=2 * BATCH, page_size=PAGE, max_length=2 * PAGE)
    rows, table = jnp.arange(BATCH), jnp.arange(2 * BATCH).reshape(BATCH, 2)

    def merged(params) -> Models:
        return models_of(target, head, params)._replace(thresholds=thresholds)

    @jax.jit
    def begin(params, state, admission):
        return prefill(merged(params), admit(state, admission), chunk_of(PROMPT, table))

    @jax.jit
    def go_on(params, state):
        return cycle(merged(params), state, rows, table, tree=spec)

    def continuations(admission):
        params = target.params, head.params
        first = begin(params, state, admission)
        second = go_on(params, first.state)
        third = go_on(params, second.state)
        return first.report, second.report, third.report, second.drafted.tokens

    return continuations


@cache
def draws(params: SamplingParams, spec: TreeShape = SPEC, thresholds: Thresholds | None = None) -> Draws:
    admission = admission_of(params, PROMPT, rows=BATCH, max_length=2 * PAGE, vocab_size=VOCAB)
    texts, emitted, children = [], [], np.zeros((VOCAB, spec.num_draft_tokens - 1), int)
    for number in range(ROUNDS):
        seeds = np.arange(number * BATCH, (number + 1) * BATCH, dtype=np.uint32)
        seeded = admission.settings._replace(seed=jnp.asarray(np.stack([seeds * 0, seeds], 1)))
        first, second, third, trees = map(np.asarray, program(spec, thresholds)(admission._replace(settings=seeded)))
        for a, b, c in zip(first, second, third, strict=True):
            tokens = [a[REPORT_HEADER], *b[REPORT_HEADER : REPORT_HEADER + b[0]], *c[REPORT_HEADER : REPORT_HEADER + c[0]]]
            texts.append(tokens[:3])
        emitted.append(second[:, 0])
        children[trees[:, 0]] = trees[:, 1:]
    return Draws(np.array(texts), float(np.mean(emitted)), children)


@cache
def logits_after_prompt() -> np.ndarray:
    """The target's own, from whole sequences without a cache: [a, b, 3, v] after the prompt, a, and a and b."""
    target, _ = models()
    module = target.merge(target.params)
    texts = [[*PROMPT, a, b] for a in range(VOCAB) for b in range(VOCAB)]
    hidden = module(jnp.array(texts), causal_metadata(len(texts), len(texts[0]))).hidden
    return np.asarray(module.logits(hidden)[:, -3:]).reshape(VOCAB, VOCAB, 3, VOCAB)


def distributions(params: SamplingParams) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the first token [v], of the second given the first [v, v], of the third given both [v, v, v]."""
    logits, tokens = logits_after_prompt(), range(VOCAB)
    first = distribution(logits[0, 0, 0], PROMPT, len(PROMPT), params)
    second = [distribution(logits[a, 0, 1], [*PROMPT, a], len(PROMPT), params) for a in tokens]
    third = [[distribution(logits[a, b, 2], [*PROMPT, a, b], len(PROMPT), params) for b in tokens] for a in tokens]
    return first, np.array(second), np.array(third)


def chi_square_is_plausible(counts: np.ndarray, probabilities: np.ndarray) -> bool:
    """Below the 1 - 1e-4 quantile (Wilson-Hilferty); cells that expect fewer than 5 are one cell, impossible ones are empty."""
    if counts[probabilities == 0].any():
        return False
    expected = probabilities * counts.sum()
    rare = expected < 5
    counts, expected = (np.append(values[~rare], values[rare].sum()) for values in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic, freedom = ((counts - expected) ** 2 / expected).sum(), len(counts) - 1
    if freedom == 0:
        return True
    return statistic < freedom * (1 - 2 / (9 * freedom) + 3.72 * np.sqrt(2 / (9 * freedom))) ** 3


def assert_distribution(tokens: np.ndarray, params: SamplingParams) -> None:
    """First tokens, pairs and triples are plausible draws."""
    first, second, third = distributions(params)
    pairs = first[:, None] * second
    triples = pairs[:, :, None] * third
    for depth, expected in enumerate((first, pairs, triples), 1):
        counts = np.zeros(expected.shape, int)
        np.add.at(counts, tuple(tokens[:, :depth].T), 1)
        assert chi_square_is_plausible(counts.ravel(), expected.ravel()), f"{depth} tokens"


ALONE = ("top_k", "top_p", "min_p", "filters")  # "narrower filters" has them together


@pytest.mark.parametrize(
    ("name", "thresholds"),
    [
        *((exhaustive if name in ALONE else pytest.param)(name, None) for name in SETTINGS),
        *(exhaustive(name, Thresholds(1.0, 1.0)) for name in ("temperature", "filters", "everything")),
    ],
)
def test_speculation_has_the_targets_distribution(name, thresholds):
    """With lossy acceptance too, if its thresholds are one."""
    got = draws(SETTINGS[name], thresholds=thresholds)
    assert got.mean_emitted > 1.2, "drafts are hardly ever accepted: this would test plain sampling only"
    assert_distribution(got.tokens, SETTINGS[name])


@pytest.mark.parametrize(
    ("name", "field", "off"),
    [
        *[("filters", name, off) for name, off in {"temperature": 1.0, "top_k": -1, "min_p": 0.0}.items()],
        *[("narrower filters", name, off) for name, off in {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}.items()],
        *[("adjustments", name, SamplingParams.__dataclass_fields__[name].default) for name in ADJUSTMENTS],
    ],
)
def test_every_setting_matters(name, field, off):
    """Without any one of them the distribution would be another, which these draws are not from."""
    others = {"min_tokens": 0} if field == "stop_token_ids" else {}
    without = dataclasses.replace(SETTINGS[name], **{field: off, **others})
    with pytest.raises(AssertionError):
        assert_distribution(draws(SETTINGS[name], thresholds=None).tokens, without)  # as above: they are drawn once


def test_the_test_can_fail():
    """A distribution that is off by five percent of one token is told apart with this many draws."""
    probabilities = np.array([0.3, 0.25, 0.2, 0.15, 0.06, 0.04])
    skewed = probabilities * [1.05, 1, 1, 1, 1, 1] / (probabilities * [1.05, 1, 1, 1, 1, 1]).sum()
    counts = np.random.default_rng(0).multinomial(BATCH * ROUNDS * 4, skewed)
    assert not chi_square_is_plausible(counts, probabilities)


@pytest.mark.variants
@pytest.mark.exhaustive
def test_lossy_acceptance_accepts_more_and_changes_the_distribution():
    params = SETTINGS["temperature"]
    lossless, lossy = (draws(params, thresholds=Thresholds(single)) for single in (1.0, 0.12))
    assert lossy.mean_emitted > lossless.mean_emitted + 0.2
    with pytest.raises(AssertionError, match="2 tokens"):  # the first comes from the prefill, which knows no drafts
        assert_distribution(lossy.tokens, params)


@pytest.mark.variants
@pytest.mark.parametrize("name", ["temperature", "filters", "everything"])
def test_lossy_acceptance_has_the_documented_distribution(name):
    """Of a tree of one level the second token's distribution is known exactly."""
    single, acc = LOSSY.single, LOSSY.acc
    got = draws(SETTINGS[name], ONE_LEVEL, LOSSY)
    first, second, _ = distributions(SETTINGS[name])
    lossy_second = np.array([threshold_distribution(second[a], got.children[a].tolist(), single, acc) for a in range(VOCAB)])
    counts = np.bincount(got.tokens[:, 0] * VOCAB + got.tokens[:, 1], minlength=VOCAB**2)
    assert chi_square_is_plausible(counts, (first[:, None] * lossy_second).ravel())
    assert not chi_square_is_plausible(counts, (first[:, None] * second).ravel())


@pytest.mark.variants
def test_greedy_requests_stay_greedy_under_lossy_acceptance():
    greedy = SamplingParams(temperature=0)
    lossy = draws(greedy, ONE_LEVEL, LOSSY)
    assert (lossy.tokens == lossy.tokens[0]).all()
    assert_distribution(lossy.tokens, greedy)


def test_all_kinds_but_greedy_are_tried():
    kinds = {SamplingKind.of(params) for params in SETTINGS.values()}
    assert kinds == set(SamplingKind) - {SamplingKind.GREEDY}
