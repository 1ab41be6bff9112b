"""Choosing the target's own token: argmax, or argmax of logits / T + noise, with noise keyed by (seed, position, token id).

The key knows nothing of trees or batches, so one seed gives one text, whatever the tree (docs/structure.md, idea 4).
Penalties and bias (adjust.py) change the logits before anything here looks at them.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.sampling_params import MAX_LOGPROBS, SamplingParams
from jaxspec.typing import Array, Bool, Float, Int, UInt

type Logits = Float[Array, "b n v"]


class SamplingKind(IntEnum):
    """How much of the machinery a request needs. A batch runs what its most demanding request needs: each kind gives the
    requests of the kinds before it the tokens that those would give, so nobody notices company."""

    GREEDY = 0
    TEMPERATURE = 1
    FILTERED = 2
    """With top_k, top_p or min_p."""
    ADJUSTED = 3
    """With penalties, bias, min_tokens, bad or allowed tokens; and whatever the others do."""

    @classmethod
    def of(cls, params: SamplingParams) -> "SamplingKind":
        if params.adjusts:
            return cls.ADJUSTED
        return cls.FILTERED if params.filters else cls.TEMPERATURE if params.temperature > 0 else cls.GREEDY


class Settings(NamedTuple):
    """SamplingParams of r sequences, as the device sees them."""

    kind: Int[Array, " r"]
    """A SamplingKind."""
    temperature: Float[Array, " r"]
    """0: greedy."""
    seed: UInt[Array, "r 2"]
    top_k: Int[Array, " r"]
    """The size of the vocabulary, or more: all."""
    top_p: Float[Array, " r"]
    min_p: Float[Array, " r"]
    repetition_penalty: Float[Array, " r"]
    frequency_penalty: Float[Array, " r"]
    presence_penalty: Float[Array, " r"]
    prompt_length: Int[Array, " r"]
    """Where the output begins: what frequency and presence count."""
    min_length: Int[Array, " r"]
    """Stop tokens are banned at positions below it."""
    stop_tokens: Int[Array, "r stops"]
    """Token ids that end the sequence; unused entries are -1."""
    wants_logprobs: Bool[Array, " r"]
    wants_prompt_logprobs: Bool[Array, " r"]


class Logprobs(NamedTuple):
    """Log probabilities of tokens at j positions, and the likeliest tokens there, best first."""

    chosen: Float[Array, "b j"]
    top_ids: Int[Array, "b j top"]
    top: Float[Array, "b j top"]


def gumbel_noise(seed: UInt[Array, " 2"], position: Int[Array, ""], vocab_size: int) -> Float[Array, " v"]:
    """Standard Gumbel noise for every token that could stand at `position` of the request with this seed (two 32-bit words)."""
    return jax.random.gumbel(position_key(seed, position), (vocab_size,), jnp.float32)


def position_key(seed: UInt[Array, " 2"], position: Int[Array, ""]) -> Array:
    """The random key of one position of a request."""
    return jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)


@jax.named_scope("choose")
def choose(
    logits: Logits, positions: Int[Array, "b n"], settings: Settings, active: Bool[Array, " b"], adjust: Callable[[Logits], Logits]
) -> Int[Array, "b n"]:
    """The token that the target puts at `positions`; rows with temperature 0 are greedy under every kind.

    Of the four ways only one runs, the one that the most demanding active row needs: the others cost nothing.
    """

    def filtered(logits):
        return pick(
            logits, filtered_draw(logits / scale(settings), noise_at(positions, settings, logits.shape[-1]), settings), settings
        )

    ways = {
        SamplingKind.GREEDY: greedy,
        SamplingKind.TEMPERATURE: lambda logits: pick(logits, draw(logits, positions, settings), settings),
        SamplingKind.FILTERED: filtered,
        SamplingKind.ADJUSTED: lambda logits: filtered(adjust(logits)),
    }
    needed = jnp.max(jnp.where(active, settings.kind, SamplingKind.GREEDY))
    return jax.lax.switch(needed, [ways[kind] for kind in SamplingKind], logits)


def greedy(logits: Logits) -> Int[Array, "b n"]:
    """The likeliest token; of several the one with the lowest id."""
    return jnp.argmax(logits, -1).astype(jnp.int32)


def pick(logits: Logits, drawn: Int[Array, "b n"], settings: Settings) -> Int[Array, "b n"]:
    """What was drawn, or the likeliest token where the temperature is 0."""
    return jnp.where(settings.temperature[:, None] > 0, drawn, greedy(logits))


def scale(settings: Settings) -> Float[Array, "b 1 1"]:
    """The temperature, 1 for greedy rows."""
    return jnp.where(settings.temperature > 0, settings.temperature, 1.0)[:, None, None]


def noise_at(positions: Int[Array, "b n"], settings: Settings, vocab_size: int) -> Logits:
    """The noise of every position and token."""
    noise_of_sequence = jax.vmap(gumbel_noise, in_axes=(None, 0, None))
    return jax.vmap(noise_of_sequence, in_axes=(0, 0, None))(settings.seed, positions, vocab_size)


def draw(logits: Logits, positions: Int[Array, "b n"], settings: Settings) -> Int[Array, "b n"]:
    """A draw from softmax(logits / temperature)."""
    return greedy(logits / scale(settings) + noise_at(positions, settings, logits.shape[-1]))


def filtered_draw(scaled: Logits, noise: Logits, settings: Settings) -> Int[Array, "b n"]:
    """A draw among the tokens that top_k, top_p and min_p leave."""
    ordered, ids, kept = sorted_and_kept(scaled, settings)
    best = jnp.argmax(jnp.where(kept, ordered + jnp.take_along_axis(noise, ids, -1), -jnp.inf), -1)
    return jnp.take_along_axis(ids, best[..., None], -1)[..., 0]


def sorted_and_kept(scaled: Logits, settings: Settings) -> tuple[Logits, Int[Array, "b n v"], Bool[Array, "b n v"]]:
    """Logits (temperature applied) from the likeliest token down, their token ids, and which of them can be drawn.

    The three filters look at the same probabilities, so their order does not matter: a token stays if it is among the
    top_k, if those before it have less than top_p together, and if it has min_p times the likeliest one's probability.

    In:  probabilities 0.5, 0.3, 0.15, 0.05; top_k 3, top_p 0.9, min_p 0.4
    Out: kept are the first two (top_k keeps three, top_p three, min_p two)
    """
    order = jnp.broadcast_to(jnp.arange(scaled.shape[-1], dtype=jnp.int32), scaled.shape)
    negative, ids = jax.lax.sort((-scaled, order), num_keys=1, is_stable=True)
    probabilities = jax.nn.softmax(-negative, -1)
    top_k, top_p, min_p = (field[:, None, None] for field in (settings.top_k, settings.top_p, settings.min_p))
    in_top_p = jnp.cumsum(probabilities, -1) - probabilities < top_p
    kept = (order < top_k) & (in_top_p | (top_p >= 1)) & (probabilities >= min_p * probabilities[..., :1])
    return -negative, ids, kept


def logprobs_of(logits: Float[Array, "b j v"], tokens: Int[Array, "b j"], count: int = MAX_LOGPROBS) -> Logprobs:
    """Log probabilities of the tokens under unchanged logits, and of the `count` likeliest ones, or of all if there are fewer."""
    count = min(count, logits.shape[-1])
    total = jax.nn.logsumexp(logits, -1)
    top, ids = jax.lax.top_k(logits, count)
    chosen = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
    return Logprobs(chosen - total, ids, top - total[..., None])


def logprobs_if(wanted: Bool[Array, " b"], compute: Callable[[], Logprobs]) -> Logprobs:
    """What `compute` gives if any sequence wants it; else zeros of the same shapes, for nothing."""

    def zeros() -> Logprobs:
        return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), jax.eval_shape(compute))

    return jax.lax.cond(jnp.any(wanted), compute, zeros)
