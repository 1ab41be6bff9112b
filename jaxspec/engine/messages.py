"""What the processes of a group tell one another (host_group.py), as bytes. Nothing is pickled, and importing this loads no JAX.

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
    """An array that programs keep on the device between launches: it is sent only if it has changed, a large one only in part."""

    values: np.ndarray


type Leaf = np.ndarray | Kept | None
"""An array of a launch. None: every process has it on its device."""
type Header = Mapping[str, Any]
"""Once it has been read, lists in it are tuples, and its arrays `_Whole`, numbers or None."""


_AS_TEXT = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would make one for each message
_INT32 = np.dtype(np.int32)
_LENGTH = struct.Struct("<I")
WHOLE = 1 << 13
"""Bytes of an array that is always sent whole: to find what has changed in it, and to write it into a copy, takes longer (for 2 KB
5 of a message's 18 us; AMD EPYC, 28 November 2026)."""


def pack(header: Header, data: bytes = b"") -> bytes:
    """A message."""
    text = _AS_TEXT(header).encode()
    return b"".join((_LENGTH.pack(len(text)), text, data))


def unpack(message: bytes) -> tuple[Header, memoryview]:
    """Its header, and the bytes after it. Raises ValueError if these bytes are not a message."""
    try:
        begin, end = _LENGTH.size, _LENGTH.size + _LENGTH.unpack_from(message)[0]
        if end > len(message):
            raise ValueError(f"not a message: {len(message)} bytes, of which the header should take {end}")
        return _read_header(message[begin:end]), memoryview(message)[end:]
    except (struct.error, RecursionError, UnicodeDecodeError, TypeError) as error:
        raise ValueError(f"not a message: {error}") from None


@lru_cache(1024)
def _read_header(text: bytes) -> Header:
    """Most headers have come before."""
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError(f"a message begins with an object, got {header!r:.80}")
    read = {name: _frozen(value) for name, value in header.items()}
    if "arrays" in read:
        read["arrays"] = tuple(_whole(*each) if isinstance(each, tuple) else each for each in read["arrays"])
    return MappingProxyType(read)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


class _Whole(NamedTuple):
    """How an array is sent whole."""

    dtype: np.dtype
    shape: tuple[int, ...]
    size: int
    is_kept: bool


def _whole(dtype: str, shape: tuple[int, ...], is_kept: bool = False) -> _Whole:
    return _Whole(np.dtype(dtype), shape, math.prod(shape), is_kept)


@lru_cache(1024)
def described(program: Any) -> tuple[str, tuple[Any, ...]]:
    """A program (a dataclass) as its kind and the values of its fields; a tree is given as the values of its own."""
    fields = (tuple(vars(each).values()) if is_dataclass(each) else each for each in vars(program).values())
    return type(program).__name__, tuple(fields)


@lru_cache(1024)
def _launch_header(program: Any, how: tuple[Any, ...]) -> bytes:
    """The beginning of a launch's message. A program has few of them."""
    return pack({"launch": described(program), "arrays": how})


class Arrays:
    """Launches as messages, and back; each end of a connection has one. Both remember the last values of kept arrays.

    In:  Kept([5, 6, 7]), which was this array before, and [1, 2] int32
    Out: "arrays": [0, ["<i4", [2]]] and the bytes of 1, 2
    """

    def __init__(self) -> None:
        self._last: dict[Any, Sequence[Leaf]] = {}
        """The arrays of each program's last launch; the end that receives has the programs as `described`."""

    def encode(self, program: Any, leaves: Sequence[Leaf]) -> bytes:
        """The message of a launch. For an array the header has null: it is not sent; a number: so many changed entries are; or its
        dtype, shape and, if it is kept, a third entry."""
        how: list[Any] = []
        data = [b""]
        for leaf, before in zip(leaves, self._last.get(program) or (None,) * len(leaves), strict=True):
            if leaf is None:
                how.append(None)
            elif not isinstance(leaf, Kept):
                how.append((leaf.dtype.str, leaf.shape))
                data.append(leaf.tobytes())
            elif isinstance(before, Kept) and before.values is leaf.values:
                how.append(0)
            elif isinstance(before, Kept) and (changed := _few_changes(before.values, leaf.values)) is not None:
                how.append(len(changed))
                data += [changed.astype(_INT32).tobytes(), leaf.values.reshape(-1)[changed].tobytes()]
            else:
                how.append((leaf.values.dtype.str, leaf.values.shape, True))
                data.append(leaf.values.tobytes())
        self._last[program], data[0] = leaves, _launch_header(program, tuple(how))
        return b"".join(data)

    def decode(self, header: Header, data: memoryview) -> list[Leaf]:
        """The arrays of a launch."""
        leaves: list[Leaf] = []
        before, at = self._last.get(header["launch"]), 0
        for place, form in enumerate(header["arrays"]):
            if form is None:
                leaves.append(None)
            elif isinstance(form, _Whole):
                values = np.frombuffer(data, form.dtype, form.size, at).reshape(form.shape)
                at += values.nbytes
                leaves.append(Kept(values) if form.is_kept else values)
            else:
                assert before is not None
                last = before[place]
                assert isinstance(last, Kept)
                if form:
                    changed = last.values.copy()
                    places = np.frombuffer(data, _INT32, form, at)
                    changed.reshape(-1)[places] = np.frombuffer(data, changed.dtype, form, at + places.nbytes)
                    at, last = at + form * (_INT32.itemsize + changed.itemsize), Kept(changed)
                leaves.append(last)
        self._last[header["launch"]] = leaves
        return leaves


def _few_changes(before: np.ndarray, values: np.ndarray) -> np.ndarray | None:
    """Places in the flat array; None: it is sent whole."""
    if values.nbytes <= WHOLE:
        return None
    changed = (before.reshape(-1) != values.reshape(-1)).nonzero()[0]
    return changed if 2 * len(changed) < values.size else None
