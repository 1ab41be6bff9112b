"""Trees: SGLang's published cases, and the properties that any tree must have."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.tree import Candidates, ancestor_mask, build_tree, root_only, worth_a_row
from tests.reference import tree_cases


def test_hand_made_mask_depth_and_positions():
    case = tree_cases()["tree_mask_hand"]
    mask = ancestor_mask(jnp.array([case["parents"]]), 2)[0]
    depth = np.asarray(mask).sum(-1) - 1
    assert np.asarray(mask, int).tolist() == case["expected_qlen_mask"]
    assert depth.tolist() == case["expected_depth"]
    assert (7 + depth).tolist() == case["expected_positions_len7"]


def test_upstream_build_tree():
    case = tree_cases()["build_tree"][0]
    k, nodes = case["topk"], case["num_draft_tokens"]
    scores = np.concatenate([np.asarray(level).reshape(2, -1) for level in case["score_list"]], 1)
    tokens = np.concatenate([np.asarray(level).reshape(2, -1) for level in case["token_list"]], 1)
    parent_list = np.asarray(case["derived"]["parent_list"])
    candidates = Candidates(jnp.asarray(tokens), jnp.asarray(scores), jnp.asarray(parent_list[:, np.arange(scores.shape[1]) // k]))
    tree = build_tree(jnp.asarray(case["bonus_tokens"]), candidates, nodes, case["depth"])

    expected = case["expected"]
    assert np.asarray(tree.tokens).ravel().tolist() == expected["draft_tokens"]
    assert (np.asarray(case["seq_lens"])[:, None] + tree.depth).ravel().tolist() == expected["positions"]
    assert np.asarray(tree.mask, int).tolist() == case["derived"]["tree_mask_qlen"]
    for row, parents in enumerate(np.asarray(tree.parents).tolist()):
        children = [[node for node in range(nodes) if parents[node] == parent] for parent in range(nodes)]
        assert [kids[0] if kids else -1 for kids in children] == expected["retrieve_next_token"][row]
        siblings = [
            next((other for other in range(node + 1, nodes) if parents[other] == parents[node]), -1) for node in range(nodes)
        ]
        assert [-1, *siblings[1:]] == expected["retrieve_next_sibling"][row]


def random_candidates(rng: np.random.Generator, k: int, steps: int) -> Candidates:
    """Levels grown as drafting grows them, with probabilities coarse enough that many scores tie."""
    flat, scores = np.arange(k), rng.integers(1, 4, k) / 4
    all_scores, all_parents = [scores], [np.full(k, -1)]
    for level in range(1, steps):
        children = (scores[:, None] * rng.choice([0.0, 0.25, 1.0], (k, k))).ravel()
        all_scores.append(children)
        all_parents.append(np.repeat(flat, k))
        best = np.argsort(-children, kind="stable")[:k]
        flat, scores = k + (level - 1) * k * k + best, children[best]
    scores, parents = np.concatenate(all_scores)[None], np.concatenate(all_parents)[None]
    return Candidates(jnp.arange(scores.shape[1])[None], jnp.asarray(scores), jnp.asarray(parents))


@pytest.mark.parametrize("seed", range(20))
def test_tree_holds_the_best_candidates_and_all_their_ancestors(seed):
    rng = np.random.default_rng(seed)
    k, steps = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    candidates = random_candidates(rng, k, steps)
    nodes = int(rng.integers(2, 2 + candidates.scores.shape[1]))
    tree = build_tree(jnp.array([1000]), candidates, nodes, steps)

    picked = np.asarray(tree.tokens)[0, 1:]  # tokens are the flat indices
    all_scores, all_parents = np.asarray(candidates.scores)[0], np.asarray(candidates.parents)[0]
    assert sorted(all_scores[picked]) == sorted(np.sort(all_scores)[::-1][: nodes - 1])
    assert (np.diff(picked) > 0).all()
    for node, index in enumerate(picked, start=1):
        parent = int(tree.parents[0, node])
        assert all_parents[index] == (-1 if parent == 0 else picked[parent - 1])
        assert tree.depth[0, node] == tree.depth[0, parent] + 1
        assert (tree.mask[0, node] == tree.mask[0, parent].at[node].set(True)).all()


@pytest.mark.parametrize("seed", range(20))
def test_nodes_that_pay_are_never_below_others(seed):
    rng = np.random.default_rng(seed)
    candidates = random_candidates(rng, 3, 4)
    worth = float(rng.choice([0.0, 0.1, 0.25, 2.0]))
    tree, whole = (build_tree(jnp.array([1000]), candidates, 9, 4, each) for each in (jnp.array([[worth]]), None))
    assert all((getattr(tree, name) == getattr(whole, name)).all() for name in ("tokens", "parents", "mask")) and whole.pays is None
    scores = np.asarray(candidates.scores)[0, np.asarray(tree.tokens)[0, 1:]]
    assert tree.pays[0].tolist() == [True, *(scores >= worth)]
    assert all(tree.pays[0, parent] for parent, pays in zip(tree.parents[0, 1:], tree.pays[0, 1:], strict=True) if pays)


def test_what_a_row_must_promise():
    """The more requests there are, the less of a cycle is for reading the weights. A trial run has ended sequences only."""
    running, ended = jnp.zeros(1, bool), jnp.ones(1, bool)
    assert float(worth_a_row(0.2, running)[0, 0]) == pytest.approx(np.log(0.2))
    assert worth_a_row(0.2, jnp.zeros(4, bool)).ravel().tolist() == pytest.approx([np.log(0.5)] * 4)
    assert worth_a_row(0.2, jnp.concatenate([running, ended])).ravel().tolist() == pytest.approx([np.log(0.2 / 1.2), np.inf])
    assert worth_a_row(0.2, ended).tolist() == [[-np.inf]]


def test_root_only():
    tree = root_only(jnp.array([7, 9]))
    assert tree.tokens.tolist() == [[7], [9]]
    assert tree.parents.tolist() == [[-1], [-1]] and tree.depth.tolist() == [[0], [0]] and tree.mask.all()
