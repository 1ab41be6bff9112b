"""Tree attention for Hopper GPUs: Pallas' Mosaic GPU backend (TMA copies, wgmma products). See `api.tree_attention`.

One kernel over a grid of (sequence, KV head, split, row tile). The query rows of a KV head, those of all its query heads, fill
tiles of 64 rows: the tensor cores' smallest height. The keys of a tile are a list of blocks of 64: first the window's blocks up
to the last one that the tile sees, then those of the committed pages from `start` to `length`. The list is cut into `splits`
runs of equal length, one per thread block (Flash-Decoding, Dao et al. 2023). Each keeps a running softmax (Milakov and
Gimelshein 2018); a second small kernel merges them.

A block's keys and values are copied into a ring of buffers in shared memory, as many blocks ahead as the ring holds. Window
rows and keys need no padding past the last one: the copies read zeros there, and drop what is written there.

Letters in shapes: b sequences, w window rows, s window keys, p pages per sequence.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int, Real

from pallas_kernels.tree_attention.packed_mask import BITS, pack_mask

ROWS = 64  # rows of a tile: wgmma's M
KEYS = 64  # keys of a block
PROCESSORS = 132  # streaming multiprocessors of an H100 or H200: splits are chosen to give each one thread block
MOST_SPLITS = 64  # the merge keeps a weight of each in registers
PAGE_SIZES = (16, 32, 64, 128)
HEAD_DIMS = (64, 128)
MERGE_SHARES = 4  # thread blocks that merge one tile, each a share of the columns
LOWEST = -1e30  # stands for -infinity where a difference of two of them must be 0
LOG2_E = math.log2(math.e)


def unsupported(q, k_pages, v_pages, k_window, v_window) -> str | None:
    """The reason why `mosaic_attention` can't take arrays of these shapes and dtypes; None if it can."""
    heads, head_dim = q.shape[2:]
    pages, page, kv_heads = k_pages.shape[:3]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"q has dtype {q.dtype}, expected bfloat16 or float16"
    for name, array in {"k_pages": k_pages, "v_pages": v_pages, "k_window": k_window, "v_window": v_window}.items():
        if array.dtype != q.dtype:
            return f"{name} has dtype {array.dtype}, expected q's, {q.dtype}"
    if head_dim not in HEAD_DIMS:
        return f"head_dim is {head_dim}, expected one of {HEAD_DIMS}"
    if page not in PAGE_SIZES:
        return f"the page size is {page}, expected one of {PAGE_SIZES}"
    if heads % kv_heads:
        return f"q has {heads} heads, expected a multiple of the {kv_heads} KV heads"
    if not pages:
        return "k_pages has no pages, expected at least one"
    if not k_window.shape[1]:
        return "k_window has no keys, expected at least one"
    return None


