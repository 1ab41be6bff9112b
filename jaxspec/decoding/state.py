"""The device state between programs (the caches, and one row per running request), and the batches gathered from it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxspec.decoding.sampling import Logprobs
from jaxspec.decoding.settings import Settings, neutral_settings
from jaxspec.models.head import DraftHead
from jaxspec.models.llama import Llama
from jaxspec.typing import Array, Bool, Float, Int, KeysValues


class Models(NamedTuple):
    """The target, its draft head (None: plain decoding only), and the target's layers whose input streams the head reads."""

    target: Llama
    head: DraftHead | None
    capture: tuple[int, ...]


class Caches(NamedTuple):
    """Committed keys and values, in pages that target and head share by number: one page table serves both."""

    target: tuple[KeysValues, ...]
    """Per layer; slot i holds token i."""
    draft: tuple[KeysValues, ...]
    """Per head layer; slot i holds the pair (feature of position i - 1, token i), so slot 0 is never used. Empty: no head."""


class Sequences(NamedTuple):
    """The part of r rows that every cycle changes. It does not depend on the tree, so the next cycle may use another."""

    length: Int[Array, " r"]
    """Committed target slots: tokens 0 .. length - 1 are in the target's pages, 1 .. length - lag in the head's."""
    root: Int[Array, " r"]
    """The newest token, at position `length`; not yet in the target's pages."""
    draft_hidden: Float[Array, "r h"]
    """The head's output at its last slot; without a lag, that is slot `length`, where the next draft starts."""
    feature: Float[Array, "r f"]
    """The target's feature of the last prefilled position, carried from chunk to chunk."""
    lag: Int[Array, " r"]
    """Slots by which the head's cache lags behind the target's, because plain cycles do not extend it (extend.catch_up)."""
    remaining: Int[Array, " r"]
    """Tokens that may still be emitted."""
    done: Bool[Array, " r"]
    """The sequence has ended (or the row is free, or prefilling): cycles emit and write nothing for it."""


class Sizes(NamedTuple):
    """Sizes that the shapes of the state depend on."""

    hidden: int
    """The head's hidden size; without a head, the target's."""
    feature: int
    vocab: int
    max_length: int
    """Tokens of the longest sequence."""
    max_lag: int
    """Most slots by which the head may lag behind."""


class Calibration(NamedTuple):
    """How well the head's logits predict the target's choice, fitted while serving (coupling.py). All requests share it."""

    weights: Float[Array, " 3"]
    """For unlikely tokens' logits, likely tokens' logits, and the noise times the temperature. Larger weights make the prediction
    more confident."""
    information: Float[Array, "3 3"]
    """Of the observations so far (Fisher's): the more there is, the smaller is the next step."""


class State(NamedTuple):
    """Everything on the device that programs change: they take it, update it in place and return it."""

    caches: Caches
    sequences: Sequences
    settings: Settings
    """The sampling parameters by row, set when a request is admitted."""
    history: Int[Array, "r t"]
    """Tokens by position: prompt and output, including the root."""
    bias: Float[Array, "r v"]
    """Added to the logits: logit_bias, and -inf for banned tokens. Zeros if the request has neither."""
    lag_features: Float[Array, "r lag f"]
    """The target's features of the newest Sequences.lag positions."""
    calibration: Calibration


class Batch(NamedTuple):
    """The b sequences that a program works on, gathered from their state rows."""

    rows: Int[Array, " b"]
    page_table: Int[Array, "b p"]
    """The pages of each sequence, in order."""
    sequences: Sequences
    """As they were when the program began; in prefill, length and done as of the chunk's end."""
    all_settings: Settings
    """Of all rows of the state."""

    @property
    def settings(self) -> Settings:
        """Of the batch; gathered where they are read, so that a branch that does not run gathers nothing."""
        return jax.tree.map(lambda field: field[self.rows], self.all_settings)


