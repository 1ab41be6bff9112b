"""Admission: what a request asks for enters its row of the device state, before its first chunk."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxspec.sampling import Settings
from jaxspec.spec.state import State, put, take
from jaxspec.typing import Array, Float, Int


class Admission(NamedTuple):
    """One request, or several."""

    row: Int[Array, " b"]
    tokens: Int[Array, "b t"]
    """All that is known of the sequence, by position, padded. Penalties look at it, also where no prefill chunk brings it."""
    remaining: Int[Array, " b"]
    """Tokens that may be emitted: less than max_tokens if a preempted request comes back."""
    settings: Settings
    bias: Float[Array, "b v"]


def admit(state: State, admission: Admission) -> State:
    """The row belongs to the request from now on; it takes part in cycles once its last chunk is prefilled."""
    rows = admission.row
    before = take(state.sequences, rows)
    fresh = before._replace(
        length=jnp.zeros_like(rows), postponed=jnp.zeros_like(rows), remaining=admission.remaining, done=jnp.ones_like(before.done)
    )
    return state._replace(
        sequences=put(state.sequences, rows, fresh),
        settings=put(state.settings, rows, admission.settings),
        history=state.history.at[rows].set(admission.tokens),
        bias=state.bias.at[rows].set(admission.bias),
    )
