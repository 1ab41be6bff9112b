"""What n-gram drafts would have emitted, beside a loop that drafts."""

import random
from collections import Counter

import pytest

from jaxspec.engine.repeats import KEPT, LONGEST, Repeats


def emitted_by(text: list[int], root: int, depth: int, place: int | None = None) -> int:
    """What a cycle emits that drafts tokens from `place` on. None: from the newest place of the root and the token before it."""
    if place is None:
        place = place_behind(text, root)
    accepted = 0
    while place is not None and accepted < depth and root + 1 + accepted < len(text):
        if text[place + accepted] != text[root + 1 + accepted]:
            break
        accepted += 1
    return accepted + 1


def place_behind(text: list[int], root: int) -> int | None:
    pair = text[root - 1 : root + 1]
    return next((at + 1 for at in reversed(range(1, root)) if text[at - 1 : at + 1] == pair), None)


def cycles_of(text: list[int], prompt: int, depth: int) -> list[int]:
    """What each cycle emits; the last one may not end. After a token that came as expected, too, a cycle goes on where it was."""
    root, emitted, place = prompt - 1, list[int](), place_behind(text, prompt - 1)
    while (after := root + (emits := emitted_by(text, root, depth, place))) < len(text):
        came = place is not None and text[place + emits - 1] == text[after]
        place = place + emits if place is not None and came else place_behind(text, after)
        emitted.append(emits)
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
        for depth, emitted, _ in repeats.follow(text[:end], prompt, depths):
            found[depth].append(emitted)
    assert found == {depth: cycles_of(text, prompt, depth) for depth in depths}
    assert max(found[7]) > 2


@pytest.mark.parametrize("seed", range(4))
def test_a_match_is_of_equal_tokens_and_cycles_tell_that_of_the_one_before(seed):
    rng = random.Random(seed)
    unit, prompt, repeats, matches = [rng.randrange(9) for _ in range(30)], 33, Repeats(), dict[int, int]()
    text = [rng.choice(unit) if rng.random() < 0.05 else unit[at % 30] for at in range(300)]
    begins, found = [prompt, prompt], list[tuple[int, int]]()
    for end in range(prompt, len(text) + 1):
        found += [(emitted, match) for _, emitted, match in repeats.follow(text[:end], prompt, [3])]
        place, match = repeats.place, repeats.match
        matches[end] = match
        assert text[place - match : place] == text[end - match : end]
        assert match >= LONGEST or not match or match == place or text[place - match - 1] != text[end - match - 1]
    for emitted, match in found:
        assert match == matches[begins[-2]]
        begins.append(begins[-1] + emitted)
    assert max(matches.values()) > LONGEST and 0 in matches.values()


def test_the_docstrings_example_and_a_prompt_of_one_token():
    assert list(Repeats().follow([1, 2, 3, 1, 2, 3, 9], 5, [2])) == [(2, 2, 2)]
    assert Counter(Repeats().follow([5, 6, 7], 1, [2])) == {(2, 1, 0): 2}


def test_of_a_long_prompt_it_knows_the_end():
    early, late = [1, 2, 3], [4, 5, 6]
    prompt = [*early, *range(100, 100 + KEPT), *late]
    found = Repeats().follow([*prompt, 1, 2, 3, 4, 5, 6, 7], len(prompt), [1])
    assert [emitted for _, emitted, _ in found] == [1, 1, 1, 1, 1, 2]
