"""What the processes of a group tell one another (hosts.py), as bytes. Nothing is pickled, and importing this loads no JAX.

message = length of the header (4 bytes) | header (JSON) | bytes of the arrays, in order
"""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np


class Kept(NamedTuple):
    """An array that programs keep on the device between launches: only what has changed is sent."""

    values: np.ndarray


type Leaf = np.ndarray | Kept | None
"""An array of a launch. None: every process has it on its device."""
type Header = Mapping[str, Any]
"""Lists in it are tuples once it has been read."""
type Form = tuple[Any, ...]
"""How arrays are sent."""


_AS_TEXT = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would make one for each message
_INT32 = np.dtype(np.int32)
_LENGTH = struct.Struct("<I")


def pack(header: Header, data: bytes = b"") -> bytes:
    """A message."""
    text = _AS_TEXT(header).encode()
    return b"".join((_LENGTH.pack(len(text)), text, data))


@lru_cache(1024)
def launch_header(program: Any, how: Form) -> bytes:
    """The beginning of a launch's message. A program has few of them."""
    return pack({"launch": described(program), "arrays": how})


def unpack(message: bytes) -> tuple[Header, memoryview]:
    """Its header, and the bytes behind it. Raises ValueError if these bytes are not a message."""
    try:
        (length,) = _LENGTH.unpack_from(message)
        header = _read_header(message[4 : 4 + length]) if len(message) >= 4 + length else None
    except (struct.error, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"not a message: {error}") from None
    if not isinstance(header, Mapping):
        raise ValueError(f"a message begins with an object, got {header!r:.80}")
    return header, memoryview(message)[4 + length :]


@lru_cache(1024)
def _read_header(text: bytes) -> Any:
    """Most headers have come before."""
    return _frozen(json.loads(text))


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return MappingProxyType({name: _frozen(each) for name, each in value.items()})
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


@lru_cache(1024)
def described(program: Any) -> tuple[str, tuple[Any, ...]]:
    """A program (a dataclass) as its kind and the values of its fields, in which a tree is its three numbers."""
    fields = (tuple(vars(each).values()) if is_dataclass(each) else each for each in vars(program).values())
    return type(program).__name__, tuple(fields)


class Arrays:
    """Arrays as bytes, and back; each end of a connection has one. Both remember the last values of kept arrays.

    In:  Kept([5, 6, 7]), which was [5, 6, 8], and [1, 2] int32
    Out: 1, ["<i4", [2]] and the bytes of 2 (place), 7 (value), 1, 2
    """

    def __init__(self) -> None:
        self._last: dict[Any, dict[int, np.ndarray]] = {}
        """By program, and place among its leaves."""

    def encode(self, program: Any, leaves: Sequence[Leaf]) -> tuple[Form, bytes]:
        """How each is sent, and the bytes. null: not at all; a number: so many changed entries; else [dtype, shape], and a third
        entry if it is kept."""
        how: list[Any] = []
        data: list[bytes] = []
        kept = self._last.setdefault(program, {})
        for place, leaf in enumerate(leaves):
            if leaf is None:
                how.append(None)
                continue
            if not isinstance(leaf, Kept):
                how.append((leaf.dtype.str, leaf.shape))
                data.append(leaf.tobytes())
                continue
            values, last = leaf.values, kept.get(place)
            if last is values:
                how.append(0)
                continue
            kept[place], flat = values, values.reshape(-1)
            changed = None if last is None else (last.reshape(-1) != flat).nonzero()[0]
            if changed is not None and 2 * len(changed) < len(flat):
                how.append(len(changed))
                data += [changed.astype(_INT32).tobytes(), flat[changed].tobytes()]
            else:
                how.append((values.dtype.str, values.shape, True))
                data.append(values.tobytes())
        return tuple(how), b"".join(data)

    def decode(self, program: Any, how: Form, data: memoryview) -> list[Leaf]:
        """What the other end encoded."""
        leaves: list[Leaf] = []
        last = self._last.setdefault(program, {})
        for place, each in enumerate(how):
            if each is None:
                leaves.append(None)
            elif isinstance(each, int):
                if each:
                    places, data = _read(data, _INT32, each)
                    changed = last[place].copy()
                    changed.reshape(-1)[places], data = _read(data, changed.dtype, each)
                    last[place] = changed
                leaves.append(Kept(last[place]))
            else:
                dtype, shape, *is_kept = each
                flat, data = _read(data, np.dtype(dtype), math.prod(shape))
                values = flat.reshape(shape)
                if is_kept:
                    last[place] = values
                leaves.append(Kept(values) if is_kept else values)
        return leaves


def _read(data: memoryview, dtype: np.dtype, count: int) -> tuple[np.ndarray, memoryview]:
    """So many numbers, and what follows them."""
    return np.frombuffer(data, dtype, count), data[count * dtype.itemsize :]
