"""Text under a grammar and a tree is plain masked decoding's, token for token, and fits the grammar."""

import random

from tests.grammar.cases import TREES, check, random_case


def test_text_under_a_tree_is_that_of_plain_masked_decoding():
    rng = random.Random(7)
    cases = [random_case(rng) for _ in range(200)]
    result = check(cases, TREES)
    assert (result.wrong, result.unequal) == ([], [])
    assert result.ended >= 100 and result.preemptions and result.hits, result
