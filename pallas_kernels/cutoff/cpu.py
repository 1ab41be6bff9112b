"""The cut-off on CPUs: searched for among candidates, and in a whole row only where these do not hold it. See `api.cutoff`.

A search is slow because it looks at every token 34 times or more. But nearly always the last kept token is among the few hundred
most likely. One pass finds these; they include all tokens before the last kept one, so the sums and the result are the reference's.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.cutoff.bisection import LOWEST, Limits, counting, ordered_bits, search
from pallas_kernels.cutoff.reference import reference_cutoff, whole_row

BLOCK, BLOCKS = 16, 64
"""The candidates are all tokens of the 64 best blocks. A block is every k-th token, and ranks as the best of these does."""


def cpu_cutoff(
    logits: Float[Array, "*rows v"], limits: Limits, *, rough: bool = False
) -> tuple[Int[Array, "*rows"], Int[Array, "*rows"]]:
    shape, vocab_size = logits.shape[:-1], logits.shape[-1]
    if vocab_size <= BLOCK * BLOCKS:
        return reference_cutoff(logits, limits, rough=rough)
    row = whole_row(logits, limits)
    count = -(-vocab_size // BLOCK)
    padded = jnp.pad(logits, [(0, 0)] * len(shape) + [(0, count * BLOCK - vocab_size)], constant_values=-jnp.inf)
    of_blocks = jnp.max(padded.reshape(*shape, BLOCK, count), -2)
    best, chosen = jax.lax.optimization_barrier(jax.lax.top_k(of_blocks, BLOCKS + 1))
    ids = (chosen[..., :BLOCKS, None] + count * jnp.arange(BLOCK)).reshape(*shape, -1)
    candidates, best_other = jnp.take_along_axis(padded, ids, -1), best[..., BLOCKS:]
    bits = jnp.where(candidates > best_other, ordered_bits(candidates), LOWEST)  # nothing else is above the best other
    before = counting(bits, ids, row.shares(candidates))
    last, token = search(row, before, vocab_size, rough)
    is_among_them = row.drops(best_other, before(lambda found, _: found > LOWEST))
    keeps_all = (row.top_k >= vocab_size) & (row.top_p >= 1) & (row.min_p <= 0)
    found = jnp.where(keeps_all, LOWEST + 1, last), jnp.where(keeps_all, vocab_size, token)
    return settled(logits, limits, found, is_among_them | keeps_all, rough)


def settled(
    logits: Float[Array, "*rows v"], limits: Limits, found: tuple[Array, Array], is_sure: Array, rough: bool
) -> tuple[Int[Array, "*rows"], Int[Array, "*rows"]]:
    """`found` [*rows, 1] where it is sure, and the reference's result elsewhere."""
    shape, flat = logits.shape[:-1], logits.reshape(-1, logits.shape[-1])
    numbers, found, is_sure = jax.tree.map(lambda each: each.reshape(-1), (limits, found, is_sure))

    def settle(place: Int[Array, ""]) -> tuple[Array, Array]:
        of_row = Limits(*(each[place] for each in numbers))
        surely, simply = (lambda: (found[0][place], found[1][place])), (lambda: reference_cutoff(flat[place], of_row, rough=rough))
        return jax.lax.cond(is_sure[place], surely, simply)

    last, token = jax.lax.map(settle, jnp.arange(len(flat)))
    return last.reshape(shape), token.reshape(shape)
