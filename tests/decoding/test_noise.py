"""Noise knows the seed, the position and the token only, and what is drawn from few candidates is what all noise would give."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.noise import (
    argmax,
    argmax_in_two_passes,
    best_candidate,
    bound,
    draw,
    draw_from_all,
    gumbel,
    noise_at,
    position_key,
    random_bits,
)
from tests.sets import exhaustive

VOCAB = 49_152
"""SmolLM2's."""


def seeds(*values: int) -> jnp.ndarray:
    return jnp.array([[value >> 32, value & 0xFFFFFFFF] for value in values], jnp.uint32)


def noise(seed: int, position: int, count: int) -> jnp.ndarray:
    return noise_at(jnp.array(position), seeds(seed)[0], jnp.arange(count))


def test_noise_depends_on_seed_and_position_only():
    base = noise(5, 17, 50)
    assert jnp.array_equal(base, noise(5, 17, 50))
    assert not jnp.array_equal(base, noise(5, 18, 50)) and not jnp.array_equal(base, noise(5 + 2**32, 17, 50))
    some = jnp.array([30, 2, 49])
    assert jnp.array_equal(noise_at(jnp.array(17), seeds(5)[0], some), base[some])


def test_random_words_are_those_of_jax():
    for seed, position in ((0, 0), (5, 17), (2**64 - 1, 2**31 - 1), (2**32, 1), (0x123456789ABCDEF, 4095)):
        words, place = seeds(seed)[0], jnp.array(position, jnp.int32)
        key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), place)
        assert jnp.array_equal(position_key(words, place), jax.random.key_data(key))
        found = random_bits(position_key(words, place), jnp.arange(5003))
        assert jnp.array_equal(found, jax.random.bits(key, (5003,), jnp.uint32))


def test_the_largest_noise_is_as_large_as_it_should_be():
    """Of 50 million draws it is about 17.7; below 16 only once in 250 times. No two are equal among the largest."""
    drawn = jax.jit(jax.vmap(lambda position: jax.lax.top_k(noise(5, position, 1 << 20), 2)[0]))
    largest = np.concatenate([drawn(jnp.arange(first, first + 8)) for first in range(0, 48, 8)])
    assert 16 < largest.max() < 23 and (largest[:, 0] > largest[:, 1]).all()


def test_noise_is_standard_gumbel():
    found = np.concatenate([noise(seed, 0, 5000) for seed in range(8)])
    assert abs(found.mean() - 0.5772) < 0.03 and abs(found.var() - np.pi**2 / 6) < 0.06


def patterns() -> np.ndarray:
    """The bits around every power of two and every rounding of float32, both ends, and a million random ones of all sizes."""
    powers = 2 ** np.arange(33, dtype=np.int64)
    near = powers[:, None] + np.arange(-600, 600)
    halves = powers[24:32, None] + 2 ** np.arange(0, 8)[:, None] * np.arange(-3, 4)
    random = np.random.default_rng(0).integers(0, 2**32, 10**6) >> np.random.default_rng(1).integers(0, 32, 10**6)
    found = np.concatenate([near.ravel(), halves.ravel(), random])
    return np.unique(found[(found >= 0) & (found < 2**32)]).astype(np.uint32)


def test_no_noise_is_above_its_bound():
    """Nor is it far below where it decides."""
    bits = jnp.asarray(patterns())
    bounds, noises = jax.jit(bound)(bits), jax.jit(gumbel)(bits)
    assert (bounds > noises).all() and {0, 1, 2**31, 2**32 - 1} <= set(np.asarray(bits).tolist())
    assert (bounds - noises)[noises > 3].max() < 0.75
    np.testing.assert_allclose(bound(jnp.array([0, 1, 2**31], jnp.uint32)), [22.87, 22.18, 0.69], atol=0.01)
    np.testing.assert_allclose(gumbel(jnp.array([0, 1, 2**31], jnp.uint32)), [22.87, 21.78, 0.37], atol=0.01)


def test_the_likeliest_token_is_found_in_two_passes():
    """The first of equals, wherever it is; also of rows that are -inf but for one token, or everywhere."""
    random = np.random.default_rng(0)
    logits = random.integers(-3, 4, (64, 3, 1001)).astype(np.float32)
    logits[1], logits[2, :, :-1], logits[3, 0] = -np.inf, -np.inf, 0
    logits[4, 1, [5, 9]], logits[5] = [-0.0, 0.0], -np.abs(logits[5])
    given = jnp.asarray(logits)
    assert (jax.jit(argmax_in_two_passes)(given) == argmax(given)).all()


