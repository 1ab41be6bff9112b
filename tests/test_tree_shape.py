"""Draft trees: the ways in which they are written, and messages that say what to change."""

import numpy as np
import pytest

from jaxspec import TreeShape


def test_chain_corrects_the_node_count_with_a_warning():
    with pytest.warns(UserWarning, match=r"num_draft_tokens=9 becomes num_steps \+ 1 = 4"):
        assert TreeShape(3, 1, 9).num_draft_tokens == 4


@pytest.mark.parametrize(
    ("given", "tree"),
    [
        (TreeShape(3, 2, 5), (3, 2, 5)),
        ("5/4/8", (5, 4, 8)),
        (" 3/1/4 ", (3, 1, 4)),
        ((5, 4, 8), (5, 4, 8)),
        ([3, 1, 4], (3, 1, 4)),
        (np.array([5, 4, 8]).tolist(), (5, 4, 8)),
        ((np.int64(5), np.int32(4), np.int64(8)), (5, 4, 8)),
        ({"num_steps": 5, "topk": 4, "num_draft_tokens": 8}, (5, 4, 8)),
        ({"speculative_num_steps": 3, "speculative_eagle_topk": 1}, (3, 1, 4)),
        ({"num_steps": 0}, (0, 1, 1)),
        ({"num_steps": 0, "topk": 0, "num_draft_tokens": 0}, (0, 1, 1)),
        ({"num_steps": 3, "topk": 1}, (3, 1, 4)),
        ({"num_steps": 3, "topk": 1, "num_draft_tokens": 4}, (3, 1, 4)),
        ({"num_steps": 5, "topk": 8, "num_draft_tokens": 64}, (5, 8, 64)),
        ({"num_steps": 1, "topk": 4, "num_draft_tokens": 5}, (1, 4, 5)),
        ("plain", (0, 1, 1)),
        ("0", (0, 1, 1)),
        ("0/1/1", (0, 1, 1)),
        ("7/4/8/3", (7, 4, 8, 3)),
        ((3, 2, 4, 0), (3, 2, 4, 0)),
        ({"num_steps": 7, "topk": 1, "head_steps": 3}, (7, 1, 8, 3)),
        ("5/4/8/5", (5, 4, 8)),
        ("0/1/1/0", (0, 1, 1)),
    ],
)
def test_a_tree_is_written_in_any_of_these_ways(given, tree):
    spec = TreeShape.of(given)
    assert spec == TreeShape(*tree) and all(type(number) is int for number in vars(spec).values())
    assert str(spec) == "/".join(map(str, tree)) and TreeShape.of(str(spec)) == TreeShape.of(spec.name) == spec == eval(repr(spec))


@pytest.mark.parametrize(
    ("tree", "of_head"),
    [("5/4/8", "5/4/8"), ("7/4/8/3", "3/4/8"), ("7/4/8/1", "1/4/5"), ("7/1/8/3", "3/1/4"), ("3/2/4/0", "plain")],
)
def test_the_part_of_a_tree_that_a_head_drafts(tree, of_head):
    assert TreeShape.of(tree).of_head == TreeShape.of(of_head)


@pytest.mark.parametrize("given", ["", "5/4", "5/4/8/1/1", "-5/4/8", "99999/1/2", (5, 4), 5.0, None, {}, b"5/4/8", {5, 4, 8}])
def test_what_is_not_a_tree_is_refused_with_an_example(given):
    with pytest.raises(ValueError, match=r'as in "5/4/8", .* got '):
        TreeShape.of(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 5}, "a draft tree has num_steps, topk and num_draft_tokens, and may have head_steps, got steps"),
        ({5: 4}, "got 5"),
        ({"topk": 1, "eagle_topk": 1}, "got topk, eagle_topk"),
        ({"num_steps": 5}, "missing: topk, num_draft_tokens"),
        ({"topk": 4}, "missing: num_steps, num_draft_tokens"),
        ({"topk": 1}, "missing: num_steps, num_draft_tokens"),
        ({"num_steps": 5, "num_draft_tokens": 8}, "missing: topk"),
        ((2, 2, 8), "between 2 and 7 .* lower num_draft_tokens or raise"),
        ((2, 2, 1), "between 2 and 7"),
        ({"num_steps": -1}, "num_steps must be a whole number >= 0"),
        ((2, 2.0, 4), "topk must be a whole number"),
        ((2, 0, 4), "topk must be at least 1"),
        ((0, 4, 8), "takes no tree"),
        ("3/2/4/4", "head_steps=4 must be at most num_steps=3"),
        ("0/1/1/1", "head_steps=1 must be at most num_steps=0"),
        ((3, 2, 4, -1), "head_steps must be a whole number >= 0, got -1"),
        ("2/2/99", "num_draft_tokens=99 must be between 2 and 7"),
        ((True, 1, 2), "num_steps must be a whole number >= 0, got True"),
        ((5.0, 4, 8), "num_steps must be a whole number >= 0, got 5.0"),
        (("5", "4", "8"), "num_steps must be a whole number >= 0, got '5'"),
    ],
)
def test_numbers_that_make_no_tree_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        TreeShape.of(given)
