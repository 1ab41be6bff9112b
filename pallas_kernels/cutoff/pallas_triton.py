"""The cut-off as one launch: a program per row reads it some fifty times, from the second-level cache. See `api.cutoff`."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from pallas_kernels.cutoff.bisection import Before, Chosen, Row, ordered_bits, search

BLOCK = 4096
"""Tokens in registers at once: 16 a thread."""


@jax.named_scope("cutoff")
def pallas_triton_cutoff(
    logits: Float[Array, "*rows v"],
    most: Float[Array, "*rows"],
    total: Float[Array, "*rows"],
    inverse_temperature: Float[Array, "*rows"],
    top_k: Int[Array, "*rows"],
    top_p: Float[Array, "*rows"],
    min_p: Float[Array, "*rows"],
    *,
    rough: bool = False,
    interpret: bool = False,
) -> tuple[Int[Array, "*rows"], Int[Array, "*rows"]]:
    shape = most.shape
    out = jax.ShapeDtypeStruct((most.size,), jnp.int32)
    last, token = pl.pallas_call(
        partial(_search_row, rough=rough),
        grid=(most.size,),
        out_shape=(out, out),
        compiler_params=pltriton.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="cutoff",
    )(logits.reshape(-1, logits.shape[-1]), *(each.reshape(-1) for each in (most, total, inverse_temperature, top_k, top_p, min_p)))
    return last.reshape(shape), token.reshape(shape)


def _search_row(logits_ref, *refs, rough: bool):
    """`refs` are the numbers of Row, and the results."""
    *numbers, last_ref, token_ref = refs
    place, vocab_size = pl.program_id(0), logits_ref.shape[1]
    row = Row(*(number[place] for number in numbers))

    def before(chosen: Chosen) -> Before:
        def add_block(block, sums: Before) -> Before:
            ids = block * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
            logits = pltriton.load(logits_ref.at[place, ids], mask=ids < vocab_size, other=-jnp.inf)
            meant = chosen(ordered_bits(logits), ids) & (ids < vocab_size)
            share = jnp.sum(jnp.where(meant, row.shares(logits), 0), dtype=jnp.int32)
            return Before(sums.number + jnp.sum(meant.astype(jnp.int32), dtype=jnp.int32), sums.share + share)

        zero = jnp.zeros((), jnp.int32)
        return jax.lax.fori_loop(0, pl.cdiv(vocab_size, BLOCK), add_block, Before(zero, zero))

    last_ref[place], token_ref[place] = search(row, before, vocab_size, rough)
