"""The cut-off in three launches, of which only the last has one thread block per row. See `api.cutoff`.

The time depends on how often a row is read. So two launches, with many thread blocks per row, look for a narrow range of logits
that holds the cut-off. The first finds each piece's largest logit and the sum of its probabilities. The second counts and sums the
tokens above each of 16 logits: the smallest of those maxima, which a few dozen tokens exceed, and those of 15 tokens at equal
distances in the row. These 16 divide any row, flat or steep, into ranges of few tokens. The third launch copies the tokens of the
range that holds the cut-off, some thousands at most (a sixteenth of the row, on average), and `bisection.search` searches only
these. If too many tokens are in one range, because they are equal, the whole row is searched.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from pallas_kernels.cutoff.bisection import HIGHEST, LOWEST, Before, Chosen, Limits, Row, float_of, ordered_bits, search

PIECES = 16
"""A row is divided into at most so many pieces, each of which gives its largest logit."""
SAMPLES = 16
"""Logits that divide a row."""
COUNTED, TILE = 4096, 256
"""Tokens that a thread block of the second launch counts, and those that it compares at once with all samples."""
BLOCK, FEW = 4096, 2048
"""Tokens in registers at once in the third launch, of the row and of those copied: 16 and 8 a thread."""
WARPS, COUNTING_WARPS = 8, 4


class Pieces(NamedTuple):
    """The result of the first launch: for each piece of a row its largest logit, and the sum of probabilities relative to it."""

    most: Any
    total: Any


@jax.named_scope("cutoff")
def pallas_triton_cutoff(
    logits: Float[Array, "*rows v"], limits: Limits, *, rough: bool = False, interpret: bool = False
) -> tuple[Int[Array, "*rows"], Int[Array, "*rows"]]:
    shape, vocab_size = logits.shape[:-1], logits.shape[-1]
    logits = logits.reshape(-1, vocab_size)
    rows, size = len(logits), pl.next_power_of_2(pl.cdiv(vocab_size, PIECES))
    pieces, counts = pl.cdiv(vocab_size, size), pl.cdiv(vocab_size, COUNTED)

    def launch(name: str, kernel, per_row: int | None, shapes: list[tuple[int, ...]], dtype, warps: int, *arguments):
        """`per_row`: thread blocks; None: one."""
        return pl.pallas_call(
            kernel,
            grid=(rows,) if per_row is None else (rows, per_row),
            out_shape=[jax.ShapeDtypeStruct((rows, *each), dtype) for each in shapes],
            compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=1),
            interpret=interpret,
            name=name,
        )(logits, *arguments)

    limits = Limits(*(each.reshape(-1) for each in limits))
    inverse = limits.inverse_temperature
    parts = Pieces(*launch("cutoff_pieces", partial(_sum_piece, size), pieces, [(pieces,)] * 2, jnp.float32, WARPS, inverse))
    counted = launch("cutoff_count", _count, counts, [(counts, SAMPLES)] * 2, jnp.int32, COUNTING_WARPS, parts, limits)
    copies = pl.cdiv(vocab_size, 3 * FEW) * FEW  # as much memory as the logits
    last, token, _ = launch(
        "cutoff_search",
        partial(_search_row, rough, interpret),
        None,
        [(), (), (3, copies)],
        jnp.int32,
        WARPS,
        parts,
        limits,
        counted,
    )
    return last.reshape(shape), token.reshape(shape)


def _sum_piece(size: int, logits_ref, inverse_ref, most_ref, total_ref):
    """The first launch: a thread block per piece of a row."""
    place, piece = pl.program_id(0), pl.program_id(1)
    ids = piece * size + jnp.arange(size, dtype=jnp.int32)
    logits = pltriton.load(logits_ref.at[place, ids], mask=ids < logits_ref.shape[1], other=-jnp.inf)
    most = jnp.max(logits)
    most_ref[place, piece] = most
    lowered = jnp.where(logits == -jnp.inf, -jnp.inf, logits - most)  # a piece may have no other
    total_ref[place, piece] = jnp.sum(jnp.exp(lowered * inverse_ref[place]))


def _row(place, pieces: Pieces, limits: Limits) -> Row:
    """The numbers of one row; its largest logit and its total come from its pieces."""
    ids = jnp.arange(pl.next_power_of_2(pieces.most.shape[1]), dtype=jnp.int32)
    mask = ids < pieces.most.shape[1]
    peaks = pltriton.load(pieces.most.at[place, ids], mask=mask, other=-jnp.inf)
    most = jnp.max(peaks)
    row = Row(most, most, *(each[place] for each in limits))
    sums = pltriton.load(pieces.total.at[place, ids], mask=mask, other=0.0)
    return row._replace(total=jnp.sum(jnp.where(peaks == -jnp.inf, 0.0, sums * row.weights(peaks))))


def _samples(place, logits_ref, pieces: Pieces) -> Int[Array, " samples"]:
    """Bits of the logits that divide the row: the smallest of the pieces' largest, and tokens at equal distances."""
    ids, vocab_size, known = jnp.arange(SAMPLES, dtype=jnp.int32), logits_ref.shape[1], pieces.most.shape[1]
    peaks = pltriton.load(pieces.most.at[place, jnp.minimum(ids, known - 1)])
    return ordered_bits(jnp.where(ids == 0, jnp.min(peaks), pltriton.load(logits_ref.at[place, ids * (vocab_size // SAMPLES)])))


def _count(logits_ref, pieces: Pieces, limits: Limits, number_ref, share_ref):
    """The second launch: the number and the shares of some tokens of a row that are above each of the samples."""
    place, part, vocab_size = pl.program_id(0), pl.program_id(1), logits_ref.shape[1]
    row, samples = _row(place, pieces, limits), _samples(place, logits_ref, pieces)

    def add_tile(tile, sums: Before) -> Before:
        ids = part * COUNTED + tile * TILE + jnp.arange(TILE, dtype=jnp.int32)
        logits, bits = _read(logits_ref, place, ids, ids < vocab_size)
        above = bits[None] > samples[:, None]
        return Before(sums.number + above.astype(jnp.int32), sums.share + jnp.where(above, row.shares(logits)[None], 0))

    zero = jnp.zeros((len(samples), TILE), jnp.int32)
    sums = jax.lax.fori_loop(0, COUNTED // TILE, add_tile, Before(zero, zero))
    number_ref[place, part] = jnp.sum(sums.number, 1, dtype=jnp.int32)
    share_ref[place, part] = jnp.sum(sums.share, 1, dtype=jnp.int32)


def _search_row(rough: bool, interpret: bool, logits_ref, pieces: Pieces, limits: Limits, counted, last_ref, token_ref, copies_ref):
    """The third launch, a thread block per row: copies the tokens of the range that holds the cut-off, and searches these."""
    place, vocab_size, room = pl.program_id(0), logits_ref.shape[1], copies_ref.shape[2] - 1  # the last is spare
    row, samples = _row(place, pieces, limits), _samples(place, logits_ref, pieces)
    sums = Before(*(_sum_parts(each_ref, place) for each_ref in counted))
    dropped = row.drops(float_of(samples), sums)
    lowest, highest = jnp.max(jnp.where(dropped, samples, LOWEST)), jnp.min(jnp.where(dropped, HIGHEST, samples))
    above = Before(*(jnp.max(jnp.where(dropped, 0, each)) for each in sums))  # the lowest that is kept has the most above it

    # At least 16 rounds: with 8, registers were spilled (32,000 tokens, H100, November 2026). At least one token per thread: with
    # fewer, they were spilled too (1,024 tokens).
    length = min(BLOCK, max(32 * WARPS, pl.next_power_of_2(pl.cdiv(vocab_size, 31))))

    def read(block: Array) -> tuple[Array, Array, Array]:
        ids = block * length + jnp.arange(length, dtype=jnp.int32)
        logits, bits = _read(logits_ref, place, ids, ids < vocab_size)
        return bits, ids, row.shares(logits)

    def copy_ids(block: Array, count: Array) -> Array:
        bits, ids, _ = read(block)
        chosen = (bits > lowest) & (bits <= highest)
        places = count + jnp.cumsum(chosen.astype(jnp.int32)) - 1
        fits = chosen & (places < room)
        places = jnp.where(fits, places, room)  # interpreters write all values, those that the mask excludes too
        pltriton.store(copies_ref.at[place, 1, places], ids, mask=fits)
        return count + jnp.sum(chosen.astype(jnp.int32), dtype=jnp.int32)

    def copy_rest(block: Array, same: Array) -> Array:
        places = block * FEW + jnp.arange(FEW, dtype=jnp.int32)
        known = places < copied
        ids = pltriton.load(copies_ref.at[place, 1, places], mask=known, other=0)
        logits, bits = _read(logits_ref, place, ids, known)
        pltriton.store(copies_ref.at[place, 0, places], bits)
        pltriton.store(copies_ref.at[place, 2, places], row.shares(logits))
        return same

    def read_copies(block: Array) -> list[Array]:
        places = block * FEW + jnp.arange(FEW, dtype=jnp.int32)
        return [pltriton.load(copies_ref.at[place, field, places]) for field in range(3)]

    def synchronize() -> None:
        if not interpret:
            pltriton.debug_barrier()  # other threads read what was written

    blocks, nothing = pl.cdiv(vocab_size, length), jnp.zeros((), jnp.int32)
    count = jax.lax.fori_loop(0, blocks, copy_ids, nothing)
    copied = jnp.minimum(count, room)
    synchronize()
    jax.lax.fori_loop(0, pl.cdiv(copied, FEW), copy_rest, nothing)
    synchronize()

    def search_in(read, length: int, blocks: Array | int, above: Before) -> tuple[Array, Array]:
        def before(chosen: Chosen) -> Before:
            def add_block(block: Array, sums: Before) -> Before:
                bits, ids, shares = read(block)
                meant = chosen(bits, ids)
                return Before(sums.number + meant.astype(jnp.int32), sums.share + jnp.where(meant, shares, 0))

            zero = jnp.zeros(length, jnp.int32)
            sums = jax.lax.fori_loop(0, blocks, add_block, Before(zero, zero))
            return Before(*(more + jnp.sum(each, dtype=jnp.int32) for more, each in zip(above, sums, strict=True)))

        return search(row, before, vocab_size, rough)

    last_ref[place], token_ref[place] = jax.lax.cond(
        count <= room,
        lambda: search_in(read_copies, FEW, pl.cdiv(copied, FEW), above),
        lambda: search_in(read, length, blocks, Before(nothing, nothing)),
    )


def _read(logits_ref, place: Array, ids: Array, known: Array) -> tuple[Array, Array]:
    """Logits and their bits. Tokens that aren't `known` get ones that no search selects and that have no share."""
    logits = pltriton.load(logits_ref.at[place, ids], mask=known, other=-jnp.inf)
    return logits, jnp.where(known, ordered_bits(logits), LOWEST)


def _sum_parts(part_ref, place: Array) -> Int[Array, " samples"]:
    """The sum of what the thread blocks of the second launch found."""
    _, parts, samples = part_ref.shape
    ids = jnp.arange(pl.next_power_of_2(parts), dtype=jnp.int32)[:, None]
    found = pltriton.load(part_ref.at[place, ids, jnp.arange(samples, dtype=jnp.int32)[None]], mask=ids < parts, other=0)
    return jnp.sum(found, 0, dtype=jnp.int32)