@jax.named_scope("tree_attention_mosaic")
def mosaic_attention(
    q: Float[Array, "b w heads head_dim"],
    k_pages: Real[Array, "pages page kv_heads head_dim"],
    v_pages: Real[Array, "pages page kv_heads head_dim"],
    page_table: Int[Array, "b p"],
    start: Int[Array, " b"],
    length: Int[Array, " b"],
    k_window: Real[Array, "b s kv_heads head_dim"],
    v_window: Real[Array, "b s kv_heads head_dim"],
    mask: Bool[Array, "b w s"],
    *,
    splits: int | None = None,
    interpret: bool = False,
) -> Float[Array, "b w heads head_dim"]:
    """`api.tree_attention` on a Hopper GPU in one or two launches, and two or more for the mask, which all layers share.

    If the number of window rows or keys is above 8 and not a multiple of 8, q, the window and the result are copied.
    A row that sees no key gets zeros.

    Args:
        splits: thread blocks per sequence, KV head and row tile; None chooses as many as fill the GPU.
        interpret: run in Pallas' GPU interpreter, on any device, and raise on a data race; for tests.

    Raises:
        ValueError: `unsupported` returns a reason.
    """
    if reason := unsupported(q, k_pages, v_pages, k_window, v_window):
        raise ValueError(f"mosaic_attention: {reason}")
    b, w, heads, _ = q.shape
    kv_heads = k_pages.shape[2]
    page_table, start, length = (array.astype(jnp.int32) for array in (page_table, start, length))
    if not page_table.shape[1]:  # an empty array can't be a kernel's argument
        page_table, start, length = jnp.zeros((b, 1), jnp.int32), jnp.zeros_like(start), jnp.zeros_like(length)
    tiling = _Tiling.of(w, heads // kv_heads)
    blocks = pl.cdiv(page_table.shape[1] * k_pages.shape[1], KEYS) + pl.cdiv(k_window.shape[1], KEYS)
    splits = splits or max(1, min(PROCESSORS // (b * kv_heads * tiling.tiles), blocks, MOST_SPLITS))
    how = _Settings(tiling, splits, plgpu.InterpretGPUParams(detect_races=True) if interpret else None)

    q, k_window, v_window = map(_whole_eights, (q, k_window, v_window))
    masks = _bits_by_tile(mask, tiling)
    out = _attend(_Inputs(q, k_pages, v_pages, page_table, start, length, k_window, v_window, *masks), how)
    return (out[0] if splits == 1 else _merge(out[0], out[1], jax.ShapeDtypeStruct(q.shape, q.dtype), how))[:, :w]


def _whole_eights(rows: Float[Array, "b n heads head_dim"]) -> Float[Array, "b n8 heads head_dim"]:
    """Pads rows to a multiple of 8 if there are more than 8: TMA can cut off rows in steps of 8, or within the first 8."""
    n = rows.shape[1]
    return jnp.pad(rows, ((0, 0), (0, -n % 8), (0, 0), (0, 0))) if n > 8 else rows


class _Tiling(NamedTuple):
    """How the rows of one KV head fill tiles of 64 rows.

    Few window rows: a tile holds those of several heads, `stretch` rows each, the first w of them in use.
    Many: a tile holds 64 window rows of one head.
    """

    stretch: int  # rows from one head to the next in a tile: a multiple of 8, so that TMA can write them
    heads: int  # heads of a tile
    row_tiles: int  # tiles that share their heads
    tiles: int  # all tiles of a KV head, those that share their heads next to each other
    group: int  # query heads of a KV head

    @classmethod
    def of(cls, w: int, group: int) -> "_Tiling":
        stretch = min(ROWS, pl.cdiv(w, 8) * 8)
        heads, row_tiles = min(ROWS // stretch, group), pl.cdiv(w, stretch)
        return cls(stretch, heads, row_tiles, pl.cdiv(group, heads) * row_tiles, group)


class _Settings(NamedTuple):
    """The static settings of the kernels."""

    tiling: _Tiling
    splits: int
    interpret: plgpu.InterpretGPUParams | None


def _bits_by_tile(
    mask: Bool[Array, "b w s"], tiling: _Tiling
) -> tuple[Int[Array, "b row_tiles blocks 2 64"], Int[Array, "b row_tiles"] | None]:
    """The mask's bits, one word per row of a tile and 32 keys; and how many window blocks a tile must read, None if there is one.

    It must read up to the last block that one of its rows sees: a causal window's first tiles read little of it.
    """
    b, w, s = mask.shape
    blocks, rows = pl.cdiv(s, KEYS), tiling.row_tiles * tiling.stretch
    packed = pack_mask(mask)
    words = jnp.pad(packed.bits, ((0, 0), (0, rows - w), (0, blocks * KEYS // BITS - packed.bits.shape[2])))
    words = words.reshape(b, tiling.row_tiles, tiling.stretch, blocks, KEYS // BITS).transpose(0, 1, 3, 4, 2)
    words = jnp.concatenate([words] * pl.cdiv(ROWS, tiling.stretch), -1)[..., :ROWS]  # every head of a tile sees the same
    if blocks == 1:
        return words, None
    end = jnp.pad(packed.end, ((0, 0), (0, rows - w))).reshape(b, tiling.row_tiles, tiling.stretch).max(2)
    return words, pl.cdiv(end, KEYS)


def _tile(*shape: int, dtype):
    """Shared memory laid out as wgmma and TMA want it: pieces of 8 rows by at most 128 bytes, swizzled."""
    size = jnp.dtype(dtype).itemsize
    columns = min(shape[-1], 128 // size)
    # mypy takes the methods that these classes leave without a body for abstract ones.
    tiling = plgpu.TilingTransform((8, columns))  # type: ignore[abstract]
    swizzle = plgpu.SwizzleTransform(columns * size)  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def _attend(inputs: "_Inputs", how: _Settings):
    """Runs the kernel that attends.

    Returns:
        One split: [out], with q's shape and dtype. Several: their float32 outputs by tile
        [splits, b, kv_heads, tiles, 64, head_dim], and their weights [splits, b, kv_heads, tiles, 64].
    """
    b, _, _, head_dim = inputs.q.shape
    page, kv_heads = inputs.k_pages.shape[1:3]
    dtype, copies = inputs.q.dtype, KEYS // min(page, KEYS)
    grid = (b, kv_heads, how.splits, how.tiling.tiles)
    # Thread blocks that share a processor need a small ring to fit, and hide each other's waiting.
    ring = 4 if math.prod(grid) <= PROCESSORS else 2
    scratch = _Scratch(
        q_tile=_tile(ROWS, head_dim, dtype=dtype),
        k_ring=_tile(ring, KEYS, head_dim, dtype=dtype),
        v_ring=_tile(ring, KEYS, head_dim, dtype=dtype),
        weights_tile=_tile(ROWS, KEYS, dtype=dtype),
        q_ready=plgpu.Barrier(num_arrivals=how.tiling.heads),
        k_ready=plgpu.Barrier(num_arrivals=copies, num_barriers=ring),
        v_ready=plgpu.Barrier(num_arrivals=copies, num_barriers=ring),
    )
    tiles = how.splits, b, kv_heads, how.tiling.tiles, ROWS
    by_tile = [jax.ShapeDtypeStruct((*tiles, head_dim), jnp.float32), jax.ShapeDtypeStruct(tiles, jnp.float32)]
    return plgpu.kernel(
        functools.partial(_kernel, how=how),
        out_type=by_tile if how.splits > 1 else [jax.ShapeDtypeStruct(inputs.q.shape, dtype)],
        scratch_types=scratch._asdict(),
        grid=grid,
        grid_names=("sequence", "kv_head", "split", "tile"),
        kernel_name="tree_attention_split",
        interpret=how.interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*(array for array in inputs if array is not None))


def _merge(parts, weights, out: jax.ShapeDtypeStruct, how: _Settings) -> Float[Array, "b w heads head_dim"]:
    """Merges the splits into one softmax: each part counts by its sum of exponentials, whose base-2 logarithm is in `weights`."""
    _, b, kv_heads, tiles, _, head_dim = parts.shape
    columns = head_dim // MERGE_SHARES
    return plgpu.kernel(
        functools.partial(_merge_kernel, how=how),
        out_type=out,
        scratch_types={"tile": _tile(ROWS, columns, dtype=out.dtype)},
        grid=(b, kv_heads, tiles, MERGE_SHARES),
        grid_names=("sequence", "kv_head", "tile", "share"),
        kernel_name="tree_attention_merge",
        interpret=how.interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(parts, weights)


class _Inputs(NamedTuple):
    """The kernel's arguments: arrays outside of the kernel, references to device memory in it."""

    q: Any
    k_pages: Any
    v_pages: Any
    page_table: Any
    start: Any
    length: Any
    k_window: Any
    v_window: Any
    bits: Any  # [b, row_tiles, window blocks, 2, 64]
    window_blocks: Any  # [b, row_tiles], or None for always one


class _Scratch(NamedTuple):
    """The shared memory of a thread block: tiles, and barriers that signal when the copies into them have arrived."""

    q_tile: Any  # [64, head_dim]; in the end the output
    k_ring: Any  # [ring, 64, head_dim]
    v_ring: Any  # [ring, 64, head_dim]
    weights_tile: Any  # [64, 64]
    q_ready: Any
    k_ready: Any
    v_ready: Any


class _Work(NamedTuple):
    """The work of one thread block: blocks begin .. begin + count - 1 of its row tile's list of key blocks. All int32 scalars."""

    sequence: Any
    kv_head: Any
    split: Any
    tile: Any
    row_tile: Any  # the tile's place among those that share its heads
    window: Any  # blocks of the window, which come first in the list
    first: Any  # number of the page block that holds `start`
    start: Any
    length: Any
    begin: Any
    count: Any


def _kernel(*refs, how: _Settings, **scratch):
    """One thread block (one warpgroup): fetches, attends, stores."""
    refs, outputs = (refs[:-1], refs[-1:]) if how.splits == 1 else (refs[:-2], refs[-2:])
    inputs, memory = _Inputs(*refs, *[None] * (len(_Inputs._fields) - len(refs))), _Scratch(**scratch)
    work = _share(inputs, how)
    fetch = functools.partial(_fetch, inputs, memory, work)
    ring, head_dim = memory.k_ring.shape[0], memory.q_tile.shape[1]
    for head, rows, place in _heads_of_tile(how.tiling, work):
        # Past the group's last head, load that head again: these rows are never stored.
        head = jnp.minimum(head, (work.kv_head + 1) * how.tiling.group - 1)
        plgpu.copy_gmem_to_smem(inputs.q.at[*place, head], memory.q_tile.at[rows], memory.q_ready)
    pl.loop(0, jnp.minimum(ring, work.count))(fetch)
    plgpu.barrier_wait(memory.q_ready)

    def attend(step, state, *, window: bool):
        state = _attend_block(inputs, memory, work, step, state, window)
        pl.when(step + ring < work.count)(lambda: fetch(step + ring))
        return state

    window_end = jnp.clip(work.window - work.begin, 0, work.count)
    state = lax.fori_loop(0, window_end, functools.partial(attend, window=True), _no_keys(head_dim))
    out, greatest, total = lax.fori_loop(window_end, work.count, functools.partial(attend, window=False), state)

    total_or_one = jnp.where(total > 0, total, 1.0)
    out = out / lax.broadcast_in_dim(total_or_one, out.shape, [0])
    if how.splits == 1:
        _store(out, memory.q_tile, outputs[0], how.tiling, work)
    else:
        place = work.split, work.sequence, work.kv_head, work.tile
        outputs[0][*place] = out
        outputs[1][*place] = jnp.where(total > 0, greatest + jnp.log2(total_or_one), LOWEST)


def _share(inputs: _Inputs, how: _Settings) -> _Work:
    """The share of this thread block: the tile's blocks are divided evenly; the last splits may get fewer or none."""
    sequence, kv_head, split, tile = (lax.axis_index(name) for name in ("sequence", "kv_head", "split", "tile"))
    row_tile = lax.rem(tile, how.tiling.row_tiles)
    start, length = inputs.start[sequence], inputs.length[sequence]
    window = jnp.int32(1) if inputs.window_blocks is None else inputs.window_blocks[sequence, row_tile]
    first = lax.div(start, KEYS)
    total = window + jnp.where(length > start, lax.div(length + KEYS - 1, KEYS) - first, 0)
    share = lax.div(total + how.splits - 1, how.splits)
    begin = split * share
    count = jnp.clip(total - begin, 0, share)
    return _Work(sequence, kv_head, split, tile, row_tile, window, first, start, length, begin, count)


def _heads_of_tile(tiling: _Tiling, work):
    """For each head of the tile: its number, its rows in the tile, and where those are in an array [b, w, heads, head_dim]."""
    first = work.kv_head * tiling.group + lax.div(work.tile, tiling.row_tiles) * tiling.heads
    place = work.sequence, pl.ds(lax.rem(work.tile, tiling.row_tiles) * tiling.stretch, tiling.stretch)
    for i in range(tiling.heads):
        yield first + i, pl.ds(i * tiling.stretch, tiling.stretch), place


def _fetch(inputs: _Inputs, memory: _Scratch, work: _Work, step) -> None:
    """Starts copying the keys and values of a block into their place in the ring."""
    slot, block = lax.rem(step, memory.k_ring.shape[0]), work.begin + step
    table_width, page = inputs.page_table.shape[1], inputs.k_pages.shape[1]
    piece = min(page, KEYS)

    def copy(keys, values, where, offset):
        part = pl.ds(offset, piece)
        plgpu.copy_gmem_to_smem(keys.at[where], memory.k_ring.at[slot, part], memory.k_ready.at[slot])
        plgpu.copy_gmem_to_smem(values.at[where], memory.v_ring.at[slot, part], memory.v_ready.at[slot])

    @pl.when(block < work.window)
    def _():
        for offset in range(0, KEYS, piece):
            where = work.sequence, pl.ds(block * KEYS + offset, piece), work.kv_head
            copy(inputs.k_window, inputs.v_window, where, offset)

    @pl.when(block >= work.window)
    def _():
        for offset in range(0, KEYS, piece):
            place = (work.first + block - work.window) * KEYS + offset
            # The last block's pieces may lie past the table's end; what they load is masked.
            entry = jnp.minimum(lax.div(place, page), table_width - 1)
            where = inputs.page_table[work.sequence, entry], pl.ds(lax.rem(place, page), piece), work.kv_head
            copy(inputs.k_pages, inputs.v_pages, where, offset)


def _no_keys(head_dim: int):
    """The running softmax before the first key: weighted sum of values, greatest logit, sum of exponentials."""
    layout = plgpu.Layout.WGMMA
    return (
        plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), layout),
        plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), layout.reduce(1)),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), layout.reduce(1)),
    )


def _attend_block(inputs: _Inputs, memory: _Scratch, work: _Work, step, state, window: bool):
    """Adds one block of keys to the running softmax. Logits are kept in base 2: exp2 is the hardware's exponential."""
    out, greatest, total = state
    slot, block, head_dim = lax.rem(step, memory.k_ring.shape[0]), work.begin + step, memory.q_tile.shape[1]

    plgpu.barrier_wait(memory.k_ready.at[slot])
    logits = _product(memory.q_tile, memory.k_ring.at[slot].transpose((1, 0)), (ROWS, KEYS)) * (LOG2_E / head_dim**0.5)
    if window:
        seen = _seen_by_mask(inputs, work, block)
    else:
        low, high = (edge - (work.first + block - work.window) * KEYS for edge in (work.start, work.length))
        seen = _between((ROWS, KEYS), 1, low, high)
    logits = jnp.where(seen, logits, -jnp.inf)

    new_greatest = jnp.maximum(greatest, logits.max(1))
    shrink = jnp.exp2(greatest - new_greatest)
    weights = jnp.exp2(logits - lax.broadcast_in_dim(new_greatest, logits.shape, [0]))
    total = total * shrink + weights.sum(1)
    memory.weights_tile[...] = weights.astype(memory.weights_tile.dtype)
    plgpu.commit_smem()

    plgpu.barrier_wait(memory.v_ready.at[slot])
    if not window:
        _clear_unseen(memory.v_ring.at[slot], low, high)
    new_out = _product(memory.weights_tile, memory.v_ring.at[slot], out.shape)
    return out * lax.broadcast_in_dim(shrink, out.shape, [0]) + new_out, new_greatest, total


def _product(left, right, shape: tuple[int, int]):
    """left @ right of two tiles in shared memory, in float32 registers."""

    def multiply(accumulator):
        plgpu.wgmma(accumulator, left, right)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def _between(shape: tuple[int, int], axis: int, low, high):
    """Where the index along `axis` is at least low and below high."""
    index = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
    return (index >= low) & (index < high)


def _seen_by_mask(inputs: _Inputs, work: _Work, block):
    """The keys of a window block that each row sees, from the mask's bits."""
    key = plgpu.broadcasted_iota(jnp.int32, (ROWS, KEYS), 1, layout=plgpu.Layout.WGMMA)

    def word(half):
        bits = inputs.bits.at[work.sequence, work.row_tile, block, half]
        bits = plgpu.load(bits, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        return lax.broadcast_in_dim(bits, (ROWS, KEYS), [0])

    return (lax.shift_right_logical(jnp.where(key < 32, word(0), word(1)), key & 31) & 1) == 1


def _clear_unseen(values, low, high) -> None:
    """Zeros the values outside low .. high: they may be NaN, and a weight of 0 times NaN is NaN."""

    @pl.when((low > 0) | (high < KEYS))
    def _():
        kept = plgpu.load(values, layout=plgpu.Layout.WGMMA)
        values[...] = jnp.where(_between(values.shape, 0, low, high), kept, jnp.zeros_like(kept))
        plgpu.commit_smem()


def _store(out, tile, target, tiling: _Tiling, work, columns=slice(None)) -> None:
    """Writes the rows of a tile to their places in `target` [b, w, heads, head_dim], by way of shared memory."""
    tile[...] = out.astype(tile.dtype)
    plgpu.commit_smem()
    for head, rows, place in _heads_of_tile(tiling, work):
        copy = functools.partial(plgpu.copy_smem_to_gmem, tile.at[rows], target.at[*place, head, columns])
        pl.when(head < (work.kv_head + 1) * tiling.group)(copy)
    plgpu.wait_smem_to_gmem(0)


class _MergeWork(NamedTuple):
    """The work of one thread block of the merge: some columns of one tile."""

    sequence: Any
    kv_head: Any
    tile: Any


def _merge_kernel(parts, weights, out, *, how: _Settings, tile):
    """One thread block: the weighted mean over the splits of some columns of a tile."""
    work = _MergeWork(*(lax.axis_index(name) for name in _MergeWork._fields))
    columns = pl.ds(lax.axis_index("share") * tile.shape[1], tile.shape[1])
    layout = plgpu.Layout.WGMMA

    def load(ref, split, *rest, layout):
        return plgpu.load(ref.at[split, *work, *rest], layout=layout, optimized=False)

    logarithms = [load(weights, split, layout=layout.reduce(1)) for split in range(how.splits)]
    greatest = functools.reduce(jnp.maximum, logarithms)
    total, mean = jnp.zeros_like(greatest), jnp.zeros(tile.shape, jnp.float32)
    for split, logarithm in enumerate(logarithms):
        weight = jnp.exp2(logarithm - greatest)
        part = load(parts, split, slice(None), columns, layout=layout)
        total, mean = total + weight, mean + lax.broadcast_in_dim(weight, part.shape, [0]) * part
    _store(mean / lax.broadcast_in_dim(total, mean.shape, [0]), tile, out, how.tiling, work, columns)