def rows(first: int, count: int, vocab_size: int, scale: float) -> tuple[jnp.ndarray, ...]:
    """Scores, temperatures, seeds and positions of `count` requests, each like no other."""
    random = np.random.default_rng(first)
    scores = scale * random.standard_normal((count, 1, vocab_size), np.float32)
    temperature = random.choice([0, 0.3, 0.7, 1, 1.5, 20], count).astype(np.float32)
    words, positions = random.integers(0, 2**32, (count, 2)), random.integers(0, 2**17, (count, 1))
    return jnp.asarray(scores), jnp.asarray(temperature), jnp.asarray(words, jnp.uint32), jnp.asarray(positions, jnp.int32)


COMPILED = [jax.jit(draw), jax.jit(draw_from_all)]


@pytest.mark.parametrize(
    ("vocab_size", "count"), [(VOCAB, 128), exhaustive(VOCAB, 10_000), *((size, 128) for size in (50, 512, 513, 5003))]
)
def test_few_candidates_give_what_all_noise_gives(vocab_size, count):
    """From no preference at all to one token that is nearly certain. Most vocabularies do not divide into blocks; the smaller ones
    have no more blocks than there are candidates."""
    for number, first in enumerate(range(0, count, 32)):
        inputs = rows(first, min(32, count - first), vocab_size, scale=[0.0, 1.0, 3.0, 10.0][number % 4])
        found, expected = (each(*inputs) for each in COMPILED)
        assert jnp.array_equal(found, expected), first


def test_dropped_tokens_and_rounded_scores():
    """Of most tokens filters leave -inf, and scores of 8 bits are often equal."""
    scores, _, *keys = rows(2, 64, 5003, 3.0)
    hot = jnp.ones(64)
    few = jnp.where(scores >= jax.lax.top_k(scores, 3)[0][..., 2:], scores, -jnp.inf)
    for each in (few, scores.astype(jnp.bfloat16).astype(jnp.float32), few.at[:, :, 7].set(jnp.inf), jnp.full_like(few, -jnp.inf)):
        found, expected = (compiled(each, hot, *keys) for compiled in COMPILED)
        assert jnp.array_equal(found, expected)
    assert (COMPILED[0](few, hot, *keys) != COMPILED[0](few, 0 * hot, *keys)).any()


@partial(jax.jit, static_argnums=1)
def surely(scores: jnp.ndarray, count: int) -> tuple[jnp.ndarray, jnp.ndarray]:
    """For these scores at many positions at temperature 1: the best candidates, and whether they are sure."""
    return jax.lax.map(lambda position: best_candidate(scores, jnp.array(1.0), seeds(3)[0], position), jnp.arange(count))


@pytest.mark.parametrize("scale", [0.0, 2.0])
def test_nearly_all_candidates_are_sure(scale):
    _, is_sure = surely(scale * jax.random.normal(jax.random.key(0), (VOCAB,)), 300)
    assert is_sure.mean() > 0.99


def test_what_is_not_sure_is_left_to_the_full_pass():
    """Equal sums, bounds that hide the winner, infinities, and scores that are not numbers."""
    flat, words, at, ids = jnp.zeros(VOCAB), seeds(3), jnp.array([[0]]), jnp.arange(VOCAB)
    of_token = noise_at(at[0, 0], words[0], ids)
    bounds = bound(random_bits(position_key(words[0], at[0, 0]), ids))
    looseness = jnp.argsort(of_token - bounds)
    hidden = (flat - 30).at[looseness[:40]].set(1 - bounds[looseness[:40]]).at[looseness[-1]].set(0.9 - bounds[looseness[-1]])
    doubtful = {
        "equal": -of_token,
        "two are equal": jnp.where(jnp.isin(ids, jnp.array([77, 40_000])), 30 - of_token, flat),
        "hidden": hidden,
        "infinite": flat.at[jnp.array([9, 5])].set(jnp.inf),
        "all dropped": jnp.full(VOCAB, -jnp.inf),
        "not numbers": jnp.full(VOCAB, jnp.nan),
    }
    for name, scores in doubtful.items():
        _, is_sure = surely(scores, 1)
        assert not is_sure[0], name
        found, expected = (each(scores[None, None], jnp.ones(1), words, at) for each in COMPILED)
        assert jnp.array_equal(found, expected), name
    assert COMPILED[0](hidden[None, None], jnp.ones(1), words, at) == looseness[-1]


def test_a_cpu_sorts_no_vocabulary_for_its_candidates():
    compiled = COMPILED[0].lower(*rows(0, 2, VOCAB, 1.0)).compile().as_text()
    assert "TopK" in compiled and " sort(" not in compiled
