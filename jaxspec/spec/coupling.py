"""Coupled drafts: the head is asked under the target's own noise.

The target's token is argmax(logits / T + noise), and the noise of a position is known before the target runs. With the *same*
noise on its own logits the head proposes what the target will most likely choose, and a sampled sequence is accepted almost like
a greedy one: a match has at least the probability (1 - TV) / (1 + TV), where TV is the distance of the two distributions (Daliri,
Musco and Suresh, arXiv 2408.07978). The target's choice is untouched, so the text stays what the seed says.

This needs a head that is as sure as its target. A factor on its logits, the sharpness, is learnt while serving.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.models.head import DraftHead
from jaxspec.spec.filters import apply_filters
from jaxspec.spec.penalties import Context, adjust_logits
from jaxspec.spec.sampling import noise_at
from jaxspec.spec.settings import SamplingKind, Settings, highest_kind, temperature
from jaxspec.spec.state import Batch, Models, Sharpness, State
from jaxspec.typing import Array, Float, Int

LEAST, MOST = 1 / 8, 8.0
"""Bounds of the sharpness."""
MEMORY = 0.999
"""The share of its information that a cycle keeps, so that the sharpness follows other texts within some thousand tokens."""
LOWEST = -1e30
"""In place of -inf, as all tokens that a head knows may be banned."""


class Coupling(NamedTuple):
    """What is known of the target's choices before it runs."""

    noise: Float[Array, "b depths v"]
    """Of the choices after nodes at depth 0, 1, ..., num_steps. Meaningless if all requests are greedy."""
    needed: Int[Array, ""]
    """The highest SamplingKind of the batch."""
    state: State
    rows: Int[Array, " b"]
    length: Int[Array, " b"]
    """Of Sequences."""

    @property
    def settings(self) -> Settings:
        """Gathered in branches only, so that greedy cycles gather nothing."""
        return jax.tree.map(lambda field: field[self.rows], self.state.settings)


@jax.named_scope("couple")
def couple(state: State, batch: Batch, num_steps: int) -> Coupling:
    """Draws the noise of a cycle, if any request is sampled: one vector per position, for the drafts and for the target."""
    batch_size, vocab_size = batch.rows.shape[0], state.bias.shape[-1]
    needed = highest_kind(batch.settings, ~batch.now.done)

    def draw() -> Float[Array, "b depths v"]:
        return noise_at(batch.now.length[:, None] + 1 + jnp.arange(num_steps + 1), coupling.settings, vocab_size)

    def leave_out() -> Float[Array, "b depths v"]:
        return jax.lax.empty((batch_size, num_steps + 1, vocab_size), jnp.float32)

    coupling = Coupling(leave_out(), needed, state, batch.rows, batch.now.length)
    return coupling._replace(noise=jax.lax.cond(needed > SamplingKind.GREEDY, draw, leave_out))


def coupled_scores(coupling: Coupling, head: DraftHead, logits: Float[Array, "b w v"], depth: int) -> Float[Array, "b w v"]:
    """The head's logits after nodes at this depth, as the target's choice will see its own: adjusted, divided by the temperature,
    filtered, and with the noise. Those of greedy requests are only adjusted.

    Penalties count the text up to the root, not the drafts after it; the filters' cut-offs are rounded. Drafts may guess.
    """
    length, settings = coupling.length, coupling.settings
    is_sampled = settings.temperature[:, None, None] > 0

    def adjust(logits: Float[Array, "b w v"]) -> Float[Array, "b w v"]:
        positions = jnp.broadcast_to(length[:, None] + depth + 1, logits.shape[:2])
        nothing = jnp.zeros((len(logits), 0), jnp.int32)
        context = Context(coupling.state.history[coupling.rows], length + 1, nothing, jnp.zeros((len(logits), 1, 0), bool))
        return adjust_logits(logits, positions, context, settings, coupling.state.bias[coupling.rows], head.target_vocab())

    def filtered(logits: Float[Array, "b w v"]) -> Float[Array, "b w v"]:
        return apply_filters(logits, settings, rough=True)

    def unfiltered(logits: Float[Array, "b w v"]) -> Float[Array, "b w v"]:
        return logits / temperature(settings)

    logits = jnp.where(is_sampled, coupling.state.sharpness.factor * logits, logits)
    logits = jax.lax.cond(coupling.needed == SamplingKind.ADJUSTED, adjust, lambda same: same, logits)
    scaled = jax.lax.cond(coupling.needed >= SamplingKind.FILTERED, filtered, unfiltered, logits)
    noise = coupling.noise[:, depth]
    if (ids := head.target_vocab()) is not None:
        noise = noise[:, ids]
    return jnp.maximum(jnp.where(is_sampled, scaled + noise[:, None], logits), LOWEST)


@jax.named_scope("learn")
def learn(
    models: Models,
    state: State,
    batch: Batch,
    coupling: Coupling | None,
    logits: Float[Array, "b v"] | None,
    chosen: Int[Array, " b"],
) -> State:
    """Moves the sharpness towards the likeliest one, given the head's logits at the roots and the tokens that the target chose.

    A Newton step: the gradient of the log likelihood of softmax(sharpness * logits / T), divided by all information so far.
    """
    head = models.head
    if coupling is None or logits is None or head is None:
        return state
    ids = jnp.arange(logits.shape[-1]) if head.target_vocab() is None else head.target_vocab()

    def observe(before: Sharpness) -> Sharpness:
        settings = coupling.settings
        scaled = logits / temperature(settings)[:, :, 0]
        likelihood = jax.nn.softmax(before.factor * scaled, -1)
        mean = jnp.sum(likelihood * scaled, -1)
        variance = jnp.sum(likelihood * (scaled - mean[:, None]) ** 2, -1)
        is_chosen = ids == chosen[:, None]
        counts = jnp.any(is_chosen, -1) & (settings.temperature > 0) & (settings.kind < SamplingKind.ADJUSTED) & ~batch.now.done
        surprise = jnp.sum(jnp.where(is_chosen, scaled, 0), -1) - mean
        information = MEMORY * before.information + jnp.sum(jnp.where(counts, variance, 0))
        step = jnp.sum(jnp.where(counts, surprise, 0)) / information
        return Sharpness(jnp.clip(before.factor + step, LEAST, MOST), information)

    return state._replace(
        sharpness=jax.lax.cond(coupling.needed > SamplingKind.GREEDY, observe, lambda same: same, state.sharpness)
    )
