"""The cut-off in plain XLA. See `api.cutoff`."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.cutoff.bisection import Limits, Row, counting, ordered_bits, search

PARTS_PER_STEP = 16
"""Parts of a row that `sum_in_order` adds in one step."""


def reference_cutoff(
    logits: Float[Array, "*rows v"], limits: Limits, *, rough: bool = False
) -> tuple[Int[Array, "*rows"], Int[Array, "*rows"]]:
    row = whole_row(logits, limits)
    bits, ids = ordered_bits(logits), jnp.arange(logits.shape[-1])
    last, token = search(row, counting(bits, ids, row.shares(logits)), logits.shape[-1], rough)
    return last[..., 0], token[..., 0]


def whole_row(logits: Array, limits: Limits) -> Row:
    """The numbers of each row [*rows, 1]."""
    most = jnp.max(logits, -1, keepdims=True)
    row = Row(most, most, *(each[..., None] for each in limits))
    return row._replace(total=sum_in_order(row.weights(logits))[..., None])


def sum_in_order(values: Float[Array, "*rows v"]) -> Float[Array, "*rows"]:
    """The sum of each row, with the same bits however many rows there are: XLA's own order depends on that."""
    while (size := values.shape[-1]) > 1:
        values = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -size % PARTS_PER_STEP)])
        values = sum(jnp.split(values, PARTS_PER_STEP, -1), jnp.zeros((), values.dtype))
    return values[..., 0]
