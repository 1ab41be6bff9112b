"""Rules of acceptance on given distributions, against what is known of them."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.distributions import accept_length, calibration_error, logits_on_text, rejection, rules
from jaxspec.models.layers import causal_metadata
from jaxspec.testing import engine_target, random_block, random_head
from tests.sets import exhaustive

LEVELS, POSITIONS, VOCAB = 2, 400, 12


def random_distributions(scale: float) -> tuple[jnp.ndarray, jnp.ndarray]:
    """p, and a q that differs from it more the larger the scale is."""
    rng = np.random.default_rng(0)
    logits = 1.5 * rng.normal(size=(LEVELS, POSITIONS, VOCAB))
    other = logits + scale * rng.normal(size=logits.shape)
    return tuple(jax.nn.log_softmax(jnp.asarray(each, jnp.float32)) for each in (logits, other))


def test_with_one_child_rejection_sampling_accepts_what_both_distributions_share():
    log_p, log_q = random_distributions(0.7)
    found = rules(log_p, log_q, jax.random.key(0), children=1)
    shared = jnp.minimum(jnp.exp(log_p), jnp.exp(log_q)).sum(-1)
    assert abs(found.rejection.mean() - shared.mean()) < 0.01
    assert (found.coupled.mean(1) >= (shared / (2 - shared)).mean(1) - 0.02).all(), "(1 - TV) / (1 + TV) is the least"
    assert found.likeliest.mean() < found.coupled.mean() < found.rejection.mean()


@pytest.mark.parametrize("children", [1, 3])
def test_equal_distributions_are_always_accepted(children):
    log_p, _ = random_distributions(0.0)
    found = rules(log_p, log_p, jax.random.key(0), children=children)
    np.testing.assert_allclose(found.rejection, 1, atol=1e-4)
    assert (found.coupled == 1).all() and (found.likeliest < 1).any()


def test_the_docstrings_example_of_rejection():
    log_p, log_q = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([1.0, 0.0]))
    assert rejection(log_p, log_q, jnp.array([0])) == pytest.approx(0.5)
    assert rejection(log_p, log_q, jnp.array([0, 1])) == pytest.approx(1.0, abs=1e-6)


def test_lengths_and_errors_are_counted_by_hand():
    assert accept_length(np.array([[1.0, 0.5], [0.5, 1.0]])) == pytest.approx(1 + (1 + 0.5 + 0.5 + 0.5) / 2)
    assert calibration_error(np.array([0.9, 0.9, 0.1, 0.1]), np.array([1.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)


def test_the_first_level_has_the_logits_of_a_whole_forward():
    class Loaded:
        target = engine_target(vocab_size=64)
        head = random_head(target.config, draft_vocab_size=40)

    tokens = jnp.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]])
    of_target, of_head = logits_on_text(Loaded, (Loaded.target.params, Loaded.head.params), tokens)
    target = Loaded.target.merge(Loaded.target.params)
    expected = target.logits(target(tokens, causal_metadata(1, 12)).hidden)[0]
    np.testing.assert_allclose(of_target[0], expected[1 : 1 + of_target.shape[1]], atol=1e-4)
    np.testing.assert_allclose(of_target[2], expected[3 : 3 + of_target.shape[1]], atol=1e-4)
    assert (jnp.isfinite(of_head).sum(-1) == 40).all()


@pytest.mark.parametrize("rank", [exhaustive(None), 4])
def test_a_block_reads_the_text_up_to_its_root(rank):
    """And a DSpark head the true token before each draft, too."""
    target = engine_target()
    loaded = SimpleNamespace(target=target, head=random_block(target.config, markov_rank=rank, block_size=3))
    first = jnp.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]])
    logits = jax.jit(lambda tokens: logits_on_text(loaded, (target.params, loaded.head.params), tokens))
    (of_target, before), (_, after) = logits(first), logits(first.at[0, 5].set(7))
    steps = 2 if rank is None else 3
    assert of_target.shape == before.shape == (steps, 7, target.config.vocab_size)
    changed = np.abs(before - after).max(-1) > 1e-5
    assert changed[:, 4:].all()  # the root of the fifth is token 5
    reads = [[place + 1 + step == 5 for place in range(4)] for step in range(steps)]
    assert changed[:, :4].tolist() == (reads if rank else [[False] * 4] * steps)
