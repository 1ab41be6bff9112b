"""The cut-off in plain XLA. See `api.cutoff`."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.cutoff.bisection import Row, counting, ordered_bits, search

AT_ONCE = 16
"""Parts of a row that `sum_in_order` adds in one step."""


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
        total = sum_in_order(jnp.exp((logits - most[..., None]) * inverse_temperature[..., None]))
    return Row(*(each[..., None] for each in (most, total, inverse_temperature, *limits)))


def sum_in_order(values: Float[Array, "*rows v"]) -> Float[Array, "*rows"]:
    """The sum of each row, with the same bits however many rows there are: XLA's own order depends on that."""
    while (size := values.shape[-1]) > 1:
        values = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -size % AT_ONCE)])
        values = sum(jnp.split(values, AT_ONCE, -1), jnp.zeros((), values.dtype))
    return values[..., 0]
