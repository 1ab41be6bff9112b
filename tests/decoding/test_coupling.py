"""Coupled drafts: a head that knows the target's logits drafts the target's tokens, and the sharpness finds heads that do not."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.coupling import LEAST, LIKELY, MOST, Prediction, boundary, calibrated, log_total, log_total_in_one_pass
from jaxspec.decoding.cycle import propose
from jaxspec.decoding.drafter import Models
from jaxspec.decoding.noise import noise_at
from jaxspec.decoding.settings import SamplingKind, highest_kind, packed, unpacked
from jaxspec.decoding.state import Batch, State, admit, gather
from jaxspec.decoding.tree import root_only
from jaxspec.decoding.verify import choose_tokens
from jaxspec.models.head import DraftHead
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import engine_target, random_eagle, random_head
from jaxspec.tree_shape import TreeShape
from tests.decoding.rows import admission_of, models_of, poisoned_state

ROWS, DEPTHS, VOCAB, TEXT = 6, 3, 64, [3, 1, 4, 1, 5, 9]
KINDS = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.8),
    "hot": SamplingParams(temperature=1.7),
    "top_k": SamplingParams(top_k=4),
    "top_p": SamplingParams(top_p=0.6),
    "min_p": SamplingParams(min_p=0.2),
    "allowed": SamplingParams(allowed_token_ids=[3, 8, 20, 21, 40]),
    "bias": SamplingParams(logit_bias={7: 5.0, 9: -5.0}),
    "penalties": SamplingParams(repetition_penalty=1.4, frequency_penalty=0.7, presence_penalty=0.5),
    "greedy penalties": SamplingParams(temperature=0, repetition_penalty=3.0),
    "min_tokens": SamplingParams(stop_token_ids=list(range(10)), min_tokens=8),
    "mixture": SamplingParams(temperature=0.9, top_p=0.8, min_p=0.02, presence_penalty=0.5, logit_bias={7: 2.0}),
}


@cache
def heads() -> dict[str, tuple[Models, DraftHead]]:
    """One with the target's vocabulary, one with its own."""
    target = engine_target(vocab_size=VOCAB)
    own = random_head(target.config, draft_vocab_size=40)
    ids = np.random.default_rng(0).permutation(VOCAB)[: len(own.params["draft_to_target"])]  # not the first tokens in order
    own = dataclasses.replace(own, params=own.params | {"draft_to_target": jnp.asarray(ids, jnp.int32)})
    both = {"whole": random_eagle(target.config), "own": own}
    return {name: (models_of(target, head), head.merge(head.params)) for name, head in both.items()}


def running(params: SamplingParams) -> State:
    """ROWS requests in the middle of decoding, each with a seed of its own."""
    target = engine_target(vocab_size=VOCAB)
    state = poisoned_state(target, random_eagle(target.config), rows=ROWS, pages=ROWS, page_size=16, max_length=16)
    admission = admission_of(params, TEXT[:3], rows=ROWS, max_length=16, vocab_size=VOCAB)
    seeds = jnp.stack([jnp.zeros(ROWS, jnp.uint32), jnp.arange(ROWS, dtype=jnp.uint32)], 1)
    state = admit(state, admission._replace(settings=admission.settings._replace(seed=seeds)))
    history = state.history.at[:, : len(TEXT)].set(jnp.array(TEXT))
    length = jnp.full(ROWS, len(TEXT) - 1)
    return state._replace(history=history, sequences=state.sequences.replaced(length=length, done=jnp.zeros(ROWS, bool)))


def batch_of(state: State) -> Batch:
    return gather(state, jnp.arange(ROWS), jnp.arange(ROWS)[:, None])


def predicted(head: DraftHead, state: State) -> Prediction:
    batch = batch_of(state)
    needed = highest_kind(batch.settings, ~batch.sequences.done)
    return Prediction(needed, state, batch, head.token_map(), state.draft.calibration)


def scores_of(head: DraftHead, state: State, logits: jax.Array) -> jax.Array:
    """The scores after the roots."""
    return predicted(head, state).of_kinds(lambda scores: scores, logits, 0)


@cache
def drafted_and_chosen(vocabulary: str):
    """Compiled once for all kinds of sampling: the head's choice and the target's, given the target's logits of many rounds."""
    _, head = heads()[vocabulary]
    ids = head.token_map()

    @jax.jit
    def run(state, logits):
        batch = batch_of(state)

        def both(logits):
            scores = scores_of(head, state, logits if ids is None else logits[..., ids])
            drafted = head.target_ids(jnp.argmax(scores, -1))
            return drafted, choose_tokens(state, batch, root_only(batch.sequences.root), logits)

        return jax.vmap(both)(logits)

    return run


