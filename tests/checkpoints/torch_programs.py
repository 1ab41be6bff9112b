"""Pickles and archives like torch.save's, written opcode by opcode."""

import struct
import zipfile
from pathlib import Path

import pytest

from jaxspec.checkpoints.torch_file import TorchFile


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def integer(value: int) -> bytes:
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def tuple_of(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def integers(*values: int) -> bytes:
    return tuple_of(*map(integer, values))


def imported(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


FLOATS = imported("torch", "FloatStorage")
REBUILD_TENSOR = imported("torch._utils", "_rebuild_tensor_v2")
REBUILD_PARAMETER = imported("torch._utils", "_rebuild_parameter")


def storage(key: str = "0", elements: int = 4) -> bytes:
    return tuple_of(text("storage"), FLOATS, text(key), text("cpu"), integer(elements)) + b"Q"


def tensor(elements: int = 4, offset: int = 0, shape: bytes = integers(4), strides: bytes = integers(1), key: str = "0") -> bytes:
    return REBUILD_TENSOR + tuple_of(storage(key, elements), integer(offset), shape, strides, b"\x89", b"}") + b"R"


def state_dict(**values: bytes) -> bytes:
    return b"\x80\x02}(" + b"".join(text(name) + value for name, value in values.items()) + b"u."


def save(
    path: Path, program: bytes, others: tuple[tuple[str, bytes], ...] = (("data/0", bytes(16)),), compression: int = 0
) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in (("data.pkl", program), *others):
            archive.writestr(f"model/{name}", content)
    return path


def refused(path: Path, message: str) -> str:
    """That the file is refused by a message of some length that names it; the message."""
    with pytest.raises(ValueError, match=message) as caught:
        TorchFile(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 600
    return str(caught.value)


GOOD = state_dict(weight=tensor())
