"""Sampling noise, keyed by (seed, position, token id), and drawing: which token has the largest score / temperature + noise.

The key does not depend on the tree or the batch, so one seed gives one text with any tree (docs/structure.md, idea 4).

Two logarithms turn random bits into noise, and cost more than the bits. But the bits alone bound it, and few tokens can win: a CPU
takes the logarithms of these only. The simple way, the noise of all tokens, is the reference. GPUs go this way, as they compute the
noise while they wait for the logits.
"""

import jax
import jax.numpy as jnp

from jaxspec.decoding.top import top_at_once
from jaxspec.typing import Array, Bool, Float, Int, UInt
from pallas_kernels.dispatch import by_platform

TWIST, ROTATIONS = 0x1BD11BDA, ((13, 15, 26, 6), (17, 29, 16, 24))
"""Constants of Threefry 2x32 (Salmon et al., 2011)."""
BLOCK, CANDIDATES = 16, 32
"""The candidates are all tokens of 32 blocks. On average the bounds of two blocks exceed the largest sum; those of 32 do
once in 400,000 draws."""
ROUNDING = 1e-5
"""If two sums differ by less than this share of 32 + their size (a hundred units in the last place), either may be the larger one
in a program that rounds in another way."""


def threefry(key: UInt[Array, " 2"], counter: UInt[Array, "*ids"]) -> tuple[UInt[Array, "*ids"], UInt[Array, "*ids"]]:
    """Two random words for each counter: Threefry 2x32 with 20 rounds, as in jax.random.

    jax.random's writes its words to memory in every fourth round on a CPU; this one compiles to a single loop.
    """
    words = key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(TWIST)
    left, right = jnp.broadcast_to(words[0], counter.shape), counter + words[1]
    for number in range(1, 6):
        for rotation in ROTATIONS[(number - 1) % 2]:
            left = left + right
            right = left ^ (right << rotation | right >> (32 - rotation))
        left, right = left + words[number % 3], right + words[(number + 1) % 3] + jnp.uint32(number)
    return left, right


def position_key(seed: UInt[Array, " 2"], position: Int[Array, ""]) -> UInt[Array, " 2"]:
    """The random key of one position of the request with this seed, two 32-bit words. As jax.random.fold_in."""
    return jnp.stack(threefry(seed, position.astype(jnp.uint32)))


def random_bits(key: UInt[Array, " 2"], ids: Int[Array, "*ids"]) -> UInt[Array, "*ids"]:
    """The numbers of jax.random.bits with these ids."""
    left, right = threefry(key, ids.astype(jnp.uint32))
    return left ^ right


def gumbel(bits: UInt[Array, "*ids"]) -> Float[Array, "*ids"]:
    """Standard Gumbel noise of random bits; the smallest number gives the largest noise.

    At its upper end, which decides, its resolution is 32 bits. That of `jax.random.gumbel` is 23: its noise ends at 15.9, so
    that tokens 16 nats below the best are drawn too rarely, and the two largest of 150,000 are equal once in a hundred times.
    """
    tail = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)  # the probability of larger noise
    return -jnp.log(-jnp.log1p(-tail))


def bound(bits: UInt[Array, "*ids"]) -> Float[Array, "*ids"]:
    """At least `gumbel(bits)`, without logarithms.

    -log(-log1p(-tail)) <= -log(tail), and tail > 2^-(z + 1) if the bits have z leading zeros. A little more than log(2) allows for
    rounding.

    In:  0, 1, 2^31
    Out: 22.87, 22.18, 0.69, where the noise is 22.87, 21.78, 0.37
    """
    return (jax.lax.clz(bits) + 1).astype(jnp.int32).astype(jnp.float32) * 0.69315


def noise_at(positions: Int[Array, "*b"], seeds: UInt[Array, "*#b 2"], ids: Int[Array, " v"]) -> Float[Array, "*b v"]:
    """The noise of the tokens with these ids, at a position of each request."""

    def noise(position: Int[Array, ""], seed: UInt[Array, " 2"]) -> Float[Array, " v"]:
        return gumbel(random_bits(position_key(seed, position), ids))

    return jnp.vectorize(noise, signature="(),(s)->(v)")(positions, seeds)


def greedy(logits: Float[Array, "b n v"]) -> Int[Array, "b n"]:
    """The most likely token; among equals the one with the lowest id."""
    return by_platform(argmax, argmax_in_two_passes, argmax)(logits)