@cache
def learning(vocabulary: str):
    """Compiled once for all temperatures: the weights after 1500 observations of a head whose logits are multiplied by a factor."""
    models, head = heads()[vocabulary]
    ids = jnp.arange(VOCAB) if head.token_map() is None else head.token_map()

    @jax.jit
    def run(begin, temperature, factor):
        batch = batch_of(begin)

        def observe(state, key):
            logits, errors = (jax.random.gumbel(each, (ROWS, VOCAB)) for each in jax.random.split(key))
            seeds = jax.random.bits(key, (ROWS, 2))
            noise = noise_at(batch.sequences.length + 1, seeds, jnp.arange(VOCAB))
            known = 1.5 * logits[:, ids]
            chosen = ids[jnp.argmax((known + 0.8 * errors[:, ids]) / temperature + noise[:, ids], -1)]
            now = batch._replace(packed_settings=packed(batch.settings._replace(seed=seeds)))
            draft = models.drafter.learn(state, now, factor * known, chosen)
            return state._replace(draft=draft), draft.calibration.weights

        state, steps = jax.lax.scan(observe, begin, jax.random.split(jax.random.key(4), 1500))
        return state.draft.calibration.weights, steps

    return run


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("vocabulary", ["whole", "own"])
def test_with_the_targets_logits_the_head_drafts_the_targets_token(vocabulary, name):
    """At the root, where the head knows all of the context. (Rough cut-offs may let through a token that the target drops.)"""
    _, head = heads()[vocabulary]
    state = running(KINDS[name])
    logits = 2 * jax.random.normal(jax.random.key(1), (40, ROWS, 1, VOCAB))
    ids = head.token_map()
    if ids is not None:  # the target can't choose what the head does not know
        logits = jnp.full_like(logits, -1e9).at[..., ids].set(logits[..., ids])

    drafted, chosen = drafted_and_chosen(vocabulary)(state, logits)
    equal = np.mean(np.asarray(drafted == chosen))
    assert equal > 0.95 if name in ("top_k", "top_p", "min_p", "mixture") else equal == 1


@pytest.mark.variants
def test_the_noise_of_a_node_is_that_of_its_position():
    """A token at any depth is the one that is chosen there when the text is as long."""
    state = running(KINDS["hot"])
    batch = batch_of(state)
    tree = root_only(batch.sequences.root)
    logits = jax.random.normal(jax.random.key(2), (ROWS, 1, VOCAB))
    for depth in range(DEPTHS + 1):
        there = tree._replace(depth=jnp.full((ROWS, 1), depth))
        later = batch._replace(sequences=batch.sequences.replaced(length=batch.sequences.length + depth))
        assert (choose_tokens(state, batch, there, logits) == choose_tokens(state, later, tree, logits)).all()


@pytest.mark.variants
def test_greedy_requests_are_drafted_alike_in_any_company():
    """Rows 0 to 2 are greedy, the others are not."""
    _, head = heads()["whole"]
    state = running(KINDS["hot"])
    settings = unpacked(state.packed_settings)
    temperature = jnp.where(jnp.arange(ROWS) < 3, 0, settings.temperature)
    state = state._replace(packed_settings=packed(settings._replace(temperature=temperature)))
    logits = jax.random.normal(jax.random.key(3), (ROWS, 2, VOCAB))
    for needed in (1, 2, 3):
        scores = predicted(head, state)._replace(needed=jnp.int32(needed)).scores(logits, 1)
        assert (scores[:3] == logits[:3]).all() and (scores[3:] != logits[3:]).any()


def test_a_head_whose_whole_vocabulary_is_banned_still_has_finite_scores():
    _, head = heads()["own"]
    scores = scores_of(head, running(SamplingParams(allowed_token_ids=[VOCAB - 1])), jnp.zeros((ROWS, 1, 40)))
    assert jnp.isfinite(scores).all()


@pytest.mark.parametrize("vocabulary", ["whole", "own"])
@pytest.mark.parametrize("temperature", ["hot", "temperature"])
def test_the_weights_undo_what_was_done_to_the_heads_logits(vocabulary, temperature):
    """The head's logits are the target's with Gumbel errors of scale 0.8, times a factor; a factor of 100 is out of bounds."""
    begin = running(KINDS[temperature])
    for factor in (0.5, 1.0, 2.0, 100.0):
        weights, steps = learning(vocabulary)(begin, KINDS[temperature].temperature, factor)
        unlikely, likely = weights[:2] / weights[2] / max(1 / factor, LEAST)
        assert factor == 0.5 or abs(unlikely - 1) < 0.1, f"{factor}; with 0.5 hardly any token is unlikely"
        if factor != 100:  # with which only one is likely
            assert abs(likely - 1) < 0.1 and abs(weights[2] * 0.8 - 1) < 0.2, factor
        sharpness = steps[:, :2] / steps[:, 2:]
        assert (sharpness > LEAST - 1e-5).all() and (sharpness < MOST + 1e-5).all() and (steps > 0).all()


