"""Penalties, bias and bans per node of a tree, against plain Python that writes every node's text out."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.penalties import Context, adjust_logits, banned_stops, count_tokens, tree_context
from jaxspec.decoding.sampling import choose
from jaxspec.decoding.settings import SamplingKind
from jaxspec.decoding.tree import Tree, ancestor_mask, root_only
from jaxspec.sampling_params import SamplingParams
from tests.decoding import distribution_in_numpy
from tests.decoding.rows import admission_of, settings_of

VOCAB, LENGTH = 12, 20


def random_tree(rng: np.random.Generator, root: int, nodes: int = 8) -> Tree:
    """Any shape, with tokens that repeat in other branches and in the text."""
    parents = [-1, *(int(rng.integers(0, node)) for node in range(1, nodes))]
    mask = ancestor_mask(jnp.array([parents]), nodes)
    return Tree(jnp.array([[root, *rng.integers(0, VOCAB, nodes - 1)]]), jnp.array([parents]), mask.sum(-1) - 1, mask)


def text_at(tree: Tree, node: int) -> list[int]:
    """Tokens of the node's ancestors below the root, and its own."""
    parents, tokens, path = tree.parents[0].tolist(), tree.tokens[0].tolist(), []
    while node > 0:
        path.insert(0, tokens[node])
        node = parents[node]
    return path


def context_after(history: jnp.ndarray, known: jnp.ndarray) -> Context:
    """What the first generated token sees: `known` tokens of the history, whose last one is the root."""
    return tree_context(history, known - 1, root_only(history[:, 0]))


def random_params(rng: np.random.Generator) -> SamplingParams:
    return SamplingParams(
        repetition_penalty=float(rng.choice([1.0, 1.4, 0.7])),
        frequency_penalty=float(rng.choice([0.0, 0.6, -0.3])),
        presence_penalty=float(rng.choice([0.0, 0.9, -0.5])),
        logit_bias={int(token): float(rng.normal()) for token in rng.integers(0, VOCAB, 3)},
        bad_token_ids=rng.integers(0, VOCAB, 1).tolist(),
        allowed_token_ids=None if rng.random() < 0.5 else rng.choice(VOCAB, 7, replace=False).tolist(),
        stop_token_ids=rng.integers(0, VOCAB, 2).tolist(),
        min_tokens=int(rng.integers(0, 12)),
    )


