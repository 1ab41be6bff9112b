"""top_k, top_p and min_p: which tokens are kept. Nothing is sorted (pallas_kernels/cutoff)."""

import jax.numpy as jnp

from jaxspec.spec.settings import Settings, temperature
from jaxspec.typing import Array, Float
from pallas_kernels.cutoff import cutoff


def apply_filters(logits: Float[Array, "b n v"], settings: Settings, *, rough: bool = False) -> Float[Array, "b n v"]:
    """The logits divided by the temperature, with -inf in place of the tokens that top_k, top_p and min_p drop.

    All three use the same probabilities, so their order does not matter. A token is kept if it is among the top_k, if the
    tokens before it have less than top_p together, and if its probability is at least min_p times the largest one. The
    likeliest token is always kept; equally likely ones come in order of their ids. `rough`: good enough for drafts.

    In:  logarithms of 0.5, 0.3, 0.15, 0.05; temperature 1, top_k 3, top_p 0.9, min_p 0.4
    Out: the first two are kept (top_k keeps three, top_p three, min_p two)
    """
    sharpness, most = 1 / temperature(settings), jnp.max(logits, -1, keepdims=True)
    total = jnp.sum(jnp.exp((logits - most) * sharpness), -1, keepdims=True)
    limits = (each[:, None, None] for each in (settings.top_k, settings.top_p, settings.min_p))
    of_rows = (jnp.broadcast_to(each, total.shape)[..., 0] for each in (most, total, sharpness, *limits))
    kept = cutoff(logits, *of_rows, rough=rough).keeps(logits)
    return jnp.where(kept, logits / temperature(settings), -jnp.inf)
