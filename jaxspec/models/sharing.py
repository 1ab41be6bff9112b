"""How devices share a model's layers: which parameters they divide, along which axis, and the part that each of them holds.

Inside a program each device has a smaller model: fewer heads, a narrower feed-forward, some rows of the vocabulary.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jaxspec.host_memory import aligned_empty
from jaxspec.model_config import ModelConfig
from pallas_kernels.quantized import InBlocks, QuantizedAs
from pallas_kernels.rows import AsInFile
from pallas_kernels.weight import ANYWHERE, Grain

MESH_AXIS = "devices"
"""The name of the axis along which devices stand."""


class Axis(NamedTuple):
    """The axis of a matrix that devices divide."""

    name: str
    """qkv: [queries | keys | values]; heads: query heads; kv_heads: those of keys and values; gate_up: [gate | up]; ffn, vocab and
    columns: a single part."""
    is_input: bool = False
    """It holds the products' inputs, so their sums run over devices too. False: their outputs."""


AXES: Mapping[str, Axis] = {
    "qkv_proj": Axis("qkv"),
    "o_proj": Axis("heads", is_input=True),
    "gate_up_proj": Axis("gate_up"),
    "down_proj": Axis("ffn", is_input=True),
    "lm_head": Axis("vocab"),
    "fc": Axis("columns"),
    "input_proj": Axis("columns"),
    "embed_tokens": Axis("vocab"),
    "k_scale": Axis("kv_heads"),
    "v_scale": Axis("kv_heads"),
}
"""By the name of a layer, or of a parameter outside of layers. All others are whole on every device."""
GATHERED = frozenset({"vocab", "columns"})
"""Axes of outputs whose parts are put together at once, because what follows reads the whole output."""
OF_ATTENTION = frozenset({"qkv", "heads", "kv_heads"})
KERNEL, BIAS = "kernel", "bias"
"""The names of a dense matrix [inputs, outputs] and of a bias. All other arrays of a layer have its outputs as their first axis."""
BESIDE = re.compile(r"weights_(\d+)_")
"""The prefix of the names of arrays that belong to one of several weights (pallas_kernels.rows.Beside)."""


def axis_of(keys: Sequence[str | int]) -> Axis | None:
    """The axis of a parameter; None: it is whole.

    In:  ("layers", 0, "mlp", "down_proj", "kernel")
    Out: Axis("ffn", is_input=True)
    """
    return next((AXES[name] for name in map(str, keys[-2:]) if name in AXES), None)


