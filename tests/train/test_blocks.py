"""Training block heads: what is drafted in training is what the drafter drafts, and what counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.block_drafter import BlockDrafter, block_logits
from jaxspec.decoding.drafter import NewTokens
from jaxspec.decoding.state import Sequences, Sizes, State, gather, put_sequences
from jaxspec.engine.models import new_state
from jaxspec.testing import engine_target, random_block
from jaxspec.train.blocks import TRAINING_BLOCKS, decay_of, drafted, drawn_roots, unroll_blocks
from jaxspec.train.ttt import Rows, teach
from tests.sets import exhaustive

WIDTH, PAGE, PAGES = 24, 4, 8
TARGET = engine_target()
HEADS = {"DFlash": {}, "JetSpec": {"causal": (True, True)}, "windows": {"causal": (True, False), "windows": (9, 7)}}
ROOTS = [[20, 3, 12, 9], [16, 5, 21, 2]]


def rows() -> Rows:
    """The first row has a conversation of 9 tokens and one of 15; the second one of 18, and padding."""
    tokens = np.random.default_rng(0).integers(1, 60, (2, WIDTH)).astype(np.int32)
    segments = np.array([[1] * 9 + [2] * 15, [1] * 18 + [0] * 6], np.int32)
    positions = np.array([[*range(9), *range(15)], [*range(18), *[0] * 6]], np.int32)
    learnt = (segments > 0) & (positions > 2)
    learnt[0, [8, 23]] = learnt[1, [10, 17]] = False  # the ends of conversations, and a user's token
    return Rows(tokens, segments, positions, learnt)


def by_drafting(drafter: BlockDrafter, tokens: jax.Array, features: jax.Array, lengths: jax.Array) -> jax.Array:
    """The logits [b, steps, v] after texts [b, WIDTH] of these lengths and a root, whose features are [b, WIDTH, f]."""
    count, roots = len(lengths), jnp.take_along_axis(tokens, lengths[:, None], 1)[:, 0]
    state: State = new_state(TARGET.config, drafter, Sizes(count, count * PAGES, PAGE, PAGES * PAGE, 1, jnp.float32))
    rows, ones = jnp.arange(count), jnp.ones(count, jnp.int32)
    state = put_sequences(state, rows, Sequences.of(lengths, roots, lengths + 9, jnp.zeros(count, bool)))
    batch, target = gather(state, rows, jnp.arange(count * PAGES).reshape(count, PAGES)), TARGET.merge(TARGET.params)
    new = NewTokens(tokens[:, 1:], features[:, :-1], ones, ones, lengths)
    state = state._replace(draft=drafter.absorb(target, state, batch, new))
    return block_logits(drafter.head, target, state, batch, drafter.config.max_steps)


@pytest.mark.variants
@pytest.mark.parametrize("name", ["windows", exhaustive("DFlash"), exhaustive("JetSpec")])
def test_a_block_in_training_is_that_of_the_drafter(name):
    """After every root, whatever else is in the row, and with the losses and right drafts that follow."""
    head, given, roots = random_block(TARGET.config, **HEADS[name]), rows(), jnp.array(ROOTS)
    drafter, steps = BlockDrafter.of(head), head.config.max_steps

    @jax.jit
    def train(given: Rows):
        target, learner = TARGET.merge(TARGET.params), head.merge(head.params, TRAINING_BLOCKS)
        taught = teach(target, head.config.captured_layers, given)
        hidden = drafted(learner, target, taught.features, given, roots)
        out = unroll_blocks(learner, target, taught, given, roots, "cross-entropy")
        return taught, target.logits(taught.hidden), target.logits(hidden), out

    taught, teacher, logits, out = train(given)
    places = [(row, column) for row, column in np.ndindex(roots.shape) if given.segments[row, ROOTS[row][column]]]
    texts = [
        [*range(ROOTS[row][column] - given.positions[row, ROOTS[row][column]], ROOTS[row][column] + 1)] for row, column in places
    ]
    padded = np.array([text + [0] * (WIDTH - len(text)) for text in texts])
    of_row = np.array([row for row, _ in places])[:, None]
    inputs = given.tokens[of_row, padded], taught.features[of_row, padded], np.array([len(text) - 1 for text in texts], np.int32)
    drafts = jax.jit(lambda *inputs: by_drafting(drafter, *inputs))(*inputs)
    losses, counted = np.zeros(steps), np.zeros((steps, 2, 4), bool)
    for (row, column), expected in zip(places, drafts, strict=True):
        root = ROOTS[row][column]
        np.testing.assert_allclose(logits[row, column], expected, atol=2e-4)
        log_probs = np.array(jax.nn.log_softmax(expected))
        for step in range(steps):
            goal = root + step
            if goal >= WIDTH or not given.learnt[row, goal] or given.segments[row, goal] != given.segments[row, root]:
                break
            counted[step, row, column] = True
            losses[step] -= np.sum(np.array(jax.nn.softmax(teacher[row, goal])) * log_probs[step]) / roots.size
            assert out.correct[step, row, column] == (np.argmax(expected[step]) == taught.choice[row, goal])
    assert 0 < counted.sum() < counted.size
    np.testing.assert_array_equal(out.counted, counted)
    np.testing.assert_allclose(out.losses, losses, rtol=1e-4)
    np.testing.assert_allclose(out.loss, sum(decay_of(head.config) ** step * loss for step, loss in enumerate(losses)), rtol=1e-4)


def test_roots_are_learnt_tokens_and_others_each_step():
    given = rows()
    first, again, other = (np.array(drawn_roots(given, 6, step, seed=1)) for step in (0, 0, 1))
    assert first.shape == (2, WIDTH // 6) and (first == again).all() and (first != other).any()
    assert np.take_along_axis(given.learnt, first, 1).all() and all(len(set(row)) == len(row) for row in first.tolist())
    few = given._replace(learnt=given.learnt & (given.positions == 3))
    assert np.take_along_axis(few.learnt, np.array(drawn_roots(few, 6, 0, seed=1)), 1).sum(1).tolist() == [2, 1]
