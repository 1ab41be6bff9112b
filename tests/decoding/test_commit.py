"""Committing accepted rows and moving sequences on, without models."""

import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.commit import advance, commit
from jaxspec.decoding.state import Batch, Sequences, Sizes, State, empty_state, gather, put_sequences
from jaxspec.decoding.verify import RUNNING, STOPPED, Accepted, Verified
from jaxspec.testing import tiny_config
from jaxspec.typing import KeysValues

PAGE, LENGTH = 4, 12
TABLE = jnp.array([[5, 2, 0], [1, 4, 3]])


def state_of(lengths: list[int]) -> State:
    """Running sequences in rows 1 and 2 over empty pages; row 0 is free."""
    pages = KeysValues(jnp.zeros((6, PAGE, 1, 2)), jnp.zeros((6, PAGE, 1, 2)))
    sizes = Sizes(3, 0, PAGE, LENGTH, 1, jnp.float32)
    state = empty_state(tiny_config(vocab_size=8), sizes, 0, ())._replace(cache=(pages,))
    running = Sequences.of(jnp.array(lengths), jnp.array([7, 6]), jnp.array([9, 9]), jnp.array([False, True]))
    return put_sequences(state, jnp.array([1, 2]), running)


def batch_of(state: State) -> Batch:
    return gather(state, jnp.array([1, 2]), TABLE)


def accepted(emitted: int, finish: int = RUNNING) -> Accepted:
    """Row 1 emits the first of the tokens 3, 4, 5 and row 2, which is done, none."""
    path = jnp.array([[0, 2, 5]] * 2, jnp.int32)
    counts = jnp.array([emitted, 0], jnp.int32)
    return Accepted(path, jnp.array([[3, 4, 5]] * 2, jnp.int32), counts, counts, jnp.array([finish, RUNNING]))


def test_the_docstrings_example_of_a_commit():
    state = state_of([7, 2])
    window = KeysValues(*(jnp.arange(2 * 6 * 2, dtype=jnp.float32).reshape(2, 6, 1, 2) + 1 + extra for extra in (0, 100)))
    verified = Verified(jnp.zeros((2, 6), jnp.int32), jnp.zeros((2, 6, 8)), jnp.zeros((2, 6, 1)), (window,))
    ((keys, values),) = commit(state, batch_of(state), verified, accepted(2)).cache
    for found, rows in ((keys, window.k), (values, window.v)):
        slots = np.asarray(found)[np.asarray(TABLE[0])].reshape(3 * PAGE, 2)
        assert (slots[7] == rows[0, 0, 0]).all() and (slots[8] == rows[0, 2, 0]).all()
        assert np.count_nonzero(np.asarray(found)) == 4, "nothing else is written, and nothing of the sequence that is done"


def test_a_sequence_moves_on_by_its_emitted_tokens():
    state = state_of([7, 2])
    after = advance(state, batch_of(state), accepted(2))
    assert after.sequences.length.tolist() == [0, 9, 2]
    assert after.sequences.root.tolist() == [0, 4, 6]
    assert after.sequences.remaining.tolist() == [0, 7, 9]
    assert after.sequences.done.tolist() == [True, False, True]
    assert after.history[1].tolist() == [0] * 8 + [3, 4, 0, 0] and not after.history[jnp.array([0, 2])].any()


def test_a_sequence_that_stopped_is_done():
    state = state_of([LENGTH - 2, 2])
    after = advance(state, batch_of(state), accepted(1, STOPPED))
    assert after.sequences.done.tolist() == [True, True, True]
    assert after.history[1].tolist() == [0] * (LENGTH - 1) + [3]


def test_rows_of_other_requests_stay_as_they_are():
    state = state_of([7, 2])
    before, one = state.sequences.numbers, jnp.array([1])
    changed = gather(state, one, jnp.zeros((1, 0), jnp.int32)).sequences.replaced(length=jnp.array([8]))
    after = put_sequences(state, one, changed).sequences
    assert after.length.tolist() == [0, 8, 2]
    assert (after.numbers[:, 1:] == before[:, 1:]).all()
