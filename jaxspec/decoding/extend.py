"""Extend: the drafter absorbs the emitted tokens, with the target's features, so that its state follows the target's."""

import jax
import jax.numpy as jnp

from jaxspec.decoding.drafter import Models, NewTokens
from jaxspec.decoding.state import Batch, State, gather, put
from jaxspec.decoding.verify import Accepted, Verified
from jaxspec.typing import Array, Int


@jax.named_scope("extend")
def extend(models: Models, state: State, batch: Batch, verified: Verified, accepted: Accepted) -> State:
    """The drafter absorbs the emitted tokens. If it may lag, a plain cycle only keeps their features (`catch_up`)."""
    if accepted.path.shape[1] == 1 and models.drafter.traits.lags:
        return fall_behind(state, batch, verified, accepted)
    features = features_of(models, jnp.take_along_axis(verified.features, accepted.path[:, :, None], 1))
    first = batch.sequences.length + 1
    new = NewTokens(accepted.tokens, features, first, first, accepted.emitted)
    return state._replace(draft=models.drafter.absorb(models.target, state, batch, new))


def features_of(models: Models, features: Array) -> Array:
    """The target's features; zero wide for a drafter that reads none, as in State.features."""
    return features if models.drafter.feature_size else features[..., :0]


def fall_behind(state: State, batch: Batch, verified: Verified, accepted: Accepted) -> State:
    """Keeps the feature of a plain cycle's token for later, so that the cycle costs no more than without a drafter."""
    before = state.features
    lag = before.lag[batch.rows]
    place = jnp.where(accepted.emitted > 0, lag, before.lagging.shape[1])
    features = verified.features[:, 0, : before.lagging.shape[2]]
    lagging = before.lagging.at[batch.rows, place].set(features, mode="drop")
    lags = before.lag.at[batch.rows].set(lag + accepted.emitted)
    return state._replace(features=before._replace(lag=lags, lagging=lagging))


@jax.named_scope("catch_up")
def catch_up(models: Models, state: State, rows: Int[Array, " b"], page_table: Int[Array, "b p"]) -> State:
    """The drafter absorbs the tokens that it lags behind after plain cycles; a draft may follow.

    In:  length 9, lag 3
    Out: the drafter's slots 7, 8 and 9 are written; lag 0
    """
    batch = gather(state, rows, page_table)
    features, history, lag = state.features.lagging[rows], state.history[rows], state.features.lag[rows]
    first = batch.sequences.length + 1 - lag
    slots = first[:, None] + jnp.arange(features.shape[1], dtype=jnp.int32)
    tokens = jnp.take_along_axis(history, jnp.minimum(slots, history.shape[1] - 1), 1)
    draft = models.drafter.absorb(models.target, state, batch, NewTokens(tokens, features, first, first, lag))
    return state._replace(draft=draft, features=put(state.features, rows, lag=jnp.zeros_like(lag)))
