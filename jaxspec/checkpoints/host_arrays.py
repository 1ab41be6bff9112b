"""Large arrays on the host: transposing in tiles that fit the cache and on every core, and memory that JAX takes over as it is."""

import os
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

TILE = (32, 256)
"""Rows and columns copied at once. 0.8 GB/s a core; NumPy's own order 0.2, XLA 0.6 with a second copy (EPYC, 2026-11-21)."""
ALIGNMENT = 64
STRIPE = 1024
"""Rows that one thread takes at a time."""


def cast(array: np.ndarray, dtype: DTypeLike | None) -> np.ndarray:
    """The array in this dtype, if it is a floating-point one; None: as it is."""
    if dtype is None or not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return array.astype(jnp.dtype(dtype), copy=False)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array that jax.device_put takes over on a CPU instead of copying it: those start at a multiple of 64 bytes."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def owned(array: np.ndarray) -> np.ndarray:
    """The array, copied if it views a mapped file (which somebody may replace) or is not aligned."""
    if array.flags.writeable and array.ctypes.data % ALIGNMENT == 0:
        return array
    copy = aligned_empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def transposed(*parts: np.ndarray) -> np.ndarray:
    """The transpose of the matrices stacked along their rows, in C order.

    In:  [2, 3], [4, 3]
    Out: [3, 6]
    """
    rows = sum(len(part) for part in parts)
    out = aligned_empty((parts[0].shape[1], rows), parts[0].dtype)
    stripes, start = [], 0
    for part in parts:
        stripes += [
            (part[i : i + STRIPE], out[:, start + i : start + min(i + STRIPE, len(part))]) for i in range(0, len(part), STRIPE)
        ]
        start += len(part)
    if len(stripes) == 1:
        _transpose_into(*stripes[0])
    else:
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # NumPy copies without Python's lock
            list(pool.map(_transpose_into, *zip(*stripes, strict=True)))
    return out


def _transpose_into(matrix: np.ndarray, out: np.ndarray) -> None:
    """Plain unsigned integers are copied fastest."""
    word = np.dtype(f"u{matrix.dtype.itemsize}")
    matrix, out = matrix.view(word), out.view(word)
    for i in range(0, matrix.shape[0], TILE[0]):
        for j in range(0, matrix.shape[1], TILE[1]):
            out[j : j + TILE[1], i : i + TILE[0]] = matrix[i : i + TILE[0], j : j + TILE[1]].T
