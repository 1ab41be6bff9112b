"""The search that all implementations share: bisection on the bits of the logits, then on the ids of equal ones.

It works on arrays of rows and, inside a kernel, on the scalars of one row. Numbers are signed, which every backend can compare.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

WHOLE = 2.0**30
"""The unit of probability: sums of whole numbers are exact."""
ROUGH_BITS, STEPS_PER_NAT = 8, 8
"""A rough search goes this many bits deep, in steps below the most likely token."""
LOWEST, HIGHEST = -(2**31), 2**31 - 1


class Limits(NamedTuple):
    """What a caller says of each row, see `api.cutoff`."""

    inverse_temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array


class Row(NamedTuple):
    """The numbers that belong to each row."""

    most: Array
    """Its largest logit."""
    total: Array
    """The sum of its weights."""
    inverse_temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array

    def shares(self, logits: Array) -> Int[Array, "..."]:
        """Probabilities in units of 1 / WHOLE, rounded."""
        return (self.probabilities(logits) * WHOLE + 0.5).astype(jnp.int32)

    def probabilities(self, logits: Array) -> Float[Array, "..."]:
        return self.weights(logits) / self.total

    def weights(self, logits: Array) -> Float[Array, "..."]:
        """Probabilities times the total."""
        return jnp.exp((logits - self.most) * self.inverse_temperature)

    def drops(self, logit: Array, before: "Before") -> Bool[Array, "..."]:
        """Whether a token with this logit, after these tokens, is dropped. (No comparison holds for NaN.)"""
        in_top_p = (before.share.astype(jnp.float32) < self.top_p * WHOLE) | (self.top_p >= 1)
        unlikely = self.probabilities(logit) < self.min_p * (1 / self.total)
        return (before.number > 0) & (unlikely | (before.number >= self.top_k) | ~in_top_p)


class Before(NamedTuple):
    """The tokens before a possible cut-off: how many, and the sum of their shares."""

    number: Array
    share: Array


type Chosen = Callable[[Array, Array], Array]
"""Which tokens are meant, given their bits and their ids."""


def counting(bits: Int[Array, "*rows v"], ids: Int[Array, "*#rows v"], shares: Int[Array, "*rows v"]) -> Callable[[Chosen], Before]:
    """The `before` of `search` for arrays of rows."""

    def before(chosen: Chosen) -> Before:
        meant = chosen(bits, ids)
        count = jnp.sum(meant, -1, dtype=jnp.int32, keepdims=True)
        return Before(count, jnp.sum(jnp.where(meant, shares, 0), -1, dtype=jnp.int32, keepdims=True))

    return before


def ordered_bits(values: Float[Array, "..."]) -> Int[Array, "..."]:
    """Whole numbers in the order of the floats.

    In:  [-inf, -1.0, -0.0, 0.0, 1.0]
    Out: [-2139095041, -1065353217, 0, 0, 1065353216]
    """
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def float_of(bits: Int[Array, "..."]) -> Float[Array, "..."]:
    """The inverse of `ordered_bits`."""
    return jax.lax.bitcast_convert_type(jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits), jnp.float32)


def search(row: Row, before: Callable[[Chosen], Before], vocab_size: int, rough: bool) -> tuple[Array, Array]:
    """The bits and the id of the last token to keep. `before` counts and sums the tokens that its argument selects.

    First the largest bits at which a token would be dropped are found, bit by bit. All tokens above are kept, so the last kept
    tokens have the next larger number as their bits. How many of these are kept follows from their number, because their shares
    are equal. Only if some of them are dropped, the id of the last kept one is searched for.
    """

    def drops(bits: Array) -> Array:
        return row.drops(float_of(bits), before(lambda found, _: found > bits))

    if rough:

        def lower(steps: Array) -> Array:
            return ordered_bits(row.most - steps.astype(jnp.float32) / (STEPS_PER_NAT * row.inverse_temperature))

        kept_steps = largest(lambda steps: ~drops(lower(steps)), row.most, ROUGH_BITS)
        return lower(kept_steps + 1), jnp.maximum(kept_steps, vocab_size)  # Triton takes no constant here
    last = largest(lambda number: drops(number ^ LOWEST), row.most, 32) ^ LOWEST
    last = last + 1
    above, reached = before(lambda bits, _: bits > last), before(lambda bits, _: bits >= last)
    ties = reached.number - above.number
    of_each = (reached.share - above.share) // jnp.maximum(ties, 1)

    def keeps_ties(number: Array) -> Array:
        others = number - 1
        dropped = row.drops(float_of(last), Before(above.number + others, above.share + others * of_each))
        return (number <= ties) & ~dropped

    kept = largest(keeps_ties, row.most, vocab_size.bit_length())

    def last_tie() -> Array:
        def is_kept(token: Array) -> Array:
            return before(lambda bits, ids: (bits > last) | ((bits == last) & (ids < token))).number < above.number + kept

        return largest(is_kept, row.most, (vocab_size - 1).bit_length())

    is_cut = jnp.any(kept < ties) if ties.ndim else kept < ties  # inside a kernel they are scalars
    return last, jax.lax.cond(is_cut, last_tie, lambda: jnp.maximum(kept, vocab_size))  # nor here


def largest(holds: Callable[[Array], Array], like: Array, bits: int) -> Int[Array, "..."]:
    """The largest number of so many bits for which the condition holds, for each entry of `like`; 0 if it holds for none.

    If it holds for a number, it must hold for all below (32 bits: in the order without sign).
    """

    def add_bit(index: Int[Array, ""], found: Array) -> Array:
        larger = found | jnp.left_shift(jnp.int32(1), bits - 1 - index)
        return jnp.where(holds(larger), larger, found)

    return jax.lax.fori_loop(0, bits, add_bit, jnp.zeros(like.shape, jnp.int32))
