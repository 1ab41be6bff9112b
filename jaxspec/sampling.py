"""Choosing the target's own token: argmax, or argmax of logits / T + noise, with noise keyed by (seed, position, token id).

The key knows nothing of trees or batches, so one seed gives one text, whatever the tree (docs/structure.md, idea 4).
"""

from enum import Enum

import jax
import jax.numpy as jnp

from jaxspec.typing import Array, Float, Int, UInt


class SamplingKind(Enum):
    """What a compiled program can do with logits; each kind is a program of its own, so unused machinery costs nothing."""

    GREEDY = "greedy"
    TEMPERATURE = "temperature"


def gumbel_noise(seed: UInt[Array, " 2"], position: Int[Array, ""], vocab_size: int) -> Float[Array, " v"]:
    """Standard Gumbel noise for every token that could stand at `position` of the request with this seed (two 32-bit words)."""
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
    return jax.random.gumbel(key, (vocab_size,), jnp.float32)


@jax.named_scope("choose")
def choose(
    logits: Float[Array, "b n v"],
    positions: Int[Array, "b n"],
    temperature: Float[Array, " b"],
    seed: UInt[Array, "b 2"],
    kind: SamplingKind,
) -> Int[Array, "b n"]:
    """The token that the target puts at `positions`; rows with temperature 0 are greedy under every kind."""
    if kind is SamplingKind.GREEDY:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    noise_of_sequence = jax.vmap(gumbel_noise, in_axes=(None, 0, None))
    noise = jax.vmap(noise_of_sequence, in_axes=(0, 0, None))(seed, positions, logits.shape[-1])
    sampled = temperature[:, None, None] > 0
    scale = jnp.where(sampled, temperature[:, None, None], 1.0)
    return jnp.argmax(logits / scale + jnp.where(sampled, noise, 0.0), -1).astype(jnp.int32)
