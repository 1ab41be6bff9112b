"""What lives on the device between cycles: the caches and one row of state per running request."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxspec.sampling import SamplingKind, Settings
from jaxspec.typing import Array, Bool, Float, Int, KeysValues

MAX_STOP_TOKENS = 16
"""Stop tokens per request that the device checks, end-of-sequence tokens included."""


class Caches(NamedTuple):
    """Committed keys and values, in pages that target and head share by number: one page table serves both."""

    target: tuple[KeysValues, ...]
    """Per layer; slot i holds token i."""
    draft: tuple[KeysValues, ...]
    """Per head layer; slot i holds the pair (feature of position i - 1, token i), so slot 0 is never used. Empty: no head."""


class Sequences(NamedTuple):
    """What changes from cycle to cycle, of r sequences. It does not depend on the tree, so the next cycle may use another one."""

    length: Int[Array, " r"]
    """Committed target slots: tokens 0 .. length - 1 are in the target's pages, 1 .. length - postponed in the head's."""
    root: Int[Array, " r"]
    """The newest token, at position `length`; not yet in the target's pages."""
    draft_hidden: Float[Array, "r h"]
    """The head's output at its last slot; with nothing postponed, that is slot `length`, where the next draft starts."""
    feature: Float[Array, "r f"]
    """The target's feature of the last prefilled position, carried from chunk to chunk."""
    postponed: Int[Array, " r"]
    """Newest slots that the head was not extended by yet: plain cycles leave that for later (extend.py)."""
    remaining: Int[Array, " r"]
    """Tokens that may still be emitted."""
    done: Bool[Array, " r"]
    """The sequence has ended (or the row is free, or prefilling): cycles emit and write nothing for it."""


class Sizes(NamedTuple):
    """What the shapes of the state depend on."""

    hidden: int
    """Of the head; of the target without one."""
    feature: int
    vocab: int
    max_length: int
    """Tokens of the longest sequence."""
    postpone: int
    """Slots by which a head may lag behind."""


class State(NamedTuple):
    """Everything on the device that programs change; they take it, update it in place and return it."""

    caches: Caches
    sequences: Sequences
    settings: Settings
    """What was asked for, by row: set when a request is admitted."""
    history: Int[Array, "r t"]
    """Tokens by position, prompt and output, up to and with the root."""
    bias: Float[Array, "r v"]
    """Added to the logits: logit_bias, and -inf for tokens that must not be drawn. Zeros for who asked for neither."""
    postponed: Float[Array, "r steps f"]
    """The target's features of the newest positions, as many as Sequences.postponed says."""


def empty_sequences(rows: int, hidden_size: int, feature_size: int, dtype: DTypeLike) -> Sequences:
    """Free rows."""
    return Sequences(
        length=jnp.zeros(rows, jnp.int32),
        root=jnp.zeros(rows, jnp.int32),
        draft_hidden=jnp.zeros((rows, hidden_size), dtype),
        feature=jnp.zeros((rows, feature_size), dtype),
        postponed=jnp.zeros(rows, jnp.int32),
        remaining=jnp.zeros(rows, jnp.int32),
        done=jnp.ones(rows, bool),
    )


def greedy_settings(rows: int) -> Settings:
    """Greedy decoding without stop tokens."""

    def number(value: int) -> Array:  # a new array each time: donated arrays must differ
        return jnp.full(rows, value, jnp.float32)

    def whole(value: int) -> Array:
        return jnp.full(rows, value, jnp.int32)

    return Settings(
        kind=whole(SamplingKind.GREEDY),
        temperature=number(0),
        seed=jnp.zeros((rows, 2), jnp.uint32),
        top_k=whole(jnp.iinfo(jnp.int32).max),
        top_p=number(1),
        min_p=number(0),
        repetition_penalty=number(1),
        frequency_penalty=number(0),
        presence_penalty=number(0),
        prompt_length=whole(0),
        min_length=whole(0),
        stop_tokens=jnp.full((rows, MAX_STOP_TOKENS), -1, jnp.int32),
        wants_logprobs=jnp.zeros(rows, bool),
        wants_prompt_logprobs=jnp.zeros(rows, bool),
    )


def empty_state(caches: Caches, rows: int, sizes: Sizes, dtype: DTypeLike) -> State:
    """Free rows over these caches."""
    return State(
        caches=caches,
        sequences=empty_sequences(rows, sizes.hidden, sizes.feature, dtype),
        settings=greedy_settings(rows),
        history=jnp.zeros((rows, sizes.max_length), jnp.int32),
        bias=jnp.zeros((rows, sizes.vocab), jnp.float32),
        postponed=jnp.zeros((rows, sizes.postpone, sizes.feature), dtype),
    )


def take[Table: (Sequences, Settings)](table: Table, rows: Int[Array, " b"]) -> Table:
    """The rows of the batch's sequences."""
    return jax.tree.map(lambda field: field[rows], table)


def put[Table: (Sequences, Settings)](table: Table, rows: Int[Array, " b"], batch: Table) -> Table:
    """The table with the batch's rows replaced."""
    return jax.tree.map(lambda field, new: field.at[rows].set(new), table, batch)
