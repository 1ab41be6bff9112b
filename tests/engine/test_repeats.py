"""What n-gram drafts would have emitted, beside a loop that drafts."""

import random
from collections import Counter

import pytest

from jaxspec.engine.repeats import KEPT, Repeats


def emitted_by(text: list[int], root: int, depth: int) -> int:
    """What a cycle emits that drafts so many tokens behind the newest earlier place of the root and the token before it."""
    pair = text[root - 1 : root + 1]
    place = next((at for at in reversed(range(1, root)) if text[at] == pair[1] and text[at - 1] == pair[0]), None)
    accepted = 0
    while place is not None and accepted < depth and root + 1 + accepted < len(text):
        if text[place + 1 + accepted] != text[root + 1 + accepted]:
            break
        accepted += 1
    return accepted + 1


def cycles_of(text: list[int], prompt: int, depth: int) -> list[int]:
    """What each cycle emits; the last one may not end."""
    root, emitted = prompt - 1, []
    while (after := root + emitted_by(text, root, depth)) < len(text):
        emitted.append(after - root)
        root = after
    return emitted


@pytest.mark.parametrize("seed", range(8))
def test_it_counts_what_a_loop_counts_however_tokens_come(seed):
    rng = random.Random(seed)
    unit = [rng.randrange(6) for _ in range(12)]
    text = [rng.choice(unit) if rng.random() < 0.2 else unit[at % 12] for at in range(120)]
    prompt, depths, repeats, found = rng.randrange(2, 40), (1, 3, 7), Repeats(), {depth: list[int]() for depth in (1, 3, 7)}
    end = prompt
    while end < len(text):
        end = min(len(text), end + rng.randrange(5))
        for depth, emitted in repeats.follow(text[:end], prompt, depths):
            found[depth].append(emitted)
    assert found == {depth: cycles_of(text, prompt, depth) for depth in depths}
    assert max(found[7]) > 2


def test_the_docstrings_example_and_a_prompt_of_one_token():
    assert list(Repeats().follow([1, 2, 3, 1, 2, 3, 9], 5, [2])) == [(2, 2)]
    assert Counter(Repeats().follow([5, 6, 7], 1, [2])) == {(2, 1): 2}


def test_of_a_long_prompt_it_knows_the_end():
    early, late = [1, 2, 3], [4, 5, 6]
    prompt = [*early, *range(100, 100 + KEPT), *late]
    assert [emitted for _, emitted in Repeats().follow([*prompt, 1, 2, 3, 4, 5, 6, 7], len(prompt), [1])] == [1, 1, 1, 1, 1, 2]
