"""The cut-off in plain XLA. See `api.cutoff`."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.cutoff.bisection import Row, counting, ordered_bits, search


def reference_cutoff(
    logits: Float[Array, "*rows v"],
    most: Float[Array, "*rows"] | None,
    total: Float[Array, "*rows"] | None,
    inverse_temperature: Float[Array, "*rows"],
    top_k: Int[Array, "*rows"],
    top_p: Float[Array, "*rows"],
    min_p: Float[Array, "*rows"],
    *,
    rough: bool = False,
) -> tuple[Int[Array, "*rows"], Int[Array, "*rows"]]:
    row = whole_row(logits, most, total, inverse_temperature, top_k, top_p, min_p)
    bits, ids = ordered_bits(logits), jnp.arange(logits.shape[-1])
    last, token = search(row, counting(bits, ids, row.shares(logits)), logits.shape[-1], rough)
    return last[..., 0], token[..., 0]


def whole_row(logits: Array, most: Array | None, total: Array | None, inverse_temperature: Array, *limits: Array) -> Row:
    """The numbers of each row [*rows, 1]; its largest logit and its total are computed if they are not given."""
    if most is None:
        most = jnp.max(logits, -1)
    if total is None:
        total = jnp.sum(jnp.exp((logits - most[..., None]) * inverse_temperature[..., None]), -1)
    return Row(*(each[..., None] for each in (most, total, inverse_temperature, *limits)))