def test_each_kind_of_token_has_its_sharpness():
    """Chances 0.9, 0.099 and 0.001: the last token is unlikely. The parts meet where a token's chance is exp(LIKELY)."""
    logits = jnp.log(jnp.array([0.9, 0.099, 0.001])) + 7
    scaled = calibrated(logits, boundary(logits), jnp.array([1.0, 3.0, 0.5]))
    cut = 7 + LIKELY
    np.testing.assert_allclose(scaled, [2 * cut + 6 * (logits[0] - cut), 2 * cut + 6 * (logits[1] - cut), 2 * logits[2]], rtol=1e-5)
    np.testing.assert_allclose(calibrated(logits, boundary(logits), jnp.ones(3)), logits, rtol=1e-5)


def test_nothing_is_learnt_from_greedy_done_or_adjusted_requests():
    models, _ = heads()["whole"]
    logits, chosen = jax.random.normal(jax.random.key(5), (ROWS, VOCAB)), jnp.arange(ROWS)
    for name in ("greedy", "bias", "hot"):
        state = running(KINDS[name])
        batch = batch_of(state)
        done = batch._replace(sequences=batch.sequences.replaced(done=jnp.ones(ROWS, bool)))
        assert (models.drafter.learn(state, done, logits, chosen).calibration.weights == 1).all()
        assert (models.drafter.learn(state, batch, logits, chosen).calibration.weights == 1).all() == (name != "hot")


def test_a_token_that_the_head_does_not_know_teaches_nothing():
    models, head = heads()["own"]
    state = running(KINDS["hot"])
    batch = batch_of(state)
    unknown = next(token for token in range(VOCAB) if token not in np.asarray(head.token_map()))
    logits = jax.random.normal(jax.random.key(6), (ROWS, 40))
    assert (models.drafter.learn(state, batch, logits, jnp.full(ROWS, unknown)).calibration.weights == 1).all()


def test_logits_that_are_not_numbers_teach_nothing():
    """One request with such a head output must not spoil the drafts of all others."""
    models, _ = heads()["whole"]
    state = running(KINDS["hot"])
    batch = batch_of(state)
    logits, chosen = jax.random.normal(jax.random.key(7), (ROWS, VOCAB)), jnp.arange(ROWS)
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        found = models.drafter.learn(state, batch, logits.at[2, 5].set(bad), chosen).calibration
        others = batch._replace(sequences=batch.sequences.replaced(done=jnp.arange(ROWS) == 2))
        expected = models.drafter.learn(state, others, logits, chosen).calibration
        np.testing.assert_allclose(found.weights, expected.weights, rtol=1e-6)
        assert np.isfinite(found.information).all() and (found.weights != 1).any()


@pytest.mark.parametrize(("vocabulary", "known"), [("whole", VOCAB), ("own", 40)])
def test_drafts_draw_one_vector_of_noise_per_level_for_the_tokens_that_the_head_knows(vocabulary, known):
    """However many candidates a level has. The noise of the target's choices is drawn where they are made."""
    models, _ = heads()[vocabulary]
    state = running(KINDS["temperature"])
    program = jax.make_jaxpr(lambda state: propose(models, state, batch_of(state), TreeShape(DEPTHS, 4, 12)))(state)
    branches = len(SamplingKind)  # one for each kind that is sampled in programs for GPUs, and one for all in others; one runs
    assert sum(logarithms(program.jaxpr)) == branches * ROWS * DEPTHS * known


def logarithms(jaxpr) -> list[int]:
    """How many numbers each log1p of a program computes, in all its branches: noise takes one of each."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "log1p":
            found.append(equation.outvars[0].aval.size)
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda value: hasattr(value, "eqns") or hasattr(value, "jaxpr")):
            inner = getattr(parameter, "jaxpr", parameter)
            found += logarithms(inner) if hasattr(inner, "eqns") else []
    return found


def test_the_sum_of_exponentials_in_one_pass_is_that_in_two():
    logits = 30 * jax.random.normal(jax.random.key(5), (3, 2, 1000))
    logits = logits.at[0, :, 1:].set(-jnp.inf).at[1, 0, ::2].set(-jnp.inf)
    np.testing.assert_allclose(log_total_in_one_pass(logits), log_total(logits), rtol=1e-6)
