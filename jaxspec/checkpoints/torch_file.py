"""PyTorch's `.bin` and `.pt` files, read without torch and without running a pickle.

`torch.save` (`_save` in torch/serialization.py, since torch 1.6) writes an uncompressed zip archive: `NAME/data.pkl`, a pickle of
the saved object that only refers to storages (see `PickleMachine`), and `NAME/data/KEY`, the values of one storage.

A pickle is a program for a stack machine that may import and call anything, so none is run here. `pickletools.genops` splits it
into opcodes, which is parsing only; `PickleMachine` knows the few that torch writes, and global names stay strings. A tensor is a
call: `_rebuild_tensor_v2(storage, offset, shape, strides, requires_grad, hooks)`. Python's Unpickler with an allow-list is shorter
but not safe enough: a few bytes can make it allocate gigabytes (a large memo index) or hash forever (nested tuples as keys).
"""

import math
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.checkpoints.tensor_files import TensorInfo, errors_named
from jaxspec.checks import short

STORAGE_DTYPES = {
    "torch.HalfStorage": np.dtype(np.float16), "torch.BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "torch.FloatStorage": np.dtype(np.float32), "torch.DoubleStorage": np.dtype(np.float64),
    "torch.LongStorage": np.dtype(np.int64), "torch.IntStorage": np.dtype(np.int32), "torch.ShortStorage": np.dtype(np.int16),
    "torch.CharStorage": np.dtype(np.int8), "torch.ByteStorage": np.dtype(np.uint8), "torch.BoolStorage": np.dtype(np.bool_),
}  # fmt: skip
GLOBALS = {*STORAGE_DTYPES, "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter", "collections.OrderedDict"}
MAX_DIMENSIONS = 32
MAX_EMPTY_SHAPE = 1 << 40  # lengths besides the 0 of a tensor without values: more would overflow NumPy's sizes
ADVICE = "save a state dict of plain tensors, as safetensors or with torch.save of torch >= 1.6"


@dataclass(frozen=True)
class Global:
    """A name that the pickle would import."""

    name: str


@dataclass(frozen=True)
class Storage:
    """The values in entry data/KEY of the archive, which several tensors may share."""

    dtype: np.dtype
    key: str
    elements: int


