"""Tensors in files and on the host: the safetensors format, casts, and transposes on every core."""

import json
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from jaxspec.checks import MAX_REASON
from jaxspec.host_memory import aligned_empty

SAFETENSORS_DTYPES = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64), "I32": np.dtype(np.int32), "I16": np.dtype(np.int16), "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64), "U32": np.dtype(np.uint32), "U16": np.dtype(np.uint16), "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}  # fmt: skip


class TensorInfo(NamedTuple):
    """A tensor's entry in a file's header."""

    dtype: np.dtype
    shape: tuple[int, ...]
    format: str | None = None
    """The format of its blocks, a key of row_matmul.FORMATS; None: it isn't stored in blocks, or they can't be had."""

    @property
    def size(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


class Tensor(Protocol):
    """An array, perhaps in a file, of which only the parts that are accessed are read."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> np.ndarray: ...


class TensorFile(Protocol):
    """Named tensors in one file. The header is read at once, a tensor's values when they are asked for."""

    infos: dict[str, TensorInfo]

    def read(self, name: str) -> np.ndarray:
        """The tensor's values, perhaps a view of the file. Raises ValueError naming tensor and file if they can't be read."""

    def close(self) -> None:
        """Closes the file."""


class SafetensorsFile:
    """A .safetensors file. Raises ValueError if its header is wrong: lengths, offsets, shapes or a dtype without a NumPy one.

    The library checks the header; the values are mapped, so that a large tensor needs no memory before it is used.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with safe_open(path, "np") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dict
                shapes = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
        except SafetensorError as error:
            raise ValueError(f"{path} can't be read: {str(error)[:MAX_REASON]}") from None
        self.infos = {name: TensorInfo(self._dtype(name, dtype), shape) for name, (dtype, shape) in shapes.items()}
        with path.open("rb") as opened:  # 8 bytes of length, then JSON, then the values
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
        self._bytes = np.memmap(path, np.uint8, "r", 8 + size) if 8 + size < path.stat().st_size else np.empty(0, np.uint8)
        self._ranges = {name: header[name]["data_offsets"] for name in self.infos}

    def _dtype(self, name: str, dtype: str) -> np.dtype:
        if dtype not in SAFETENSORS_DTYPES:
            raise ValueError(f"{self.path}: tensor {name!r} has dtype {dtype}; supported: {', '.join(SAFETENSORS_DTYPES)}")
        return SAFETENSORS_DTYPES[dtype]

    def read(self, name: str) -> np.ndarray:
        info, (first, end) = self.infos[name], self._ranges[name]
        return np.frombuffer(self._bytes, info.dtype, (end - first) // info.dtype.itemsize, first).reshape(info.shape)

    def close(self) -> None:
        """Nothing to do: the mapping ends with the last array that views it."""


TILE = (32, 256)
"""Rows and columns copied at once. 0.8 GB/s a core; NumPy's own order 0.2, XLA 0.6 with a second copy (EPYC, 2026-11-21)."""
STRIPE = 1024
"""Rows that one thread takes at a time."""


@contextmanager
def errors_named(place: object) -> Iterator[None]:
    """Puts `place` (a path or a tensor's name) in front of a ValueError's message, unless the message begins with it."""
    try:
        yield
    except ValueError as error:
        begins = str(error).startswith(tuple(f"{place}{after}" for after in ("/", ":", " ")))
        raise ValueError(str(error) if begins else f"{place}: {error}") from None


def cast(array: np.ndarray, dtype: DTypeLike | None) -> np.ndarray:
    """The array in this dtype, if it is a floating-point one; None: as it is."""
    if dtype is None or not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return array.astype(jnp.dtype(dtype), copy=False)


def transposed(*parts: Tensor) -> np.ndarray:
    """The transpose of the matrices stacked along their rows, in C order.

    In:  [2, 3], [4, 3]
    Out: [3, 6]
    """
    rows = sum(len(part) for part in parts)
    out = aligned_empty((parts[0].shape[1], rows), parts[0].dtype)
    stripes, start = list[tuple[Tensor, slice, np.ndarray]](), 0
    for part in parts:
        for i in range(0, len(part), STRIPE):
            end = min(i + STRIPE, len(part))
            stripes.append((part, slice(i, end), out[:, start + i : start + end]))
        start += len(part)

    def transpose(part: Tensor, own: slice, out: np.ndarray) -> None:
        transpose_into(part[own], out)

    if len(stripes) == 1:
        transpose(*stripes[0])
    else:
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # NumPy copies without Python's lock
            list(pool.map(transpose, *zip(*stripes, strict=True)))
    return out


def transpose_into(matrix: np.ndarray, out: np.ndarray) -> None:
    """Writes the transpose of `matrix` to `out`, as unsigned integers, which are copied fastest."""
    word = np.dtype(f"u{matrix.dtype.itemsize}")
    matrix, out = matrix.view(word), out.view(word)
    for i in range(0, matrix.shape[0], TILE[0]):
        for j in range(0, matrix.shape[1], TILE[1]):
            out[j : j + TILE[1], i : i + TILE[0]] = matrix[i : i + TILE[0], j : j + TILE[1]].T
