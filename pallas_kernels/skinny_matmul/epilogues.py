"""What a block of columns does with its sums before it writes them."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class AddResidual(NamedTuple):
    """Adds the residual stream. A norm that follows needs the sum of the squares: each block returns its columns' part."""

    residual: Float[Array, "rows n"]


class SwiGlu(NamedTuple):
    """silu(gate) * up. The weight holds the gate's columns, then the up projection's; a block reads the same of both."""


class Best(NamedTuple):
    """Finds each row's greatest number in each block of columns, and the column where it is: the lowest of equal ones."""


Epilogue = AddResidual | SwiGlu | Best | None


def best_of_blocks(
    greatest: Float[Array, "rows blocks"], columns: Int[Array, "rows blocks"]
) -> tuple[Float[Array, " rows"], Int[Array, " rows"]]:
    """Each row's greatest number and its column, from those of the blocks; the lowest column of equal ones."""
    block = jnp.argmax(greatest, 1)[:, None]
    return jnp.take_along_axis(greatest, block, 1)[:, 0], jnp.take_along_axis(columns, block, 1)[:, 0]
