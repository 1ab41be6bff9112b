"""The product in Triton itself, called through jax-triton. See `api.skinny_matmul`; needs the extra `jax-triton`.

The same algorithm and tiles as `pallas_triton.py`. Triton proper has what Pallas' Triton lacks: TMA, warp specialisation, and
autotuning. jax-triton has no interpreter, so only a compiler and a GPU can show whether this is right.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.skinny_matmul.epilogues import AddResidual, Best, Epilogue, SwiGlu
from pallas_kernels.skinny_matmul.tiling import ROWS, choose_tiling

try:
    import jax_triton as jt
    import triton
    import triton.language as tl
    from jax_triton import triton_lib
except ImportError as error:
    raise ImportError(
        f"the implementation jax_triton needs jax-triton and triton: pip install 'jaxspec-llm[jax-triton]' ({error})"
    ) from error

if jax.__version_info__ >= (0, 12):
    # jax 0.12 passes one more argument to rules of dead-code elimination; jax-triton 0.4.1's rule refuses it.
    triton_lib.pe.dce_rules[triton_lib.triton_kernel_call_p] = lambda used, *rest: ([True] * len(rest[-1].invars), rest[-1])


PTX_VERSION = 87
"""8.7, which ptxas reads from CUDA 12.8 on. Triton's default is the newest that it knows, which may be too new for JAX's ptxas."""


@jax.named_scope("skinny_matmul_jax_triton")
def matmul(
    x: Float[Array, "rows k"], weight: Float[Array, "k n"], epilogue: Epilogue, *, dtype: DTypeLike
) -> Array | tuple[Array, ...]:
    """One program per block of columns."""
    rows, n = x.shape[0], weight.shape[1] // (2 if isinstance(epilogue, SwiGlu) else 1)
    tiling = choose_tiling(weight, x.dtype.itemsize, epilogue)
    blocks = triton.cdiv(n, tiling.columns)
    out = jax.ShapeDtypeStruct((rows, n), dtype)
    kernel: Any = _plain
    inputs: tuple[Array, ...] = ()
    outputs: tuple[jax.ShapeDtypeStruct, ...] = (out,)
    if isinstance(epilogue, AddResidual):
        kernel, inputs, outputs = _add_residual, (epilogue.residual,), (out, jax.ShapeDtypeStruct((rows, blocks), jnp.float32))
    elif isinstance(epilogue, SwiGlu):
        kernel = _swiglu
    elif isinstance(epilogue, Best):
        by_block = (jax.ShapeDtypeStruct((rows, blocks), each) for each in (dtype, jnp.int32))
        kernel, outputs = _best, (out, *by_block)
    results = jt.triton_call(
        x,
        weight,
        *inputs,
        kernel=kernel,
        out_type=outputs,
        grid=(blocks,),
        name="skinny_matmul",
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        backend_options={"ptx_version": PTX_VERSION, "enable_fp_fusion": True},
        rows=rows,
        k=weight.shape[0],
        n=n,
        blocks=blocks,
        ROWS=ROWS,
        COLUMNS=tiling.columns,
        DEPTH=tiling.depth,
        PRECISION="ieee" if x.dtype == jnp.float32 else "tf32",  # 16-bit numbers ignore it
    )
    return results if len(outputs) > 1 else results[0]


@triton.jit
def _sums(
    x,
    weight,
    column,
    STRIDE: tl.constexpr,
    rows: tl.constexpr,
    k: tl.constexpr,
    n: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    TWO: tl.constexpr,
):
    """The sums over k of these columns, and with TWO of the columns n further on. STRIDE: the width of the weight."""
    row = tl.arange(0, ROWS)
    first = tl.zeros((ROWS, COLUMNS), tl.float32)
    second = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, k, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        left = tl.load(x + row[:, None] * k + depth[None, :], mask=(row < rows)[:, None] & (depth < k)[None, :], other=0.0)
        places = weight + depth[:, None].to(tl.int64) * STRIDE + column[None, :]
        mask = (depth < k)[:, None] & (column < n)[None, :]
        first = tl.dot(left, tl.load(places, mask=mask, other=0.0), first, input_precision=PRECISION)
        if TWO:
            second = tl.dot(left, tl.load(places + n, mask=mask, other=0.0), second, input_precision=PRECISION)
    return first, second


@triton.jit
def _tile(rows: tl.constexpr, n: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The columns of this block, the places of its numbers in the result, and which of them exist."""
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    return column, row[:, None] * n + column[None, :], (row < rows)[:, None] & (column < n)[None, :]


@triton.jit
def _plain(
    x,
    weight,
    out,
    rows: tl.constexpr,
    k: tl.constexpr,
    n: tl.constexpr,
    blocks: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    column, place, mask = _tile(rows, n, ROWS, COLUMNS)
    sums, _ = _sums(x, weight, column, n, rows, k, n, ROWS, COLUMNS, DEPTH, PRECISION, False)
    tl.store(out + place, sums, mask=mask)


@triton.jit
def _swiglu(
    x,
    weight,
    out,
    rows: tl.constexpr,
    k: tl.constexpr,
    n: tl.constexpr,
    blocks: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    column, place, mask = _tile(rows, n, ROWS, COLUMNS)
    gate, up = _sums(x, weight, column, 2 * n, rows, k, n, ROWS, COLUMNS, DEPTH, PRECISION, True)
    tl.store(out + place, gate * tl.sigmoid(gate) * up, mask=mask)


@triton.jit
def _add_residual(
    x,
    weight,
    residual,
    total,
    squares,
    rows: tl.constexpr,
    k: tl.constexpr,
    n: tl.constexpr,
    blocks: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    column, place, mask = _tile(rows, n, ROWS, COLUMNS)
    sums, _ = _sums(x, weight, column, n, rows, k, n, ROWS, COLUMNS, DEPTH, PRECISION, False)
    added = tl.load(residual + place, mask=mask, other=0.0).to(tl.float32) + sums
    rounded = added.to(total.dtype.element_ty)
    tl.store(total + place, rounded, mask=mask)
    wide = rounded.to(tl.float32)
    row = tl.arange(0, ROWS)
    tl.store(squares + row * blocks + tl.program_id(0), tl.sum(wide * wide, 1), mask=row < rows)


@triton.jit
def _best(
    x,
    weight,
    out,
    greatest,
    place_of_greatest,
    rows: tl.constexpr,
    k: tl.constexpr,
    n: tl.constexpr,
    blocks: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    column, place, mask = _tile(rows, n, ROWS, COLUMNS)
    sums, _ = _sums(x, weight, column, n, rows, k, n, ROWS, COLUMNS, DEPTH, PRECISION, False)
    rounded = sums.to(out.dtype.element_ty)
    tl.store(out + place, rounded, mask=mask)
    seen = tl.where((column < n)[None, :], rounded.to(tl.float32), float("-inf"))
    best, index = tl.max(seen, 1, return_indices=True, return_indices_tie_break_left=True)
    row = tl.arange(0, ROWS)
    by_block = row * blocks + tl.program_id(0)
    tl.store(greatest + by_block, best, mask=row < rows)
    tl.store(place_of_greatest + by_block, tl.program_id(0) * COLUMNS + index, mask=row < rows)
