"""One file of tensors: what every format offers, and the safetensors one."""

import json
import math
from pathlib import Path
from typing import NamedTuple, Protocol

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

SAFETENSORS_DTYPES = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64), "I32": np.dtype(np.int32), "I16": np.dtype(np.int16), "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8), "BOOL": np.dtype(np.bool_),
}  # fmt: skip


class TensorInfo(NamedTuple):
    """What a file's header says of a tensor."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile(Protocol):
    """Named tensors in one file. The header is read at once, a tensor's values when they are asked for."""

    infos: dict[str, TensorInfo]

    def read(self, name: str) -> np.ndarray:
        """The tensor's values, perhaps a view of the file. Raises ValueError naming tensor and file if they can't be read."""

    def close(self) -> None:
        """Lets go of the file."""


class SafetensorsFile:
    """A .safetensors file. Raises ValueError if its header is wrong: lengths, offsets, shapes or a dtype without a NumPy one.

    The library checks the header; the values are mapped, so that a large tensor needs no memory before it is used.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with safe_open(path, "np") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
                shapes = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
        except SafetensorError as error:
            raise ValueError(f"{path} can't be read: {error}") from None
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