def argmax(logits: Float[Array, "*rows v"]) -> Int[Array, "*rows"]:
    """`greedy`, the simple way."""
    return jnp.argmax(logits, -1).astype(jnp.int32)


def argmax_in_two_passes(logits: Float[Array, "*rows v"]) -> Int[Array, "*rows"]:
    """`argmax` as the largest number and then its lowest id: pairs of both are not vectorised by XLA on CPUs (two cores of an AMD
    EPYC, 29 November 2026, 4 rows of 49,152: 0.11 instead of 0.88 ms). In a row with NaN it is token 0."""
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    best = jax.lax.optimization_barrier(jnp.max(logits, -1, keepdims=True))
    return jnp.min(jnp.where(logits < best, logits.shape[-1], ids), -1)


def draw(
    scores: Float[Array, "b n v"], temperature: Float[Array, " b"], seeds: UInt[Array, "b 2"], positions: Int[Array, "b n"]
) -> Int[Array, "b n"]:
    """The token with the largest score / temperature + noise at each of the positions; at temperature 0, with the largest score.

    Among equals it is the one with the lowest id.
    """
    return by_platform(draw_from_all, draw_from_candidates, draw_from_all)(scores, temperature, seeds, positions)


def draw_from_all(
    scores: Float[Array, "b n v"], temperature: Float[Array, " b"], seeds: UInt[Array, "b 2"], positions: Int[Array, "b n"]
) -> Int[Array, "b n"]:
    """`draw`, the simple way."""
    temperature = temperature[:, None, None]
    noise = noise_at(positions, seeds[:, None], jnp.arange(scores.shape[-1]))
    sums = jnp.where(temperature > 0, scores / jnp.where(temperature > 0, temperature, 1) + noise, scores)
    return greedy(sums)


def draw_from_candidates(
    scores: Float[Array, "b n v"], temperature: Float[Array, " b"], seeds: UInt[Array, "b 2"], positions: Int[Array, "b n"]
) -> Int[Array, "b n"]:
    """`draw` with the logarithms of few tokens, and the simple way for the rows where these do not decide."""
    _, nodes, vocab_size = scores.shape
    if vocab_size <= BLOCK * CANDIDATES:
        return draw_from_all(scores, temperature, seeds, positions)
    rows = scores.reshape(-1, vocab_size), jnp.repeat(temperature, nodes), jnp.repeat(seeds, nodes, 0), positions.ravel()
    candidates, is_sure = jax.vmap(best_candidate)(*rows)

    def settle(row: Int[Array, ""]) -> Int[Array, ""]:
        def simply() -> Int[Array, ""]:
            scores, temperature, seed, position = (each[row] for each in rows)
            alone = scores[None, None], temperature[None], seed[None], position[None, None]
            return jax.lax.cond(temperature > 0, draw_from_all, lambda scores, *_: greedy(scores), *alone)[0, 0]

        return jax.lax.cond(is_sure[row], lambda: candidates[row], simply)

    return jax.lax.map(settle, jnp.arange(positions.size)).reshape(positions.shape)


def best_candidate(
    scores: Float[Array, " v"], temperature: Float[Array, ""], seed: UInt[Array, " 2"], position: Int[Array, ""]
) -> tuple[Int[Array, ""], Bool[Array, ""]]:
    """The candidate with the largest score / temperature + noise, and whether it is surely the one that `draw_from_all` finds.

    It is if it leads the other candidates, and the best bound of all other tokens, by more than rounding errors. So ties are not
    decided here. A block is every k-th token, and counts as much as the best of its bounds.
    """
    key = position_key(seed, position)
    blocks = -(-len(scores) // BLOCK)
    scores = jnp.pad(scores, (0, blocks * BLOCK - len(scores)), constant_values=-jnp.inf)
    bounds = scores / temperature + bound(random_bits(key, jnp.arange(blocks * BLOCK)))
    bounds = jax.lax.optimization_barrier(bounds)  # a loop over tokens has vector instructions, one over blocks has none
    best, chosen = top_at_once(jnp.max(bounds.reshape(BLOCK, blocks), 0), count=CANDIDATES + 1)
    tokens = (chosen[:CANDIDATES] + blocks * jnp.arange(BLOCK)[:, None]).ravel()
    sums, order = top_at_once(scores[tokens] / temperature + gumbel(random_bits(key, tokens)), count=2)
    lead = sums[0] - jnp.maximum(sums[1], best[CANDIDATES])
    return tokens[order[0]], (lead > ROUNDING * (32 + jnp.abs(sums[0]))) & (temperature > 0)