@dataclass(frozen=True)
class Shares:
    """How `devices` share the layers of a model. Attention is whole on each if its heads can't be divided evenly."""

    config: ModelConfig
    devices: int

    @cached_property
    def grain(self) -> Grain:
        """The block of numbers that no cut may split, the same for all of the model's matrices."""
        storages = [self.config.storage, *(storage for _, storage in self.config.storages)]
        grains = [each.grain if isinstance(each, QuantizedAs | InBlocks | AsInFile) else ANYWHERE for each in storages]
        return Grain(*(math.lcm(*sizes) for sizes in zip(*grains, strict=True)))

    @cached_property
    def splits_heads(self) -> bool:
        """False: every device has all heads. KV heads are repeated where there are fewer than devices."""
        heads, kv_heads, size = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        if heads % self.devices or (kv_heads % self.devices and self.devices % kv_heads):
            return False
        own = max(1, kv_heads // self.devices) * size
        return heads // self.devices * size % self.grain.inputs == 0 == own % self.grain.outputs

    @property
    def heads(self) -> int:
        """Query heads of one device."""
        return self.config.num_heads // self.devices if self.splits_heads else self.config.num_heads

    @property
    def kv_heads(self) -> int:
        """Key and value heads of one device."""
        return max(1, self.config.num_kv_heads // self.devices) if self.splits_heads else self.config.num_kv_heads

    def divides(self, axis: Axis) -> bool:
        """Whether each device has only a part of the axis."""
        return self.devices > 1 and (axis.name not in OF_ATTENTION or self.splits_heads)

    def starts(self, axis: str, size: int) -> tuple[int, ...]:
        """Where each part of the axis begins: queries, keys and values; gate and up; or a single part."""
        if axis == "qkv":
            queries, pairs = self.config.num_heads, self.config.num_kv_heads
            return 0, queries * self.config.head_dim, (queries + pairs) * self.config.head_dim
        return (0, size // 2) if axis == "gate_up" else (0,)

    def slices(self, axis: str, device: int, size: int) -> tuple[slice, ...]:
        """The stretches of an axis of this size that a device holds, one from each part (`starts`). A stretch shorter than its
        `room` is padded with zeros.

        In:  "gate_up", device 1 of 2, size 12: gate 0-5, up 6-11
        Out: 3-5 and 9-11
        In:  "qkv", device 1 of 4, heads of one number, 4 of q (0-3), 2 of k (4, 5) and 2 of v (6, 7)
        Out: 1, 4 and 6
        """
        starts, rooms = self.starts(axis, size), self.room(axis, size)
        if axis in OF_ATTENTION:
            number = 1 if axis == "kv_heads" else self.config.head_dim
            first = device * self.heads if self.splits_heads else 0
            pair = device * self.config.num_kv_heads // self.devices if self.splits_heads else 0
            own = {"qkv": (first, pair, pair), "heads": (first,), "kv_heads": (pair,)}[axis]
            begins = [start + head * number for start, head in zip(starts, own, strict=True)]
            return tuple(slice(begin, begin + room) for begin, room in zip(begins, rooms, strict=True))
        part, room = size // len(starts), rooms[0]
        ends = min(device * room, part), min((device + 1) * room, part)
        return tuple(slice(*(start + end for end in ends)) for start in starts)

    def room(self, axis: str, size: int) -> tuple[int, ...]:
        """The room for each of the `slices`, the same on all devices."""
        if axis in OF_ATTENTION:
            heads, pairs, number = self.heads, self.kv_heads, self.config.head_dim
            return {"qkv": (heads * number, pairs * number, pairs * number), "heads": (heads * number,), "kv_heads": (pairs,)}[axis]
        parts = len(self.starts(axis, size))
        grain = math.lcm(*self.grain) if axis in ("gate_up", "ffn") else self.grain.outputs
        return (-(-(size // parts) // (self.devices * grain)) * grain,) * parts

    def width(self, axis: str, size: int) -> int:
        """Size of the axis on one device, padding included."""
        return sum(self.room(axis, size))

    def input_size(self, axis: Axis) -> int:
        """The size of an axis of inputs, which some storages can't tell."""
        return self.config.num_heads * self.config.head_dim if axis.name == "heads" else self.config.intermediate_size


class Division(NamedTuple):
    """How one array of a layer is divided: a dimension in stretches, each with its room."""

    dimension: int
    stretches: tuple[tuple[slice, ...], ...]
    """For each device, in indices of this array."""
    rooms: tuple[int, ...]

    @property
    def width(self) -> int:
        """The size of the dimension on one device."""
        return sum(self.rooms)

    def of(self, array: Any, device: int, dtype: np.dtype) -> np.ndarray:
        """The device's part of the array, in this dtype. The array may be a view of a file, or have a method `copy_to`
        (checkpoints.layout.Stacked): only that part is read."""
        shape = [self.width if place == self.dimension else size for place, size in enumerate(array.shape)]
        out, begin, before = aligned_empty(tuple(shape), dtype), 0, (slice(None),) * self.dimension
        for stretch, room in zip(self.stretches[device], self.rooms, strict=True):
            end = begin + stretch.stop - stretch.start
            if isinstance(array, np.ndarray):
                out[*before, begin:end] = array[*before, stretch]
            else:
                array.copy_to(out[*before, begin:end], (*before, stretch))
            out[*before, end : begin + room] = 0
            begin += room
        return out


def parts_of(arrays: Mapping[str, Any], axis: Axis, shares: Shares) -> dict[str, Division]:
    """How the arrays of one layer (linear.parameters, and `bias`) are divided, by name. Arrays that are left out are whole.

    In:  {"kernel": [8, 12], "bias": [12]}, Axis("gate_up"), two devices
    Out: {"kernel": dimension 1, 0-2 and 6-8 | 3-5 and 9-11, "bias": dimension 0, the same}
    """
    dimensions = {name: int((name == KERNEL) != axis.is_input) for name in arrays}  # other matrices are transposed
    if axis.is_input:
        divided = {name: array for name, array in arrays.items() if array.ndim == 2}
        numbers = dict.fromkeys(divided, range(shares.input_size(axis)))
    else:
        divided, numbers = dict(arrays), _outputs(arrays, dimensions)
    size = max(each.stop for each in numbers.values())
    return {
        name: _part(axis, shares, size, numbers[name], dimensions[name], array.shape[dimensions[name]])
        for name, array in divided.items()
    }


def _outputs(arrays: Mapping[str, Any], dimensions: Mapping[str, int]) -> dict[str, range]:
    """The outputs that each array belongs to: all, but for the weights of a Beside."""
    weights = [name for name in arrays if name != BIAS] or [BIAS]
    places = {name: int(found[1]) if (found := BESIDE.match(name)) else 0 for name in weights}
    sizes = [
        max(arrays[name].shape[dimensions[name]] for name, at in places.items() if at == place)
        for place in sorted(set(places.values()))
    ]
    ends = list(itertools.accumulate(sizes, initial=0))
    return {name: range(ends[places[name]], ends[places[name] + 1]) if name in places else range(ends[-1]) for name in arrays}


def _part(axis: Axis, shares: Shares, size: int, numbers: range, dimension: int, length: int) -> Division:
    """How a dimension of this length is divided. It covers these `numbers` of an axis of this size, singly or in blocks."""

    def scaled(number: int) -> int:
        return number * length // len(numbers)

    inside = [start in numbers for start in shares.starts(axis.name, size)]
    stretches = tuple(
        tuple(
            slice(scaled(each.start - numbers.start), scaled(each.stop - numbers.start))
            for each in itertools.compress(shares.slices(axis.name, device, size), inside)
        )
        for device in range(shares.devices)
    )
    return Division(dimension, stretches, tuple(map(scaled, itertools.compress(shares.room(axis.name, size), inside))))
