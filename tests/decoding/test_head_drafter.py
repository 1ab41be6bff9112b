"""What a sliding window leaves visible, slot by slot."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.cycle import propose
from jaxspec.decoding.drafter import DraftUse
from jaxspec.decoding.head_drafter import SlidingWindow, VisibleSlots, visible_slots
from jaxspec.decoding.state import gather
from jaxspec.decoding.tree import build_tree
from jaxspec.tree_shape import TreeShape
from tests.decoding.test_extend import PROMPT, TABLE, compiled, prefilled
from tests.sets import exhaustive


def slots_seen(seen: VisibleSlots, row: int, pages: np.ndarray, page_size: int) -> list[int]:
    """The sequence's own slots in the order in which attention finds them."""
    number = {int(page): index for index, page in enumerate(pages[row])}
    table = np.asarray(seen.page_table)[row]
    assert set(table) <= set(pages[row]), "attention wants valid pages, also where it looks at no slot"
    places = range(int(seen.start[row]), int(seen.length[row]))
    return [number[int(table[place // page_size])] * page_size + place % page_size for place in places]


def slots_left(length: int, page_size: int, window: SlidingWindow | None) -> list[int]:
    """All from slot 1 on, or the last `size` and, with a sink, the slots of the pages that hold it."""
    slots = range(1, length)
    if window is None:
        return list(slots)
    sink = -(-window.sink // page_size) * page_size
    return [slot for slot in slots if slot < sink or slot >= length - window.size]


@pytest.mark.parametrize("page_size", [1, 2, 4, 7])
@pytest.mark.parametrize(("has_window", "has_sink"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("seed", range(20))
def test_the_window_is_visible_and_the_pages_of_its_sink(seed, has_window, has_sink, page_size):
    """Exactly, without a sink; without a window all slots but the first. With a sink, stretches are whole pages: the window may
    begin inside a page, whose first slots are then visible too."""
    rng = np.random.default_rng(seed)
    table = rng.permutation(100)[: 3 * 9].reshape(3, 9)
    sizes = int(rng.integers(1, 9 * page_size + 3)), int(rng.integers(1, 4 * page_size)) if has_sink else 0
    window = SlidingWindow(*sizes) if has_window else None
    length = rng.integers(1, 9 * page_size + 1, 3)
    seen = visible_slots(jnp.asarray(table), jnp.asarray(length), page_size, window)
    is_wide = seen.page_table.shape[1] == table.shape[1]
    for row in range(3):
        found, left = slots_seen(seen, row, table, page_size), slots_left(int(length[row]), page_size, window)
        assert found == sorted(set(found)) and set(left) <= set(found)
        if not has_sink:
            assert found == left
        elif not is_wide:  # a table that is hardly longer than the window is left as it is: everything is visible
            begin = max(int(length[row]) - window.size, 0) // page_size * page_size
            assert set(found) - set(left) <= set(range(begin, begin + page_size))


def test_the_docstrings_example():
    table = np.array([[3, 8, 5, 9, 4]])
    seen = visible_slots(jnp.asarray(table), jnp.array([18]), 4, SlidingWindow(5, 2))
    assert seen.page_table[0, :3].tolist() == [3, 9, 4]
    assert (seen.start.tolist(), seen.length.tolist()) == ([1], [10])
    assert slots_seen(seen, 0, table, 4) == [1, 2, 3, 12, 13, 14, 15, 16, 17]


def test_a_window_reads_fewer_pages():
    assert visible_slots(jnp.arange(20)[None], jnp.array([70]), 4, SlidingWindow(8, 4)).page_table.shape[1] == 4


@pytest.mark.parametrize("algorithm", ["EAGLE3", exhaustive("EAGLE"), exhaustive("MTP")])
@pytest.mark.parametrize("worth", [-3.0, -6.0, exhaustive(-4.5)])
def test_levels_that_pay_are_drafted_as_without_a_limit(algorithm, worth):
    """So all candidates that are verified are those of the whole draft, and the head's state too."""
    spec = TreeShape(4, 3, 12)

    def both(models, state, table):
        batch = gather(state, jnp.array([0]), table)

        def drafted(use):
            return models.drafter.propose(models.target, state, batch, spec, use)

        limit = jnp.full((1, 1), worth)
        return (
            drafted(DraftUse(worth=limit)).candidates,
            drafted(DraftUse(worth=limit - jnp.inf)).candidates,
            drafted(DraftUse()).candidates,
        )

    found, unlimited, whole = compiled(both, algorithm)(prefilled(algorithm, PROMPT).state, TABLE)
    np.testing.assert_array_equal(unlimited.scores, whole.scores)
    pays = np.asarray(whole.scores) >= worth
    assert 0 < pays.sum() < pays.size, "some pay"
    np.testing.assert_array_equal(np.asarray(found.scores) >= worth, pays)
    for name in ("tokens", "scores", "parents"):
        np.testing.assert_array_equal(np.asarray(getattr(found, name))[pays], np.asarray(getattr(whole, name))[pays], name)


@pytest.mark.variants
@pytest.mark.parametrize(("algorithm", "window"), [exhaustive("EAGLE3", SlidingWindow(6)), ("ORACLE", None)])
def test_a_chain_is_the_tree_of_a_beam_of_one(algorithm, window):
    """The oracle's tokens show positions."""
    spec = TreeShape(4, 1)

    def both(models, state, table):
        batch = gather(state, jnp.array([0]), table)
        candidates = models.drafter.propose(models.target, state, batch, spec, DraftUse(scored=True)).candidates
        expected = build_tree(batch.sequences.root, candidates, spec.num_draft_tokens, spec.num_steps)
        return propose(models, state, batch, spec).tree, expected

    found, expected = compiled(both, algorithm, window)(prefilled(algorithm, PROMPT).state, TABLE)
    for name in found._fields:
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)
    assert len(set(found.tokens[0].tolist())) > 1
