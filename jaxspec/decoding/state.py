"""The device state between programs (the caches, and one row per running request), and the batches gathered from it."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.buffer_callback import buffer_callback
from jax.typing import DTypeLike

from jaxspec.config import FP8
from jaxspec.decoding.sampling import Logprobs
from jaxspec.decoding.settings import Settings, neutral_settings, packed, unpacked
from jaxspec.model_config import ModelConfig
from jaxspec.models.sharing import Shares
from jaxspec.typing import Array, Bool, Float, Int, KeysValues, UInt


class Sequences(NamedTuple):
    """The part of r rows that every cycle changes. It does not depend on the tree, so the next cycle may use another."""

    numbers: Int[Array, "r 4"]
    """Side by side, so that a GPU reads and writes all of them in one launch each."""

    @classmethod
    def of(
        cls, length: Int[Array, " r"], root: Int[Array, " r"], remaining: Int[Array, " r"], done: Bool[Array, " r"]
    ) -> "Sequences":  # fmt: skip
        return cls(jnp.stack([length, root, remaining, done.astype(jnp.int32)], 1))

    @property
    def length(self) -> Int[Array, " r"]:
        """Committed slots: tokens 0 .. length - 1 are in the target's pages."""
        return self.numbers[:, 0]

    @property
    def root(self) -> Int[Array, " r"]:
        """The newest token, at position `length`; not yet in the target's pages."""
        return self.numbers[:, 1]

    @property
    def remaining(self) -> Int[Array, " r"]:
        """Tokens that may still be emitted."""
        return self.numbers[:, 2]

    @property
    def done(self) -> Bool[Array, " r"]:
        """The sequence has ended (or the row is free, or prefilling): cycles emit and write nothing for it."""
        return self.numbers[:, 3] > 0

    def replaced(self, **fields: Array) -> "Sequences":
        """With these fields replaced."""
        own = {"length": self.length, "root": self.root, "remaining": self.remaining, "done": self.done}
        return Sequences.of(**own | fields)


class Features(NamedTuple):
    """The target's features of tokens that the drafter has not absorbed yet, by row. Its width is 0 if the drafter reads none."""

    last: Float[Array, "r f"]
    """The feature of the last prefilled position, carried from chunk to chunk."""
    lag: Int[Array, " r"]
    """Slots by which the drafter lags behind the target, because plain cycles leave it out (extend.catch_up)."""
    lagging: Float[Array, "r lag f"]
    """The features of the newest `lag` positions, oldest first."""


class Sizes(NamedTuple):
    """Sizes of the state, besides those of the models."""

    rows: int
    num_pages: int
    page_size: int
    """Tokens per page."""
    max_length: int
    """Tokens of the longest sequence."""
    max_lag: int
    """Most slots by which the drafter may lag behind."""
    dtype: DTypeLike
    """Of activations: of features, and of keys and values unless they are stored in 8 bits."""
    kv_cache_dtype: str = "auto"
    """As EngineConfig.kv_cache_dtype, for the target's cache. A drafter knows its own."""
    devices: int = 1
    """Devices that share the models."""


class State(NamedTuple):
    """Everything on the device that programs change: they take it, update it in place and return it."""

    cache: tuple[KeysValues, ...]
    """The target's committed keys and values, per layer, in pages; slot i holds token i."""
    sequences: Sequences
    packed_settings: Int[Array, "r words"]
    """The sampling parameters by row (settings.packed), set when a request is admitted; `masked` also later."""
    history: Int[Array, "r t"]
    """Tokens by position: prompt and output, including the root."""
    bias: Float[Array, "r v"]
    """Added to the logits: logit_bias, and -inf for banned tokens. Zeros if the request has neither."""
    masks: UInt[Array, "r words"]
    """A bit for each token that may come next (verify.unpack), of rows whose settings are `masked`."""
    features: Features
    draft: Any
    """The drafter's own (Drafter.empty), which nothing else reads. If it has pages, they are numbered as the target's: one page
    table serves both."""


class Batch(NamedTuple):
    """The b sequences that a program works on, gathered from their state rows."""

    rows: Int[Array, " b"]
    page_table: Int[Array, "b p"]
    """The pages of each sequence, in order."""
    sequences: Sequences
    """As they were when the program began; in prefill, length and done as of the chunk's end."""
    packed_settings: Int[Array, "b words"]

    @property
    def settings(self) -> Settings:
        """The sampling parameters of each sequence."""
        return unpacked(self.packed_settings)


class Drafted(NamedTuple):
    """The draft trees of a cycle and the accepted paths, for tracing."""

    tokens: Int[Array, "b n"]
    """As Tree.verified."""
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
    """Of the prompt: entry j is about the token after the chunk's token j. Prefill that `scores` only."""
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


