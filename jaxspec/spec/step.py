"""What every program works with and returns."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxspec.models.head import DraftHead
from jaxspec.models.llama import Llama
from jaxspec.sampling import Logprobs
from jaxspec.spec.state import State
from jaxspec.typing import Array, Int


class Models(NamedTuple):
    """The target, its draft head (None: plain decoding only) and which residual streams of the target the head reads."""

    target: Llama
    head: DraftHead | None
    capture: tuple[int, ...]


class Drafted(NamedTuple):
    """The trees of a cycle and what became of them, for whoever wants to look."""

    tokens: Int[Array, "b n"]
    parents: Int[Array, "b n"]
    """As in spec.tree.Tree."""
    path: Int[Array, "b j"]
    """The accepted nodes, root first; entries beyond the accepted drafts mean nothing."""


class Step(NamedTuple):
    """What a program returns: the new device state, and the small arrays that the host reads."""

    state: State
    report: Int[Array, "b columns"]
    logprobs: Logprobs
    """Of the emitted tokens; zeros if no request of the batch asked for them."""
    prompt_logprobs: Logprobs | None = None
    """Of the prompt: entry j is about the token behind the chunk's token j; zeros if nobody asked. Prefill only."""
    drafted: Drafted | None = None
    """Cycles only."""


def last(values: Array, count: Int[Array, " b"]) -> Array:
    """values[b, count[b] - 1] of every sequence; entry 0 where count is 0."""
    index = jnp.maximum(count - 1, 0).reshape(-1, *(1,) * (values.ndim - 1))
    return jnp.take_along_axis(values, index, 1)[:, 0]


def write_history(
    history: Int[Array, "r t"], rows: Int[Array, " b"], first: Int[Array, " b"], tokens: Int[Array, "b j"], count: Int[Array, " b"]
) -> Int[Array, "r t"]:
    """Puts the first `count` tokens at positions first, first + 1, ..."""
    steps = jnp.arange(tokens.shape[1])
    places = jnp.where(steps < count[:, None], first[:, None] + steps, history.shape[1])
    return history.at[rows[:, None], places].set(tokens, mode="drop")
