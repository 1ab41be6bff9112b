"""The pickle inside PyTorch's files, read without running it.

A pickle is a program for a stack machine that may import and call anything, so none is run here. `pickletools.genops` splits it
into opcodes, which is parsing only; `PickleMachine` knows the few that torch writes, and what they name stays a name. A tensor is
a call: `_rebuild_tensor_v2(storage, offset, shape, strides, requires_grad, hooks)`.
"""

import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

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
        """Whether all values lie in the storage. No tensor may be larger than it either: repeated bytes could claim terabytes."""
        if len(self.shape) != len(self.strides) or len(self.shape) > MAX_DIMENSIONS:
            return False
        if min(self.storage.elements, self.offset, *self.shape, *self.strides) < 0:
            return False
        if 0 in self.shape:
            return self.offset <= self.storage.elements and math.prod(length or 1 for length in self.shape) <= MAX_EMPTY_SHAPE
        last = self.offset + sum((length - 1) * stride for length, stride in zip(self.shape, self.strides, strict=True))
        return last < self.storage.elements and math.prod(self.shape) <= self.storage.elements

    def values(self, storage_bytes: bytes) -> np.ndarray:
        """The tensor's values in C order, copied out of its storage's."""
        dtype = self.storage.dtype
        if 0 in self.shape:
            return np.empty(self.shape, dtype)
        # Nothing steps along a dimension of length 1, so its stride is free, and may be too large for NumPy.
        strides = [stride * dtype.itemsize if length > 1 else 0 for length, stride in zip(self.shape, self.strides, strict=True)]
        return np.ndarray(self.shape, dtype, storage_bytes, self.offset * dtype.itemsize, strides).copy()


class PickleMachine:
    """A pickle's stack machine that builds plain data, storages and tensors only: dicts, lists, tuples, strings, numbers, None."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.outer_stacks: list[list[Any]] = []  # what lies below each open mark
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