def close_where_drawable(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal, where a ban may be any number that no other token is ever as low as."""
    possible = np.isfinite(expected)
    np.testing.assert_allclose(found[possible], expected[possible], rtol=1e-5, atol=1e-5)
    assert (found[~possible] < -1e20).all()


@pytest.mark.parametrize("seed", range(25))
def test_every_node_has_the_logits_that_plain_decoding_would_have(seed):
    """Beyond the root the history holds another request's tokens. Some roots are the prompt's last token, not an output token."""
    rng, prompt_length = np.random.default_rng(seed), 4
    length = prompt_length - 1 if seed >= 20 else int(rng.integers(5, 12))
    history, params = rng.integers(0, VOCAB, LENGTH), random_params(rng)
    tree = random_tree(rng, root=int(history[length]))
    logits = 3 * rng.normal(size=(1, 8, VOCAB)).astype(np.float32)
    admission = admission_of(params, history[:prompt_length].tolist(), rows=1, max_length=LENGTH, vocab_size=VOCAB)
    found = adjust_logits(
        jnp.asarray(logits),
        jnp.array([length + 1]) + tree.depth,
        tree_context(jnp.asarray(history[None]), jnp.array([length]), tree),
        admission.settings,
        admission.bias,
    )
    for node in range(8):
        text = [*history[: length + 1].tolist(), *text_at(tree, node)]
        expected = distribution_in_numpy.adjust_logits(logits[0, node], text, prompt_length, params)
        close_where_drawable(np.asarray(found)[0, node], expected)


def test_a_rejected_sibling_does_not_count():
    """Root 3 with the children 7 and 8; 8 has the child 7. The penalty takes 1 off per occurrence."""
    parents = jnp.array([[-1, 0, 0, 2]])
    mask = ancestor_mask(parents, 2)
    tree = Tree(jnp.array([[3, 7, 8, 7]]), parents, mask.sum(-1) - 1, mask)
    context = tree_context(jnp.array([[3, 3, 0, 0]]), jnp.array([1]), tree)
    settings = settings_of([SamplingParams(frequency_penalty=1.0)], VOCAB)._replace(prompt_length=jnp.array([1]))
    found = adjust_logits(jnp.zeros((1, 4, VOCAB)), tree.depth + 2, context, settings, jnp.zeros((1, VOCAB)))
    assert np.asarray(-found)[0][:, [3, 7, 8]].tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 1], [1, 1, 1]]


def test_the_docstrings_example_of_counting():
    context = Context(jnp.array([[7, 8, 8]]), jnp.array([3]), jnp.zeros((1, 0), int), jnp.zeros((1, 1, 0), bool))
    occurs, counts = count_tokens(context, jnp.array([1]), VOCAB)
    assert np.flatnonzero(occurs[0]).tolist() == [7, 8]
    assert counts[0, 8] == 2 and counts[0].sum() == 2


def test_a_head_with_its_own_vocabulary_gets_the_same_adjustments():
    rng = np.random.default_rng(3)
    params, ids = random_params(rng), jnp.asarray(rng.permutation(VOCAB)[:5])
    admission = admission_of(params, [1, 2, 3], rows=1, max_length=LENGTH, vocab_size=VOCAB)
    context = context_after(jnp.asarray(rng.integers(0, VOCAB, (1, LENGTH))), jnp.array([7]))
    logits, positions = jnp.asarray(rng.normal(size=(1, 2, VOCAB)), jnp.float32), jnp.array([[7, 8]])
    whole = adjust_logits(logits, positions, context, admission.settings, admission.bias)
    part = adjust_logits(logits[..., ids], positions, context, admission.settings, admission.bias, ids)
    np.testing.assert_array_equal(part, whole[..., ids])


@pytest.mark.parametrize("min_tokens", [0, 1, 3])
def test_stop_tokens_are_banned_until_min_tokens_are_there(min_tokens):
    params = SamplingParams(stop_token_ids=[0, 4, VOCAB - 1], min_tokens=min_tokens)
    settings = settings_of([params], VOCAB, prompt=[1] * 5)
    banned = np.asarray(banned_stops(jnp.arange(5, 10)[None], settings, VOCAB))[0]
    for generated in range(5):
        assert np.flatnonzero(banned[generated]).tolist() == ([0, 4, VOCAB - 1] if generated < min_tokens else [])


def test_without_stop_tokens_nothing_is_banned():
    assert not banned_stops(jnp.array([[5]]), settings_of([SamplingParams(min_tokens=9)], VOCAB), VOCAB).any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9, "min_p": 0.01, "top_k": 3}], ids=["all", "filtered"])
@pytest.mark.parametrize(("allowed", "expected"), [([4, 5], {4, 5}), ([4, 5, 6], {6})])
def test_a_stop_token_is_drawn_too_early_only_if_nothing_else_is_allowed(temperature, filters, allowed, expected):
    """4 and 5 end the text, which is too short yet."""
    bans = {"allowed_token_ids": allowed, "stop_token_ids": [4, 5], "min_tokens": 5}
    params = [SamplingParams(temperature=temperature, seed=seed, **bans, **filters) for seed in range(20)]
    settings = settings_of(params, VOCAB)
    bias = admission_of(params[0], [0], rows=20, max_length=4, vocab_size=VOCAB).bias
    context = context_after(jnp.zeros((20, 4), jnp.int32), jnp.ones(20, jnp.int32))
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(20, 1, VOCAB)), jnp.float32)
    positions = jnp.ones((20, 1), jnp.int32)

    def adjust(logits, nodes):
        return adjust_logits(logits, positions, context, settings, bias)

    tokens = choose(logits, positions, jnp.max(settings.kind), lambda: settings, adjust)
    assert set(np.asarray(tokens).ravel()) <= expected


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(temperature=0.7, top_p=0.9)])
def test_requests_without_adjustments_keep_their_logits_bit_for_bit(params):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1, VOCAB)), jnp.float32)
    context = context_after(jnp.array([[3, 3, 4, 5]]), jnp.array([3]))
    settings = settings_of([params], VOCAB)
    assert settings.kind[0] != SamplingKind.ADJUSTED
    assert (adjust_logits(logits, jnp.array([[3]]), context, settings, jnp.zeros((1, VOCAB))) == logits).all()
