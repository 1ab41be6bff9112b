"""What the processes of a group tell one another (hosts.py), as bytes. Nothing is pickled, and importing this loads no JAX.

message = length of the header (4 bytes) | header (JSON) | bytes of the arrays, in order
"""

import json
import math
import struct
from collections.abc import Hashable, Sequence
from dataclasses import is_dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np


class Kept(NamedTuple):
    """An array that programs keep on the device between launches: only what has changed is sent."""

    values: np.ndarray


type Leaf = np.ndarray | Kept | None
"""An array of a launch. None: every process has it on its device."""
type Header = dict[str, Any]


_AS_TEXT = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would make one for each message
_INT32 = np.dtype(np.int32)


def pack(header: Header, data: bytes = b"") -> bytes:
    """A message."""
    text = _AS_TEXT(header).encode()
    return b"".join((struct.pack("<I", len(text)), text, data))


def unpack(message: bytes) -> tuple[Header, memoryview]:
    """Its header, and the bytes behind it. Raises ValueError if these bytes are not a message."""
    try:
        (length,) = struct.unpack_from("<I", message)
        header = json.loads(message[4 : 4 + length]) if len(message) >= 4 + length else None
    except (struct.error, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"not a message: {error}") from None
    if not isinstance(header, dict):
        raise ValueError(f"a message begins with an object, got {header!r:.80}")
    return header, memoryview(message)[4 + length :]


@lru_cache(1024)
def described(program: Any) -> tuple[str, tuple[Any, ...]]:
    """A program (a dataclass) as its kind and the values of its fields, in which a tree is its three numbers."""
    fields = (list(vars(each).values()) if is_dataclass(each) else each for each in vars(program).values())
    return type(program).__name__, tuple(fields)


class Arrays:
    """Arrays as bytes, and back; each end of a connection has one. Both remember the last values of kept arrays.

    In:  Kept([5, 6, 7]), which was [5, 6, 8], and [1, 2] int32
    Out: 1, ["<i4", [2]] and the bytes of 2 (place), 7 (value), 1, 2
    """

    def __init__(self) -> None:
        self._last: dict[Hashable, np.ndarray] = {}
        """By program and place among its leaves."""

    def encode(self, program: Any, leaves: Sequence[Leaf]) -> tuple[list[Any], bytes]:
        """How each is sent, and the bytes. null: not at all; a number: so many changed entries; else [dtype, shape], and a third
        entry if it is kept."""
        how: list[Any] = []
        data: list[bytes] = []
        for place, leaf in enumerate(leaves):
            if leaf is None:
                how.append(None)
                continue
            values = leaf.values if isinstance(leaf, Kept) else leaf
            form: list[Any] = [values.dtype.str, values.shape]
            if isinstance(leaf, Kept):
                last = self._last.get((program, place))
                if last is values:
                    how.append(0)
                    continue
                self._last[program, place] = values
                flat = values.reshape(-1)
                changed = None if last is None else (last.reshape(-1) != flat).nonzero()[0]
                if changed is not None and 2 * len(changed) < len(flat):
                    how.append(len(changed))
                    data += [changed.astype(_INT32).tobytes(), flat[changed].tobytes()]
                    continue
                form.append(True)
            how.append(form)
            data.append(values.tobytes())
        return how, b"".join(data)

    def decode(self, program: Any, how: Sequence[Any], data: memoryview) -> list[Leaf]:
        """What the other end encoded."""
        leaves: list[Leaf] = []
        for place, each in enumerate(how):
            if each is None:
                leaves.append(None)
            elif isinstance(each, int):
                values = self._last[program, place].copy()
                places, data = _read(data, _INT32, each)
                values.reshape(-1)[places], data = _read(data, values.dtype, each)
                leaves.append(self._keep(program, place, values))
            else:
                dtype, shape, *kept = each
                flat, data = _read(data, np.dtype(dtype), math.prod(shape))
                values = flat.reshape(shape)
                leaves.append(self._keep(program, place, values) if kept else values)
        return leaves

    def _keep(self, program: Any, place: int, values: np.ndarray) -> Kept:
        self._last[program, place] = values
        return Kept(values)


def _read(data: memoryview, dtype: np.dtype, count: int) -> tuple[np.ndarray, memoryview]:
    """So many numbers, and what follows them."""
    return np.frombuffer(data, dtype, count), data[count * dtype.itemsize :]
