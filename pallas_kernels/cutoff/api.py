"""The last token that top_k, top_p and min_p keep, without sorting the vocabulary.

A sort of 128,256 tokens per node needs copies of all logits and, on a GPU, a library that can't be part of a CUDA graph.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.cutoff.bisection import Limits, ordered_bits
from pallas_kernels.cutoff.cpu import cpu_cutoff
from pallas_kernels.cutoff.pallas_triton import pallas_triton_cutoff
from pallas_kernels.cutoff.reference import reference_cutoff
from pallas_kernels.dispatch import call

IMPLEMENTATIONS = {"reference": reference_cutoff, "cpu": cpu_cutoff, "pallas_triton": pallas_triton_cutoff}


class Cutoff(NamedTuple):
    """Where each row is cut, with its tokens from the most to the least likely, equal ones by id."""

    bits: Int[Array, "*rows"]
    """Tokens whose `ordered_bits` are larger than this are kept."""
    token: Int[Array, "*rows"]
    """Of the tokens whose bits equal `bits`, those with ids up to this one are kept."""

    def keeps(self, logits: Float[Array, "*rows v"]) -> Bool[Array, "*rows v"]:
        """Whether each token is kept."""
        bits, last = ordered_bits(logits), self.bits[..., None]
        return (bits > last) | ((bits == last) & (jnp.arange(logits.shape[-1]) <= self.token[..., None]))


def cutoff(
    logits: Float[Array, "*rows v"],
    inverse_temperature: Float[Array, "*rows"],
    top_k: Int[Array, "*rows"],
    top_p: Float[Array, "*rows"],
    min_p: Float[Array, "*rows"],
    *,
    rough: bool = False,
    implementation: str | None = None,
) -> Cutoff:
    """Keeps the tokens of each row that are among the top_k, have less than top_p before them, and at least min_p times the
    probability of the most likely token, which is always kept.

    A token's probability is exp((logit - most) * inverse_temperature) / total, rounded to a multiple of 2^-30: sums are exact and
    do not depend on the order. `most` is the row's largest logit, and `total` makes the sum 1: its last bits differ between
    implementations, but not with the number of rows. `rough`: searches with 8 passes instead of 34 or more, but also keeps tokens
    up to an eighth of a nat below the cut-off.
    `implementation`: a name from IMPLEMENTATIONS; None picks what suits the platform.

    In:  logits: logarithms of 0.5, 0.3, 0.15, 0.05; inverse_temperature 1, top_k 4, top_p 0.9, min_p 0
    Out: three are kept: 0.8 are before the third, and 0.95 before the fourth

    Raises:
        ValueError: the name of the implementation is unknown.
    """
    limits = Limits(inverse_temperature, top_k, top_p, min_p)
    return Cutoff(*call("cutoff", IMPLEMENTATIONS, implementation, (logits, limits), rough=rough))
