"""What lives on the device between cycles: the caches and one row of state per running request."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxspec.typing import Array, Bool, Float, Int, KeysValues, UInt

MAX_STOP_TOKENS = 16
"""Stop tokens per request that the device checks, end-of-sequence tokens included."""


class Caches(NamedTuple):
    """Committed keys and values, in pages that target and head share by number: one page table serves both."""

    target: tuple[KeysValues, ...]
    """Per layer; slot i holds token i."""
    draft: tuple[KeysValues, ...]
    """Per head layer; slot i holds the pair (feature of position i - 1, token i), so slot 0 is never used. Empty: no head."""


class Sequences(NamedTuple):
    """The state of r sequences. It does not depend on the tree, so the next cycle may use another one."""

    length: Int[Array, " r"]
    """Committed target slots: tokens 0 .. length - 1 are in the target's pages, 1 .. length in the head's."""
    root: Int[Array, " r"]
    """The newest token, at position `length`; not yet in the target's pages."""
    draft_hidden: Float[Array, "r h"]
    """The head's output at slot `length`; the next draft starts here."""
    feature: Float[Array, "r f"]
    """The target's feature of the last prefilled position, carried from chunk to chunk."""
    temperature: Float[Array, " r"]
    """0: greedy."""
    seed: UInt[Array, "r 2"]
    remaining: Int[Array, " r"]
    """Tokens that may still be emitted."""
    stop_tokens: Int[Array, "r t"]
    """Token ids that end the sequence; unused entries are -1."""
    done: Bool[Array, " r"]
    """The sequence has ended (or the row is free): cycles emit and write nothing for it."""


def empty_sequences(rows: int, hidden_size: int, feature_size: int, dtype: DTypeLike) -> Sequences:
    """Free rows."""
    return Sequences(
        length=jnp.zeros(rows, jnp.int32),
        root=jnp.zeros(rows, jnp.int32),
        draft_hidden=jnp.zeros((rows, hidden_size), dtype),
        feature=jnp.zeros((rows, feature_size), dtype),
        temperature=jnp.zeros(rows, jnp.float32),
        seed=jnp.zeros((rows, 2), jnp.uint32),
        remaining=jnp.zeros(rows, jnp.int32),
        stop_tokens=jnp.full((rows, MAX_STOP_TOKENS), -1, jnp.int32),
        done=jnp.ones(rows, bool),
    )


def take(sequences: Sequences, rows: Int[Array, " b"]) -> Sequences:
    """The state of the batch's sequences."""
    return jax.tree.map(lambda field: field[rows], sequences)


def put(sequences: Sequences, rows: Int[Array, " b"], batch: Sequences) -> Sequences:
    """The state with the batch's rows replaced."""
    return jax.tree.map(lambda field, new: field.at[rows].set(new), sequences, batch)
