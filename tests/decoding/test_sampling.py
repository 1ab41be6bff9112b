"""Company changes no choice."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.sampling import NODES_AT_ONCE, Thresholds, choose, choose_by_threshold, logprobs_if, logprobs_of, uniforms
from jaxspec.decoding.settings import (
    MAX_STOP_TOKENS,
    SamplingKind,
    Settings,
    highest_kind,
    neutral_settings,
    packed,
    settings_row,
    unpacked,
)
from jaxspec.decoding.tree import Tree, ancestor_mask
from jaxspec.sampling_params import SamplingParams
from tests.decoding.distribution_in_numpy import softmax
from tests.decoding.rows import settings_of

VOCAB = 50


def random_logits(seed: int, batch: int, nodes: int, scale: float = 2.0) -> jnp.ndarray:
    return jnp.asarray(scale * np.random.default_rng(seed).normal(size=(batch, nodes, VOCAB)), jnp.float32)


def unchanged(logits: jnp.ndarray, nodes: slice) -> jnp.ndarray:
    return logits


def choose_active(logits, positions, settings, active, adjust):
    """The tokens of a batch whose other rows are done."""
    return choose(logits, positions, highest_kind(settings, active), lambda: settings, adjust)


compiled_choose = jax.jit(choose_active, static_argnames="adjust")


def chosen(logits, positions, params, *, company=(), adjust=unchanged) -> np.ndarray:
    """The tokens of these requests, one per row of `logits`, while requests of other kinds are in the batch."""
    everyone = [*params, *company]
    settings = settings_of(everyone, VOCAB)
    logits = jnp.concatenate([logits, *[logits[:1]] * len(company)])
    positions = jnp.concatenate([positions, *[positions[:1]] * len(company)])
    return np.asarray(compiled_choose(logits, positions, settings, jnp.ones(len(everyone), bool), adjust=adjust))[: len(params)]


PARAMS = {
    SamplingKind.GREEDY: SamplingParams(temperature=0, seed=1),
    SamplingKind.TEMPERATURE: SamplingParams(temperature=0.5, seed=2),
    SamplingKind.FILTERED: SamplingParams(temperature=2.0, top_k=9, top_p=0.9, min_p=0.02, seed=3),
    SamplingKind.ADJUSTED: SamplingParams(temperature=1.3, presence_penalty=1.0, seed=4),
}


@pytest.mark.parametrize("above", SamplingKind)
def test_choice_is_the_same_in_any_batch_and_for_any_number_of_nodes(above):
    """No kind changes tokens of those before it: adjusting is the identity for requests that ask for none, as in penalties.py."""
    kinds, count = [kind for kind in SamplingKind if kind <= above], 40
    params = [dataclasses.replace(PARAMS[kind], seed=seed) for kind in kinds for seed in range(count)]
    logits, positions = random_logits(0, len(params), 4), jnp.arange(len(params))[:, None] + jnp.array([7, 8, 8, 9])
    together = chosen(logits, positions, params)
    for first in range(0, len(params), count):
        rows = slice(first, first + count)
        for node in range(4):
            alone = chosen(logits[rows, node : node + 1], positions[rows, node : node + 1], params[rows])
            assert (alone[:, 0] == together[rows, node]).all()


@pytest.mark.variants
def test_many_nodes_are_adjusted_in_parts_each_with_its_own_noise():
    """Node i may only draw the tokens i and i + 1."""
    count = 2 * NODES_AT_ONCE + 3
    first = jnp.arange(count)[:, None]

    def adjust(logits, nodes):
        tokens = jnp.arange(VOCAB)
        return jnp.where((tokens >= first[nodes]) & (tokens <= first[nodes] + 1), logits, -jnp.inf)

    logits, positions = jnp.zeros((1, count, VOCAB)), jnp.arange(count)[None]
    adjusted = PARAMS[SamplingKind.ADJUSTED]
    drawn = chosen(logits, positions, [adjusted], adjust=adjust)[0]
    plain = dataclasses.replace(PARAMS[SamplingKind.TEMPERATURE], seed=adjusted.seed, temperature=adjusted.temperature)
    banned = adjust(logits, slice(None))
    assert (drawn == chosen(banned, positions, [plain])[0]).all() and set(drawn - np.arange(count)) == {0, 1}


def test_greedy_is_argmax_and_sampling_is_not():
    logits, positions = random_logits(2, 20, 3), jnp.tile(jnp.array([3, 4, 5]), (20, 1))
    likeliest = np.asarray(logits.argmax(-1))
    assert (chosen(logits, positions, [PARAMS[SamplingKind.GREEDY]] * 20) == likeliest).all()
    for kind in (SamplingKind.TEMPERATURE, SamplingKind.FILTERED, SamplingKind.ADJUSTED):
        assert (chosen(logits, positions, [PARAMS[kind]] * 20) != likeliest).any()


@pytest.mark.parametrize(
    "off", [{"top_p": 1.0, "top_k": 0}, {"top_k": VOCAB}, {"top_k": VOCAB + 7}, {"top_k": -1}, {"min_p": 1e-30}], ids=str
)
def test_filters_that_keep_all_draw_what_plain_temperature_draws(off):
    logits, positions = random_logits(3, 60, 2), jnp.tile(jnp.array([3, 4]), (60, 1))
    plain = [SamplingParams(temperature=1.5, seed=seed) for seed in range(60)]
    filtered = [dataclasses.replace(params, **off) for params in plain]
    company = [PARAMS[SamplingKind.FILTERED]]
    assert (chosen(logits, positions, filtered, company=company) == chosen(logits, positions, plain)).all()


def test_only_active_rows_say_what_a_batch_runs():
    """A done row that once had penalties costs nobody anything: what it would run is not even looked at."""
    logits, positions = random_logits(4, 2, 1), jnp.array([[3], [4]])
    settings = settings_of([PARAMS[SamplingKind.GREEDY], PARAMS[SamplingKind.ADJUSTED]], VOCAB)

    def poison(logits, nodes):
        return jnp.full_like(logits, jnp.nan).at[..., 7].set(jnp.inf)

    quiet = choose_active(logits, positions, settings, jnp.array([True, False]), poison)
    loud = choose_active(logits, positions, settings, jnp.array([True, True]), poison)
    assert quiet[0, 0] == logits[0, 0].argmax() and loud[0, 0] != quiet[0, 0]


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
def test_the_narrowest_filters_leave_the_likeliest_token(filters):
    logits, positions = random_logits(5, 20, 1), jnp.full((20, 1), 4)
    params = [SamplingParams(temperature=3.0, seed=seed, **filters) for seed in range(20)]
    assert (chosen(logits, positions, params) == np.asarray(logits.argmax(-1))).all()


ALLOWED = [4, 11, 30]


def ban_others(logits: jnp.ndarray, nodes: slice) -> jnp.ndarray:
    """Compiled once for all kinds, as it is one function."""
    return logits + jnp.full(VOCAB, -jnp.inf).at[jnp.array(ALLOWED)].set(0.0)


@pytest.mark.parametrize("kind", [SamplingKind.GREEDY, SamplingKind.TEMPERATURE, SamplingKind.FILTERED])
def test_banned_tokens_are_never_drawn(kind):
    """Banned tokens have a bias of -inf."""
    logits, positions = random_logits(6, 100, 1), jnp.full((100, 1), 4)
    params = [dataclasses.replace(PARAMS[kind], seed=seed, presence_penalty=0.1) for seed in range(100)]
    tokens = chosen(logits, positions, params, adjust=ban_others)
    assert set(tokens.ravel()) <= set(ALLOWED) and len(set(tokens.ravel())) > 1


def test_logprobs_are_those_of_the_unchanged_logits():
    logits = random_logits(7, 2, 3, scale=5.0)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 3))
    found = logprobs_of(logits, jnp.asarray(tokens), 6)
    expected = np.log(np.apply_along_axis(softmax, -1, np.asarray(logits)))
    best = np.argsort(-expected, -1)[..., :6]
    np.testing.assert_allclose(found.chosen, np.take_along_axis(expected, tokens[..., None], -1)[..., 0], atol=2e-5)
    assert np.asarray(found.top_ids).tolist() == best.tolist()
    np.testing.assert_allclose(found.top, np.take_along_axis(expected, best, -1), atol=2e-5)


def test_log_probabilities_that_nobody_wants_are_zeros_of_the_same_shapes():
    logits, tokens = random_logits(8, 2, 3), jnp.ones((2, 3), jnp.int32)
    there = logprobs_of(logits, tokens, 6)
    for wanted in ([False, False], [False, True]):
        found = logprobs_if(jnp.array(wanted), lambda: logprobs_of(logits, tokens, 6))
        for computed, array in zip(there, found, strict=True):
            expected = np.asarray(computed) if any(wanted) else np.zeros_like(computed)
            assert array.dtype == computed.dtype
            np.testing.assert_array_equal(array, expected)


def test_the_docstrings_example_of_a_row_of_settings():
    row = settings_row(temperature=0.5, stop_tokens=[7])
    assert row.temperature.tolist() == [0.5] and row.top_p.tolist() == [1.0]
    assert row.stop_tokens.tolist() == [[7, *[-1] * (MAX_STOP_TOKENS - 1)]]
    assert settings_row().stop_tokens.tolist() == [[-1] * MAX_STOP_TOKENS], "the declaration itself is unchanged"
    with pytest.raises(KeyError, match="temprature"):
        settings_row(temprature=0.5)


def test_packed_settings_keep_every_bit():
    """Large seeds and negative words too."""
    params = SamplingParams(temperature=0.7, top_p=0.9, min_tokens=3, logprobs=2, seed=2**63 + 5, stop_token_ids=[5, 2**31 - 1])
    settings = settings_of([SamplingParams(), params], 10)
    for before, after in zip(settings, unpacked(packed(settings)), strict=True):
        assert before.dtype == after.dtype and (before == after).all()


def test_a_request_without_any_parameter_has_neutral_settings():
    """Fields of one name have one neutral value; both kinds of rows have the dtypes and shapes of the declaration."""
    asked = settings_of([SamplingParams(temperature=0)], VOCAB, prompt=[])
    for name, found, neutral in zip(Settings._fields, asked, neutral_settings(1), strict=True):
        assert (found.shape, found.dtype) == (neutral.shape, neutral.dtype)
        assert name == "top_k" or found.tolist() == neutral.tolist()


@pytest.mark.parametrize("name", sorted(SamplingParams.__dataclass_fields__.keys() & set(Settings._fields)))
def test_a_parameter_reaches_the_setting_of_its_name(name):
    value = {"seed": 2**40 + 5, "top_k": 7}.get(name, 0.25)
    found = getattr(settings_of([SamplingParams(**{name: value})], VOCAB), name)
    assert found.tolist() == ([[256, 5]] if name == "seed" else [value])


def test_a_draft_that_is_there_several_times_is_tried_once():
    """Lossy acceptance: n-grams fill a tree with repeated tokens, which must not add up."""
    requests = 200
    settings = settings_of([SamplingParams(temperature=1.0, seed=seed) for seed in range(requests)], VOCAB)
    logits = random_logits(0, 1, 1)

    @jax.jit
    def drawn(children: jnp.ndarray) -> jnp.ndarray:
        tokens = jnp.broadcast_to(jnp.concatenate([jnp.array([7]), children]), (requests, len(children) + 1))
        parents = jnp.zeros_like(tokens).at[:, 0].set(-1)
        tree = Tree(tokens, parents, parents + 1, ancestor_mask(parents, 1))
        same = jnp.broadcast_to(logits, (requests, tokens.shape[1], VOCAB))
        return choose_by_threshold(same, jnp.zeros_like(tokens), settings, tree, Thresholds(1.0, 0.5))[:, 0]

    first, again, others = (drawn(jnp.array(children)) for children in ([3, 3, 3, 5], [3, 5, 5, 5], [5, 5, 5, 5]))
    assert (first == again).all() and (first != others).any()


def test_where_the_children_are_all_of_the_distribution_one_of_them_is_taken():
    """Rounded probabilities may add up to less than 1: a number beyond them must not give a token that the filter drops."""
    count, settings = 4000, settings_of([SamplingParams(temperature=1.0, top_k=4, seed=20)], VOCAB)
    rng, children = np.random.default_rng(0), np.array([3, 9, 5, 12])
    near_one = jnp.full((1, 5), 22_227)
    assert uniforms(near_one, settings)[0, 0] > 0.9999998
    tokens, parents = jnp.array([[7, *children]]), jnp.array([[-1, 0, 0, 0, 0]])
    tree = Tree(tokens, parents, parents + 1, ancestor_mask(parents, 1))
    taken = jax.jit(lambda logits: choose_by_threshold(logits, near_one, settings, tree, Thresholds(0.95, 1.0))[0, 0])
    logits = np.zeros((count, VOCAB), np.float32)
    logits[:, children] = rng.normal(10, 1, (count, 4))
    assert {int(taken(jnp.broadcast_to(jnp.array(row), (1, 5, VOCAB)))) for row in logits} == {12}
