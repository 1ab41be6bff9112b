"""What drafters have in common, and how the drafts of several become one tree."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.drafter import (
    MOST_SHARPNESS,
    RATE_MEMORY,
    RATE_PRIOR,
    SURE,
    Memos,
    Merged,
    NoDrafter,
    Promises,
    are_sure,
    names_of_sets,
)
from jaxspec.decoding.head_drafter import HeadDrafter
from jaxspec.decoding.ngram import NgramDrafter
from jaxspec.decoding.state import Batch, Sequences, Sizes
from jaxspec.decoding.tree import Candidates, Chain, as_candidates, merge, rank
from jaxspec.testing import engine_target, random_eagle, random_head, tiny_engine
from jaxspec.tree_shape import PLAIN, TreeShape

TARGET, TREE = engine_target(), TreeShape(3, 2, 5)


def test_no_drafter_has_no_state_and_proposes_the_root():
    engine = tiny_engine(PLAIN, target=TARGET)
    assert engine.runner.state.draft == () and engine.runner.params["draft"] == ()
    assert engine.runner.state.features.lagging.size == 0 and not NoDrafter().traits.max_topk


def test_drafters_that_read_different_features_are_refused():
    with pytest.raises(ValueError, match=r"merged drafters must read the same layers of the target, got \(.*\), \(.*\): leave out"):
        Merged((HeadDrafter.of(random_head(TARGET.config)), HeadDrafter.of(random_eagle(TARGET.config))))


@pytest.mark.parametrize("ngram", [False, True, None])
def test_a_tree_that_is_wider_than_its_source_is_refused(ngram):
    head = NgramDrafter() if ngram is None else random_head(TARGET.config, draft_vocab_size=16)
    with pytest.raises(ValueError, match="topk=17 is more than the 16 tokens that can be drafted behind another: lower topk"):
        tiny_engine(TreeShape(2, 17, 20), target=TARGET, head=head, ngram=bool(ngram))


# Merging


def paths(candidates: Candidates, row: int = 0) -> dict[tuple[int, ...], float]:
    """The best score of each text that the candidates spell."""
    tokens, scores, parents = (np.asarray(part)[row].tolist() for part in candidates[:3])
    found: dict[tuple[int, ...], float] = {}
    texts: list[tuple[int, ...]] = []
    for token, score, parent in zip(tokens, scores, parents, strict=True):
        assert parent < len(texts), "parents come first"
        texts.append((*(texts[parent] if parent >= 0 else ()), token))
        found[texts[-1]] = max(score, found.get(texts[-1], -np.inf))
    return {text: score for text, score in found.items() if score > -np.inf}


def random_candidates(rng: np.random.Generator, batch: int, count: int, depth: int) -> Candidates:
    tokens, parents = rng.integers(0, 3, (batch, count)), np.full((batch, count), -1)
    scores, depths = -rng.random((batch, count)), np.ones((batch, count), int)
    for row in range(batch):
        taken = set()
        for index in range(count):
            allowed = [-1, *(each for each in range(index) if depths[row, each] < depth)]
            parent = int(rng.choice(allowed))
            if (parent, tokens[row, index]) in taken:  # siblings differ
                scores[row, index] = -np.inf
                continue
            taken.add((parent, int(tokens[row, index])))
            parents[row, index] = parent
            if parent >= 0:
                depths[row, index] = depths[row, parent] + 1
                scores[row, index] += scores[row, parent]
    return Candidates(jnp.asarray(tokens, jnp.int32), jnp.asarray(scores, jnp.float32), jnp.asarray(parents, jnp.int32))


@pytest.mark.parametrize("seed", range(20))
def test_merging_keeps_every_text_once_with_its_best_score(seed):
    rng, depth = np.random.default_rng(seed), 4
    sources = [random_candidates(rng, 3, count, depth) for count in (7, 5, 9)]
    merged = merge(sources, depth)
    for row in range(3):
        expected: dict[tuple[int, ...], float] = {}
        for source in sources:
            for text, score in paths(source, row).items():
                expected[text] = max(score, expected.get(text, -np.inf))
        assert paths(merged, row) == expected
        assert int(jnp.sum(merged.scores[row] > -jnp.inf)) == len(expected), "each once"
    shape = TreeShape(depth, 4, 9)
    tree = rank(jnp.zeros(3, jnp.int32), merged, shape)
    for row in range(3):
        best = sorted(paths(merged, row).values(), reverse=True)[: shape.num_draft_tokens - 1]
        texts = {()}
        for token, parent, depth_of in zip(*(np.asarray(part)[row, 1:].tolist() for part in tree[:3]), strict=True):
            assert parent >= 0 and depth_of <= depth
            texts.add((parent, token))
        assert len(texts) >= len(best)


@pytest.mark.parametrize("seed", range(8))
def test_a_merge_says_who_proposed_each_text(seed):
    """And so does the tree, which the root fills where candidates are too few: nobody proposed that."""
    rng, depth = np.random.default_rng(seed), 4
    sources = [random_candidates(rng, 3, count, depth) for count in (7, 5, 9)]
    merged = merge(sources, depth)
    tree = rank(jnp.full(3, 9, jnp.int32), merged, TreeShape(depth, 6, 30))
    for row in range(3):
        known = [paths(source, row) for source in sources]
        texts: list[tuple[int, ...]] = []
        for token, score, parent, who in zip(*(np.asarray(part)[row].tolist() for part in merged), strict=True):
            texts.append((*(texts[parent] if parent >= 0 else ()), token))
            stands = score > -np.inf
            assert who == sum((texts[-1] in own) << bit for bit, own in enumerate(known) if stands)
        tokens, who, shown = (np.asarray(each)[row].tolist() for each in (merged.tokens, merged.sources, tree.sources))
        assert shown == [0, *who, *[0] * (29 - len(who))] and tree.tokens[row, 1 : len(tokens) + 1].tolist() == tokens


def test_names_of_sets_go_by_bits():
    assert names_of_sets(["head", "ngram"]) == ("other", "head", "ngram", "head+ngram")
    assert names_of_sets(["a", "b", "c"])[5] == "a+c"


def test_a_source_that_promises_too_much_is_trusted_less():
    """Two rows count; the third has ended. One drafter is certain and chosen once; the other has nothing in the second row."""
    drafter = Merged((NoDrafter(), NoDrafter()))
    state = tiny_engine(PLAIN, target=TARGET).runner.state._replace(draft=drafter.empty(Sizes(3, 1, 4, 16, 1, jnp.float32)))
    sequences = Sequences.of(*(jnp.ones(3, jnp.int32),) * 3, jnp.array([False, False, True]))
    batch = Batch(jnp.arange(3), jnp.zeros((3, 1), jnp.int32), sequences, state.packed_settings[:1])
    seen = Promises(jnp.array([[5, 6], [7, 8], [5, 5]]), jnp.array([[1.0, 0.25], [1.0, 0.0], [1.0, 1.0]]))
    after = drafter.learn(state, batch, Memos(((), ()), seen, None), jnp.array([5, 9, 5]))
    two, one = RATE_PRIOR * RATE_MEMORY**2, RATE_PRIOR * RATE_MEMORY
    assert after.seen.tolist() == pytest.approx([two + 2, one + 1], rel=1e-6)
    assert after.chosen.tolist() == pytest.approx([two / 2 + 1, one / 2], rel=1e-6)
    assert after.promised.tolist() == pytest.approx([two / 2 + 2, one / 2 + 0.25], rel=1e-6)
    assert state.draft.sharpness.tolist() == [1, 1] and (after.sharpness > 1).all()
    modest = after._replace(seen=jnp.array([9.0, 9.0]), chosen=jnp.array([6.0, 9.0]), promised=jnp.array([4.0, 1.0]))
    assert (4 / 9) ** modest.sharpness[0] == pytest.approx(6 / 9) and modest.sharpness[1] == 1 / MOST_SHARPNESS
    assert drafter.learn(state, batch, None, jnp.array([5, 9, 5])) == state.draft, "plain cycles promise nothing"


@pytest.mark.parametrize(
    ("chances", "worth", "sure"),
    [
        ([SURE + 0.1, SURE + 0.1], [-1, -1], True),
        ([SURE + 0.1, SURE - 0.1], [-1, -1], False),
        ([SURE + 0.1, 0.0], [-1, np.inf], True),  # the second has ended
        ([0.0, SURE + 0.1], [-1, np.inf], False),
        ([1.0, 1.0], [-np.inf, -np.inf], False),  # a trial run
    ],
)
def test_a_head_is_not_asked_where_the_text_is_sure_of_every_root(chances, worth, sure):
    """The better of two candidates counts."""
    best = np.log(np.maximum(chances, 1e-9), dtype=np.float32)[:, None]
    drafts = Candidates(jnp.array([[5, 6]] * 2), jnp.asarray(np.concatenate([best - 1, best], 1)), jnp.full((2, 2), -1))
    assert bool(are_sure([drafts], jnp.array(worth, jnp.float32)[:, None])) == sure


def test_the_docstrings_example_of_a_merge():
    chain = as_candidates(Chain(jnp.array([[5, 6]])))
    siblings = Candidates(jnp.array([[5, 7]]), jnp.array([[-1.0, -2.0]]), jnp.array([[-1, -1]]))
    merged = merge([chain, siblings], 2)
    assert merged.tokens.tolist() == [[5, 6, 5, 7]] and merged.parents.tolist() == [[-1, 0, -1, -1]]
    assert merged.scores.tolist() == [[0, 0, -np.inf, -2.0]] and merged.sources.tolist() == [[3, 1, 0, 2]]


def test_too_few_candidates_leave_nodes_that_repeat_the_root():
    tree = rank(jnp.array([9]), Candidates(jnp.array([[5]]), jnp.array([[-1.0]]), jnp.array([[-1]])), TreeShape(2, 2, 4))
    assert tree.tokens.tolist() == [[9, 5, 9, 9]] and tree.parents.tolist() == [[-1, 0, 0, 0]] and tree.sources is None