def stored_dtype(kv_cache_dtype: str, dtype: DTypeLike) -> jnp.dtype:
    """The dtype of arrays with keys and values for activations of this dtype; numbers of 8 bits are kept as bytes.

    In:  "fp8_e4m3", bfloat16
    Out: uint8
    """
    return jnp.dtype(jnp.uint8 if kv_cache_dtype == FP8 else dtype)


def empty_cache(config: ModelConfig, sizes: Sizes, kv_cache_dtype: str) -> tuple[KeysValues, ...]:
    """Pages [pages, page, kv_heads, head_dim] for every layer; keys and values are separate arrays. They may hold anything:
    only slots that were written are read. With several devices, the heads of one come after those of another."""
    kv_heads = sizes.devices * Shares(config, sizes.devices).kv_heads
    shape = (sizes.num_pages, sizes.page_size, kv_heads, config.head_dim)
    dtype = stored_dtype(kv_cache_dtype, sizes.dtype)
    return tuple(KeysValues(unwritten(shape, dtype), unwritten(shape, dtype)) for _ in range(config.num_layers))


@partial(jax.jit, static_argnums=(0, 1))
def unwritten(shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """An array that may hold anything. On a CPU it takes no memory before it is written: a function gets the new array and leaves
    it alone. (There lax.empty writes zeros.)"""
    if jax.default_backend() != "cpu":
        return jnp.zeros(shape, dtype)
    return buffer_callback(lambda _context, _out: None, jax.ShapeDtypeStruct(shape, dtype))()


def empty_state(target: ModelConfig, sizes: Sizes, feature_size: int, draft: Any) -> State:
    """Free rows and empty caches; `draft` is the drafter's part."""
    rows = sizes.rows
    zeros = jnp.zeros(rows, jnp.int32)
    return State(
        cache=empty_cache(target, sizes, sizes.kv_cache_dtype),
        sequences=Sequences.of(zeros, zeros, zeros, jnp.ones(rows, bool)),
        packed_settings=packed(neutral_settings(rows)),
        history=jnp.zeros((rows, sizes.max_length), jnp.int32),
        bias=jnp.zeros((rows, target.vocab_size), jnp.float32),
        masks=jnp.zeros((rows, words_of(target.vocab_size)), jnp.uint32),
        features=Features(
            last=jnp.zeros((rows, feature_size), sizes.dtype),
            lag=jnp.zeros(rows, jnp.int32),
            lagging=jnp.zeros((rows, sizes.max_lag, feature_size), sizes.dtype),
        ),
        draft=draft,
    )


def words_of(vocab_size: int) -> int:
    """32-bit words of a mask over the vocabulary."""
    return -(-vocab_size // 32)


def gather(state: State, rows: Int[Array, " b"], page_table: Int[Array, "b p"]) -> Batch:
    """The batch of the sequences in these state rows."""
    return Batch(rows, page_table, Sequences(state.sequences.numbers[rows]), state.packed_settings[rows])


def put(features: Features, rows: Int[Array, " b"], **fields: Array) -> Features:
    """With these fields of the batch's rows replaced."""
    before = features._asdict()
    return features._replace(**{name: before[name].at[rows].set(values) for name, values in fields.items()})


def put_sequences(state: State, rows: Int[Array, " b"], sequences: Sequences) -> State:
    """With the batch's sequences replaced."""
    return state._replace(sequences=Sequences(state.sequences.numbers.at[rows].set(sequences.numbers)))


def admit(state: State, admission: Admission) -> State:
    """Gives the rows to new requests. They take part in cycles after their last prefill chunk."""
    rows, zeros = admission.row, jnp.zeros_like(admission.row)
    root = state.sequences.root[rows]
    state = put_sequences(state, rows, Sequences.of(zeros, root, admission.remaining, jnp.ones_like(rows, bool)))
    return state._replace(
        features=put(state.features, rows, lag=zeros),
        packed_settings=state.packed_settings.at[rows].set(packed(admission.settings)),
        history=state.history.at[rows].set(admission.tokens),
        bias=state.bias.at[rows].set(admission.bias),
    )


def mask(state: State, rows: Int[Array, " b"], masks: UInt[Array, "b words"], masked: Bool[Array, " b"]) -> State:
    """Sets the masks of these rows, or ends them where `masked` is False."""
    settings = unpacked(state.packed_settings[rows])._replace(masked=masked)
    return state._replace(
        packed_settings=state.packed_settings.at[rows].set(packed(settings)), masks=state.masks.at[rows].set(masks)
    )


def last(values: Array, count: Int[Array, " b"]) -> Array:
    """values[b, count[b] - 1] of every sequence; entry 0 where count is 0."""
    index = jnp.maximum(count - 1, 0).reshape(-1, *(1,) * (values.ndim - 1))
    return jnp.take_along_axis(values, index, 1)[:, 0]
