"""Sampled speculation has exactly the target's law: chi-square over a tiny vocabulary."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.config import SpecConfig
from jaxspec.models.eagle3 import default_captured_layers
from jaxspec.models.layers import causal_rows
from jaxspec.models.llama import Llama
from jaxspec.models.loaded import LoadedModel, take_apart
from jaxspec.sampling import SamplingKind
from jaxspec.spec.cycle import REPORT_HEADER, Models, cycle
from jaxspec.spec.prefill import Chunk, prefill
from jaxspec.spec.state import MAX_STOP_TOKENS, Caches, empty_sequences
from jaxspec.testing import random_head, tiny_config
from jaxspec.typing import KeysValues

VOCAB, PROMPT, TEMPERATURE = 6, [1, 4, 2, 5], 0.7
BATCH, ROUNDS, PAGE = 256, 40, 8
SPEC = SpecConfig(3, 3, 8)


def flat_target() -> LoadedModel:
    """Logits within a few units, so that every token has a chance and counts are large enough to test."""
    config = tiny_config(vocab_size=VOCAB)
    target = take_apart(Llama(config, rngs=nnx.Rngs(3)), config)
    return dataclasses.replace(target, params=jax.tree.map(lambda array: array * 6 if array.ndim == 2 else array, target.params))


def draw(target: LoadedModel, head: LoadedModel) -> tuple[np.ndarray, float]:
    """BATCH * ROUNDS continuations of three tokens [draws, 3], and the mean number of tokens per cycle."""

    def models(params):
        return Models(target.merge(params[0]), head.merge(params[1]), default_captured_layers(8))

    @jax.jit
    def continuations(params, seeds):
        pages = jnp.zeros((2 * BATCH, PAGE, 2, 8))
        caches = Caches(tuple(KeysValues(pages, pages) for _ in range(8)), (KeysValues(pages, pages),))
        rows, table = jnp.arange(BATCH), jnp.arange(2 * BATCH).reshape(BATCH, 2)
        chunk = Chunk(
            row=rows,
            page_table=table,
            tokens=jnp.broadcast_to(jnp.array(PROMPT), (BATCH, len(PROMPT))),
            first_slot=jnp.zeros(BATCH, jnp.int32),
            size=jnp.full(BATCH, len(PROMPT)),
            is_last=jnp.ones(BATCH, bool),
            temperature=jnp.full(BATCH, TEMPERATURE),
            seed=seeds,
            max_tokens=jnp.full(BATCH, 100),
            stop_tokens=jnp.full((BATCH, MAX_STOP_TOKENS), -1),
        )
        empty = empty_sequences(BATCH, 32, 96, jnp.dtype(jnp.float32))
        first = prefill(models(params), caches, empty, chunk, kind=SamplingKind.TEMPERATURE)
        sampled = {"spec": SPEC, "kind": SamplingKind.TEMPERATURE}
        second = cycle(models(params), first.caches, first.sequences, rows, table, **sampled)
        third = cycle(models(params), second.caches, second.sequences, rows, table, **sampled)
        return first.report, second.report, third.report

    draws, emitted = [], []
    for number in range(ROUNDS):
        seeds = np.arange(number * BATCH, (number + 1) * BATCH, dtype=np.uint32)
        first, second, third = map(np.asarray, continuations((target.params, head.params), np.stack([seeds * 0, seeds], 1)))
        for a, b, c in zip(first, second, third, strict=True):
            tokens = [a[REPORT_HEADER], *b[REPORT_HEADER : REPORT_HEADER + b[0]], *c[REPORT_HEADER : REPORT_HEADER + c[0]]]
            draws.append(tokens[:3])
        emitted.append(second[:, 0])
    return np.array(draws), float(np.mean(emitted))


def next_token_law(target: LoadedModel, tokens: list[int]) -> np.ndarray:
    module = target.merge(target.params)
    hidden = module(jnp.array([tokens]), causal_rows(1, len(tokens))).hidden
    return np.asarray(jax.nn.softmax(module.logits(hidden)[0, -1] / TEMPERATURE), np.float64)


def chi_square_is_plausible(counts: np.ndarray, law: np.ndarray) -> bool:
    """Below the 1 - 1e-4 quantile (Wilson-Hilferty); cells that expect fewer than 5 are one cell."""
    expected = law * counts.sum()
    rare = expected < 5
    counts, expected = (np.append(values[~rare], values[rare].sum()) for values in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic, freedom = ((counts - expected) ** 2 / expected).sum(), len(counts) - 1
    assert freedom >= 3
    return statistic < freedom * (1 - 2 / (9 * freedom) + 3.72 * np.sqrt(2 / (9 * freedom))) ** 3


def test_first_token_and_pairs_have_the_targets_law():
    target = flat_target()
    draws, mean_emitted = draw(target, random_head(target.config, draft_vocab_size=None))
    assert mean_emitted > 1.3, "drafts are hardly ever accepted: this would test plain sampling only"

    first = next_token_law(target, PROMPT)
    assert chi_square_is_plausible(np.bincount(draws[:, 0], minlength=VOCAB), first)
    second = np.array([next_token_law(target, [*PROMPT, token]) for token in range(VOCAB)])
    pairs = (first[:, None] * second).ravel()
    assert chi_square_is_plausible(np.bincount(draws[:, 0] * VOCAB + draws[:, 1], minlength=VOCAB**2), pairs)
    third = np.array([next_token_law(target, [*PROMPT, a, b]) for a in range(VOCAB) for b in range(VOCAB)])
    triples = (pairs[:, None] * third).ravel()
    codes = (draws[:, 0] * VOCAB + draws[:, 1]) * VOCAB + draws[:, 2]
    assert chi_square_is_plausible(np.bincount(codes, minlength=VOCAB**3), triples)


def test_the_test_can_fail():
    """A law that is off by five percent of one token is told apart with this many draws."""
    law = np.array([0.3, 0.25, 0.2, 0.15, 0.06, 0.04])
    skewed = law * [1.05, 1, 1, 1, 1, 1] / (law * [1.05, 1, 1, 1, 1, 1]).sum()
    counts = np.random.default_rng(0).multinomial(BATCH * ROUNDS * 4, skewed)
    assert not chi_square_is_plausible(counts, law)
