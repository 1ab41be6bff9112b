"""One file of tensors: what every format offers, and the safetensors one."""

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


class TensorFile(Protocol):
    """Named tensors in one file. The header is read at once, a tensor's values when they are asked for."""

    infos: dict[str, TensorInfo]

    def read(self, name: str) -> np.ndarray:
        """The tensor's values, in memory of their own. Raises ValueError naming tensor and file if they can't be read."""

    def close(self) -> None:
        """Lets go of the file."""


class SafetensorsFile:
    """A .safetensors file. Raises ValueError if its header is wrong: lengths, offsets, shapes or a dtype without a NumPy one."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._file = safe_open(path, "np").__enter__()
            slices = {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118 - it is no dict
        except SafetensorError as error:
            raise ValueError(f"{path} can't be read: {error}") from None
        self.infos = {
            name: TensorInfo(self._dtype(name, part.get_dtype()), tuple(part.get_shape())) for name, part in slices.items()
        }

    def _dtype(self, name: str, dtype: str) -> np.dtype:
        if dtype not in SAFETENSORS_DTYPES:
            raise ValueError(f"{self.path}: tensor {name!r} has dtype {dtype}; supported: {', '.join(SAFETENSORS_DTYPES)}")
        return SAFETENSORS_DTYPES[dtype]

    def read(self, name: str) -> np.ndarray:
        try:
            return self._file.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{self.path}: tensor {name!r} can't be read: {error}") from None

    def close(self) -> None:
        self._file.__exit__(None, None, None)
