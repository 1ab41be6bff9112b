"""The cut-off in plain XLA. See `api.cutoff`."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.cutoff.bisection import Before, Chosen, Row, ordered_bits, search


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
    if most is None:
        most = jnp.max(logits, -1)
    if total is None:
        total = jnp.sum(jnp.exp((logits - most[..., None]) * inverse_temperature[..., None]), -1)
    row = Row(*(each[..., None] for each in (most, total, inverse_temperature, top_k, top_p, min_p)))
    bits, shares, ids = ordered_bits(logits), row.shares(logits), jnp.arange(logits.shape[-1])

    def before(chosen: Chosen) -> Before:
        meant = chosen(bits, ids)
        count = jnp.sum(meant, -1, dtype=jnp.int32, keepdims=True)
        return Before(count, jnp.sum(jnp.where(meant, shares, 0), -1, dtype=jnp.int32, keepdims=True))

    last, token = search(row, before, logits.shape[-1], rough)
    return last[..., 0], token[..., 0]
