"""The largest values of each row, and where they are. Among equals the earlier ones come first, as in lax.top_k.

On a GPU each size has its own fastest way. The simple way, lax.top_k and a sort, is the reference, and is what CPUs run.
"""

import jax
import jax.numpy as jnp

from jaxspec.typing import Array, Float, Int
from pallas_kernels.dispatch import by_platform

TOP_AT_ONCE = 16
"""The most that XLA's kernel for GPUs finds at once; for more XLA sorts the whole row, in some twenty launches."""
FEW = 512
"""Up to this many values are compared pairwise on a GPU, where sorting even 16 takes a launch and copies."""
UNROLLED = 16
"""Up to this many values, ranks are sums with a term per value, which XLA fuses with what reads them into one launch."""

type Best = tuple[Float[Array, "*rows k"], Int[Array, "*rows k"]]
"""Values and places."""


def top(values: Float[Array, "*rows v"], count: int) -> Best:
    """The `count` largest of a vocabulary."""
    return by_platform(top_in_rounds, top_at_once, top_at_once, (("count", count),))(values)


def top_at_once(values: Float[Array, "*rows v"], *, count: int) -> Best:
    """`top`, the simple way. XLA sorts all values if it sees that only a part of the result is read."""
    best, places = jax.lax.optimization_barrier(jax.lax.top_k(values, count))
    return best, places


def top_in_rounds(values: Float[Array, "*rows v"], *, count: int) -> Best:
    """`top`, TOP_AT_ONCE in each round. At least `count` values of a row must be above -inf."""
    best, places = top_at_once(values, count=min(count, TOP_AT_ONCE))
    if count <= TOP_AT_ONCE:
        return best, places
    everywhere = jnp.arange(values.shape[-1])
    found = sum((everywhere == places[..., j, None] for j in range(TOP_AT_ONCE)), jnp.zeros((), bool))
    rest = top_in_rounds(jnp.where(found, -jnp.inf, values), count=count - TOP_AT_ONCE)
    return jnp.concatenate([best, rest[0]], -1), jnp.concatenate([places, rest[1]], -1)


def top_of_few(values: Float[Array, "*rows c"], count: int) -> Best:
    """The `count` largest of some candidates."""
    counted = ranked_by_counting if values.shape[-1] <= FEW else top_k
    return by_platform(counted, top_k, top_k, (("count", count),))(values)


def top_k(values: Float[Array, "*rows c"], *, count: int) -> Best:
    """`top_of_few`, the simple way."""
    best, places = jax.lax.top_k(values, count)
    return best, places


def ranked_by_counting(values: Float[Array, "*rows c"], *, count: int) -> Best:
    """`top_of_few` without a sort: a value's rank is the number of those before it."""
    has_rank = ranks(values)[..., None, :] == jnp.arange(count)[:, None]
    best = jnp.max(jnp.where(has_rank, values[..., None, :], -jnp.inf), -1)
    return best, jnp.max(jnp.where(has_rank, jnp.arange(values.shape[-1], dtype=jnp.int32), 0), -1)


def places_of_best(values: Float[Array, "*rows c"], count: int) -> Int[Array, "*rows k"]:
    """Where the `count` largest of some candidates are, in the order of their places.

    In:  [5, 9, 7], 2
    Out: [1, 2]
    """
    counted = numbered_by_counting if values.shape[-1] <= FEW else sorted_places
    return by_platform(counted, sorted_places, sorted_places, (("count", count),))(values)


def sorted_places(values: Float[Array, "*rows c"], *, count: int) -> Int[Array, "*rows k"]:
    """`places_of_best`, the simple way."""
    return jnp.sort(jax.lax.top_k(values, count)[1], -1)


def numbered_by_counting(values: Float[Array, "*rows c"], *, count: int) -> Int[Array, "*rows k"]:
    """`places_of_best` without sorts: each of the best is numbered by how many of the best there are up to it."""
    is_best, places = ranks(values) < count, jnp.arange(values.shape[-1], dtype=jnp.int32)
    numbers = jnp.sum(is_best[..., None, :] & (places <= places[:, None]), -1)
    is_next = is_best[..., None, :] & (numbers[..., None, :] == jnp.arange(1, count + 1)[:, None])
    return jnp.max(jnp.where(is_next, places, 0), -1)


def ranks(values: Float[Array, "*rows c"]) -> Int[Array, "*rows c"]:
    """How many values rank before each.

    In:  [5, 9, 5]
    Out: [1, 0, 2]
    """
    places, keys = jnp.arange(values.shape[-1]), total_order(values)

    def is_before(other: Array, place: Array | int, own: Array, of_own: Array) -> Array:
        return (other > own) | ((other == own) & (place < of_own))

    if len(places) <= UNROLLED:
        first = jnp.zeros(keys.shape, jnp.int32)
        return sum((is_before(keys[..., j, None], j, keys, places).astype(jnp.int32) for j in range(len(places))), first)
    return jnp.sum(is_before(keys[..., None, :], places, keys[..., :, None], places[:, None]), -1)


def total_order(values: Float[Array, "*rows c"]) -> Int[Array, "*rows c"]:
    """Whole numbers in the order of lax.top_k: -0 is before 0, and NaN after infinity."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