class Drafted(NamedTuple):
    """The draft trees of a cycle and the accepted paths, for tracing."""

    tokens: Int[Array, "b n"]
    parents: Int[Array, "b n"]
    """As in decoding.tree.Tree."""
    path: Int[Array, "b j"]
    """The accepted nodes, root first; entries after the accepted drafts mean nothing."""


class ProgramOutput(NamedTuple):
    """The result of a program: the new device state, and the small arrays that the host reads."""

    state: State
    report: Int[Array, "b columns"]
    logprobs: Logprobs
    """Of the emitted tokens; zeros if no request of the batch wants them."""
    prompt_logprobs: Logprobs | None = None
    """Of the prompt: entry j is about the token after the chunk's token j; zeros if not wanted. Prefill only."""
    drafted: Drafted | None = None
    """Cycles only."""


class Admission(NamedTuple):
    """The state of b new requests."""

    row: Int[Array, " b"]
    tokens: Int[Array, "b t"]
    """All known tokens by position, padded. Penalties need them even where the prefix cache saves the prefill."""
    remaining: Int[Array, " b"]
    """Tokens that may be emitted: less than max_tokens if a preempted request comes back."""
    settings: Settings
    bias: Float[Array, "b v"]


def empty_sequences(rows: int, hidden_size: int, feature_size: int, dtype: DTypeLike) -> Sequences:
    """Free rows."""
    return Sequences(
        length=jnp.zeros(rows, jnp.int32),
        root=jnp.zeros(rows, jnp.int32),
        draft_hidden=jnp.zeros((rows, hidden_size), dtype),
        feature=jnp.zeros((rows, feature_size), dtype),
        lag=jnp.zeros(rows, jnp.int32),
        remaining=jnp.zeros(rows, jnp.int32),
        done=jnp.ones(rows, bool),
    )


def empty_state(caches: Caches, rows: int, sizes: Sizes, dtype: DTypeLike) -> State:
    """Free rows over these caches."""
    return State(
        caches=caches,
        sequences=empty_sequences(rows, sizes.hidden, sizes.feature, dtype),
        settings=neutral_settings(rows),
        history=jnp.zeros((rows, sizes.max_length), jnp.int32),
        bias=jnp.zeros((rows, sizes.vocab), jnp.float32),
        lag_features=jnp.zeros((rows, sizes.max_lag, sizes.feature), dtype),
        calibration=Calibration(jnp.ones(3, jnp.float32), jnp.zeros((3, 3), jnp.float32)),
    )


def gather(state: State, rows: Int[Array, " b"], page_table: Int[Array, "b p"]) -> Batch:
    """The batch of the sequences in these state rows."""
    return Batch(rows, page_table, jax.tree.map(lambda field: field[rows], state.sequences), state.settings)


def put[Table: (Sequences, Settings)](table: Table, rows: Int[Array, " b"], **fields: Array) -> Table:
    """The table with these fields of the batch's rows replaced."""
    before = table._asdict()
    return table._replace(**{name: before[name].at[rows].set(values) for name, values in fields.items()})


def admit(state: State, admission: Admission) -> State:
    """Gives the rows to new requests. They take part in cycles after their last prefill chunk."""
    rows, zeros = admission.row, jnp.zeros_like(admission.row)
    fresh = {"length": zeros, "lag": zeros, "remaining": admission.remaining, "done": jnp.ones_like(rows, bool)}
    return state._replace(
        sequences=put(state.sequences, rows, **fresh),
        settings=put(state.settings, rows, **admission.settings._asdict()),
        history=state.history.at[rows].set(admission.tokens),
        bias=state.bias.at[rows].set(admission.bias),
    )


def last(values: Array, count: Int[Array, " b"]) -> Array:
    """values[b, count[b] - 1] of every sequence; entry 0 where count is 0."""
    index = jnp.maximum(count - 1, 0).reshape(-1, *(1,) * (values.ndim - 1))
    return jnp.take_along_axis(values, index, 1)[:, 0]