@dataclass(frozen=True)
class TorchTensor:
    """A view of a storage. Offset and strides count elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def is_inside_storage(self) -> bool:
        """True if all values lie in the storage and the tensor is no larger than it: strides of 0 could claim terabytes."""
        if len(self.shape) != len(self.strides) or len(self.shape) > MAX_DIMENSIONS:
            return False
        if min(self.storage.elements, self.offset, *self.shape, *self.strides) < 0:
            return False
        if 0 in self.shape:
            return self.offset <= self.storage.elements and math.prod(length or 1 for length in self.shape) <= MAX_EMPTY_SHAPE
        last = self.offset + sum((length - 1) * stride for length, stride in zip(self.shape, self.strides, strict=True))
        return last < self.storage.elements and math.prod(self.shape) <= self.storage.elements

    def values(self, storage_bytes: np.ndarray) -> np.ndarray:
        """The tensor's values in C order: a view of its storage's bytes if they lie there so, else a copy."""
        dtype = self.storage.dtype
        if 0 in self.shape:
            return np.empty(self.shape, dtype)
        # Nothing steps along a dimension of length 1, so its stride is free, and may be too large for NumPy.
        strides = [stride * dtype.itemsize if length > 1 else 0 for length, stride in zip(self.shape, self.strides, strict=True)]
        return np.asarray(np.ndarray(self.shape, dtype, storage_bytes, self.offset * dtype.itemsize, strides), order="C")


class PickleMachine:
    """A pickle's stack machine that builds plain data, storages and tensors only: dicts, lists, tuples, strings, numbers, None."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.outer_stacks: list[list[Any]] = []  # the stack below each open mark
        self.memo: dict[int, Any] = {}

    def run(self, program: bytes) -> object:
        """The object that the program describes. Raises ValueError for opcodes and globals that a file of tensors does without."""
        position: int | None = 0
        try:
            for opcode, argument, position in pickletools.genops(program):  # noqa: B007 - for the messages
                if opcode.name not in OPERATIONS:
                    raise ValueError(f"refused: pickle opcode {opcode.name}, which torch writes for no state dict; {ADVICE}")
                OPERATIONS[opcode.name](self, argument)
            return self.pop(1)[0]
        except (IndexError, KeyError):
            raise ValueError(f"data.pkl, byte {position}: found no value on the stack or in the memo; expected one") from None
        except ValueError as error:
            raise ValueError(f"data.pkl, byte {position}: {error}") from None

    def push(self, value: object) -> None:
        self.stack.append(value)

    def pop(self, count: int) -> list:
        return [self.stack.pop() for _ in range(count)][::-1]

    def mark(self) -> None:
        self.outer_stacks.append(self.stack)
        self.stack = []

    def pop_to_mark(self) -> list:
        values, self.stack = self.stack, self.outer_stacks.pop()
        return values

    def memoize(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def push_global(self, *parts: object) -> None:
        name = ".".join(part if isinstance(part, str) else f"<{kind_of(part)}>" for part in parts)
        if name not in GLOBALS:
            raise ValueError(f"refused: global {name!r}, which a file of plain tensors does without; {ADVICE}")
        self.push(Global(name))

    def push_storage(self, persistent_id: object) -> None:
        match persistent_id:
            case ("storage", Global(name), str(key), _, int(elements)) if name in STORAGE_DTYPES and key.isdecimal():
                self.push(Storage(STORAGE_DTYPES[name], key, elements))
            case _:
                raise ValueError("refused: persistent id; expected ('storage', type, decimal key, device, number of elements)")

    def call(self, function: object, arguments: object) -> None:
        match function, arguments:
            case Global("collections.OrderedDict"), ():
                self.push({})
            case Global("torch._utils._rebuild_parameter"), (TorchTensor() as tensor, bool(), dict()):
                self.push(tensor)
            case (
                Global("torch._utils._rebuild_tensor_v2"),
                (Storage() as storage, int(offset), tuple() as shape, tuple() as strides, bool(), dict()),
            ) if all(type(number) is int for number in shape + strides):
                self.push(TorchTensor(storage, offset, shape, strides))
            case _:
                name = function.name if isinstance(function, Global) else kind_of(function)
                raise ValueError(f"refused: call of {name} with arguments that torch doesn't write for a plain tensor; {ADVICE}")

    def append(self, values: list) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError(f"found values appended to {kind_of(self.stack[-1])}; expected a list")
        self.stack[-1].extend(values)

    def set_items(self, keys_and_values: list) -> None:
        items = self.stack[-1]
        if not isinstance(items, dict) or len(keys_and_values) % 2:
            raise ValueError(f"found {len(keys_and_values)} keys and values for {kind_of(items)}; expected pairs for a dict")
        for key, value in zip(keys_and_values[::2], keys_and_values[1::2], strict=True):
            if not isinstance(key, str):  # no other hash is taken: a nested tuple's, shared at each level, would take forever
                raise ValueError(f"found {kind_of(key)} as key of a dict; expected the name of a tensor")
            if key in items:
                raise ValueError(f"found the name {key!r} twice in a dict; expected it once")
            items[key] = value

    def set_attributes(self, attributes: object) -> None:
        """Does nothing: torch.nn.Module.state_dict leaves version numbers in `_metadata`, and they say nothing of the tensors."""
        target = self.stack[-1]
        if not (isinstance(target, dict) and isinstance(attributes, dict) and attributes.keys() <= {"_metadata"}):
            raise ValueError(f"refused: attributes of {kind_of(target)}; expected none but _metadata of an OrderedDict; {ADVICE}")


OPERATIONS: dict[str, Callable[[PickleMachine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda machine, _: None),
    **dict.fromkeys(("NONE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), PickleMachine.push),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE"), PickleMachine.push),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), PickleMachine.memoize),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda machine, index: machine.push(machine.memo[index])),
    "MEMOIZE": lambda machine, _: machine.memoize(len(machine.memo)),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "MARK": lambda machine, _: machine.mark(),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "TUPLE1": lambda machine, _: machine.push(tuple(machine.pop(1))),
    "TUPLE2": lambda machine, _: machine.push(tuple(machine.pop(2))),
    "TUPLE3": lambda machine, _: machine.push(tuple(machine.pop(3))),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_to_mark())),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "APPEND": lambda machine, _: machine.append(machine.pop(1)),
    "APPENDS": lambda machine, _: machine.append(machine.pop_to_mark()),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "SETITEM": lambda machine, _: machine.set_items(machine.pop(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_to_mark()),
    "GLOBAL": lambda machine, name: machine.push_global(*name.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: machine.push_global(*machine.pop(2)),
    "BINPERSID": lambda machine, _: machine.push_storage(*machine.pop(1)),
    "REDUCE": lambda machine, _: machine.call(*machine.pop(2)),
    "BUILD": lambda machine, _: machine.set_attributes(*machine.pop(1)),
}


def kind_of(value: object) -> str:
    """The value's type, for messages. Never its content: a small pickle may share parts until its text is endless."""
    return type(value).__name__


MAX_PICKLE_BYTES = 16 << 20  # some 100,000 tensors; the machine may take 80 times as much memory as a hostile pickle has bytes
LEGACY_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # how a file of torch before 1.6 begins, after the pickle protocol's two bytes
HEADER = struct.Struct("<26xHH")
"""Precedes an entry's values. It ends with the lengths of a name and of extra data, which follow it."""


@contextmanager
def errors_of(name: str) -> Iterator[None]:
    """Errors of reading an entry become a ValueError."""
    try:
        yield
    except (zipfile.BadZipFile, EOFError, OSError, RuntimeError) as error:  # OSError: before the start; RuntimeError: encrypted
        raise ValueError(f"found entry {name} damaged ({error}); expected it whole: get the file again or {ADVICE}") from None


class Archive:
    """The zip file around pickle and storages. `sizes`: bytes of each entry, which must lie in it once, whole and uncompressed."""

    def __init__(self, path: Path):
        try:
            self._zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            with path.open("rb") as file:
                found = "torch's format before 1.6" if LEGACY_MAGIC in file.read(64) else f"no whole zip archive ({error})"
            raise ValueError(f"found {found}; expected a file of torch.save: get it again or {ADVICE}") from None
        try:
            self._folder = self._checked_folder(path.stat().st_size)
        except ValueError:
            self.close()
            raise
        self.sizes = {entry.filename.removeprefix(self._folder): entry.file_size for entry in self._zip.infolist()}
        self._bytes = np.memmap(path, np.uint8, "r")

    def _checked_folder(self, file_size: int) -> str:
        """NAME/, which precedes the name of each entry."""
        for entry in self._zip.infolist():
            if entry.compress_type != zipfile.ZIP_STORED or not entry.file_size == entry.compress_size <= file_size:
                raise ValueError(f"refused: entry {entry.filename!r} is compressed; expected all stored plainly; {ADVICE}")
        names = self._zip.namelist()
        if len(set(names)) != len(names):
            raise ValueError(f"found {len(names)} entries with {len(set(names))} names; expected each name once; {ADVICE}")
        pickles = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError(f"found {len(pickles)} entries NAME/data.pkl; expected one, as torch.save writes; {ADVICE}")
        return pickles[0].removesuffix("data.pkl")

    def read(self, name: str) -> bytes:
        """The entry's bytes. Raises ValueError if they can't be read whole or have another checksum than the archive says."""
        with errors_of(name):
            return self._zip.read(self._folder + name)

    def mapped(self, name: str) -> np.ndarray:
        """The entry's bytes as a view of the mapped file, uint8. Raises as `read`."""
        with errors_of(name):
            entry = self._zip.getinfo(self._folder + name)
            self._zip.open(entry).close()  # checks its header
            begins = entry.header_offset + HEADER.size + sum(HEADER.unpack_from(self._bytes, entry.header_offset))
            found = self._bytes[begins : begins + entry.file_size]
            if len(found) < entry.file_size or zlib.crc32(found) != entry.CRC:
                raise zipfile.BadZipFile(f"Bad CRC-32 for file {entry.filename!r}")
            return found

    def close(self) -> None:
        self._zip.close()

    def saved_object(self) -> object:
        """The saved object, as `PickleMachine` builds it."""
        if "byteorder" in self.sizes and (order := self.read("byteorder")) != b"little":
            raise ValueError(f"found byte order {order[:16]!r}; expected little; {ADVICE}")
        if self.sizes["data.pkl"] > MAX_PICKLE_BYTES:
            raise ValueError(f"found {self.sizes['data.pkl']} bytes of data.pkl; expected at most {MAX_PICKLE_BYTES}; {ADVICE}")
        return PickleMachine().run(self.read("data.pkl"))

    def checked_tensor(self, value: object) -> TorchTensor:
        """The value, if it is a tensor whose values are in the archive. Raises ValueError otherwise."""
        if not isinstance(value, TorchTensor):
            raise ValueError(f"found {kind_of(value)}; expected a tensor: save the state dict alone, without anything around it")
        storage, size = value.storage, self.sizes.get(f"data/{value.storage.key}")
        if size != storage.elements * storage.dtype.itemsize:
            raise ValueError(f"found {size} bytes in entry data/{storage.key}; expected {storage.elements} of {storage.dtype}")
        if not value.is_inside_storage():
            shape, strides = (short(each[: MAX_DIMENSIONS + 1]) for each in (value.shape, value.strides))
            found = f"offset {value.offset}, shape {shape}, strides {strides} in {storage.elements} elements"
            raise ValueError(f"found {found}; expected a tensor inside its storage and no larger than it")
        return value

    def values(self, tensor: TorchTensor) -> np.ndarray:
        """The values of a checked tensor."""
        return tensor.values(self.mapped(f"data/{tensor.storage.key}"))


class TorchFile:
    """A state dict that torch.save wrote, as a `TensorFile`. Reading a tensor checks all of the storage it may share with others;
    the values are mapped.

    Raises ValueError, naming file and tensor, if the file isn't whole, isn't torch's, or holds more than plain tensors by name.
    """

    def __init__(self, path: Path):
        self.path = path
        with errors_named(path):
            self._archive = Archive(path)
            try:
                self._tensors = self._checked_tensors(self._archive.saved_object())
            except ValueError:
                self.close()
                raise
        self.infos = {name: TensorInfo(tensor.storage.dtype, tensor.shape) for name, tensor in self._tensors.items()}

    def _checked_tensors(self, saved: object) -> dict[str, TorchTensor]:
        if not isinstance(saved, dict):
            raise ValueError(f"found {kind_of(saved)}; expected a state dict: tensors by name")
        tensors = {}
        for name, value in saved.items():
            with errors_named(f"tensor {name!r}"):
                tensors[name] = self._archive.checked_tensor(value)
        return tensors

    def read(self, name: str) -> np.ndarray:
        with errors_named(f"{self.path}: tensor {name!r}"):
            if name not in self._tensors:
                raise ValueError(f"found no such name; expected one of {list(self._tensors)}")
            return self._archive.values(self._tensors[name])

    def close(self) -> None:
        self._archive.close()


def read_torch_list(path: Path) -> list[object]:
    """The list, or the 1-D tensor as a list, that torch.save wrote alone. Raises ValueError, naming the file, for anything else."""
    with errors_named(path), closing(Archive(path)) as archive:
        match archive.saved_object():
            case list() as items:
                return items
            case TorchTensor(shape=(_,)) as tensor:
                return archive.values(archive.checked_tensor(tensor)).tolist()
            case other:
                raise ValueError(f"found {kind_of(other)}; expected a list or a 1-D tensor, saved alone")
