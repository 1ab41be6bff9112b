"""Where arrays lie: what each of several devices holds of a model's parameters, and how programs run on them.

This is the only place in serving that knows devices and shardings. A program runs whole on every device, under one `shard_map`:
inside it a model is a smaller model, kernels see local arrays, and the few sums between devices stand where products are
finished (Product.axis). One device is a placement like any other.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxspec.config import ModelConfig
from jaxspec.models.linear import MESH_AXIS


class Axis(NamedTuple):
    """A dimension of a parameter that is split between devices."""

    name: str
    """heads: query heads; qkv: [queries | keys | values]; gate_up: [gate | up]; ffn, vocab and columns: any numbers alike."""
    dimension: int


AXES: Mapping[tuple[str, ...], Axis] = {
    ("qkv_proj", "kernel"): Axis("qkv", 1),
    ("qkv_proj", "bias"): Axis("qkv", 0),
    ("o_proj", "kernel"): Axis("heads", 0),
    ("gate_up_proj", "kernel"): Axis("gate_up", 1),
    ("down_proj", "kernel"): Axis("ffn", 0),
    ("lm_head", "kernel"): Axis("vocab", 1),
    ("fc", "kernel"): Axis("columns", 1),
    ("fc", "bias"): Axis("columns", 0),
    ("input_proj", "kernel"): Axis("columns", 1),
    ("embed_tokens",): Axis("vocab", 0),
}
"""By the last keys of a parameter. All others are whole on every device."""


def axis_of(keys: Sequence[str | int]) -> Axis | None:
    """The axis of a parameter; None: it is whole.

    In:  ("layers", 0, "mlp", "down_proj", "kernel")
    Out: Axis("ffn", 0)
    """
    return AXES.get(tuple(map(str, keys[-2:]))) or AXES.get(tuple(map(str, keys[-1:])))


@dataclass(frozen=True)
class Shares:
    """How `tp` devices share a model's layers. Attention is whole on each if its heads can't be divided evenly."""

    config: ModelConfig
    tp: int

    @property
    def splits_heads(self) -> bool:
        """False: every device has all heads. KV heads are repeated where there are fewer than devices."""
        kv_heads = self.config.num_kv_heads
        return self.config.num_heads % self.tp == 0 and (kv_heads % self.tp == 0 or self.tp % kv_heads == 0)

    @property
    def heads(self) -> int:
        """Query heads of one device."""
        return self.config.num_heads // self.tp if self.splits_heads else self.config.num_heads

    @property
    def kv_heads(self) -> int:
        """Key and value heads of one device."""
        return max(1, self.config.num_kv_heads // self.tp) if self.splits_heads else self.config.num_kv_heads

    def slices(self, axis: str, device: int, size: int) -> tuple[slice, ...]:
        """The stretches that a device holds of a dimension of this size, in order. Zeros follow stretches of padded axes that are
        shorter than their part of `width`.

        In:  "gate_up", device 1 of 2, size 12: gate 0-5, up 6-11
        Out: 3-5 and 9-11
        In:  "qkv", device 1 of 4, heads of one number, 4 of q (0-3), 2 of k (4, 5) and 2 of v (6, 7)
        Out: 1, 4 and 6
        """
        if axis in ("qkv", "heads") and not self.splits_heads:
            return (slice(0, size),)
        if axis == "heads":
            return self._of_heads((device * self.heads, self.heads))
        if axis == "qkv":
            queries, pairs = self.config.num_heads, self.config.num_kv_heads
            first = device * pairs // self.tp
            return self._of_heads(
                (device * self.heads, self.heads), (queries + first, self.kv_heads), (queries + pairs + first, self.kv_heads)
            )
        part = size // 2 if axis == "gate_up" else size
        share = -(-part // self.tp)
        ends = min(device * share, part), min((device + 1) * share, part)
        return tuple(slice(*(start + end for end in ends)) for start in range(0, size, part))

    def width(self, axis: str, size: int) -> int:
        """Size of the dimension on one device, padding included."""
        if axis in ("qkv", "heads"):
            return sum(each.stop - each.start for each in self.slices(axis, 0, size))
        return 2 * -(-(size // 2) // self.tp) if axis == "gate_up" else -(-size // self.tp)

    def _of_heads(self, *stretches: tuple[int, int]) -> tuple[slice, ...]:
        """Stretches of heads, (first, count), as stretches of numbers."""
        size = self.config.head_dim
        return tuple(slice(first * size, (first + count) * size) for first, count in stretches)


GPU_COMPILER_OPTIONS = {"xla_gpu_enable_cub_radix_sort": False}
"""XLA would replace sorts of whole vocabularies by calls to CUB, which can't be part of its CUDA graphs: the graph would be cut,
and the host would wait for the device in every cycle. `jaxspec plan` compiles with the same options."""
UNTIMED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
"""For programs that are compiled beside a cache and running requests. Timing would take memory that these need, and time them,
too. Products are then cuBLAS's, which has its own rules to choose by; Triton's would get tiles that fit nothing."""
SPLITTABLE = frozenset({"gate_up", "ffn"})
"""The axes that modules can share today; they are shared together."""


@dataclass(frozen=True)
class Placement:
    """The devices that run programs, by their numbers among JAX's, and the axes of parameters that they share."""

    devices: tuple[int, ...] = (0,)
    split: frozenset[str] = frozenset()

    def __post_init__(self):
        if self.split not in (frozenset(), SPLITTABLE):
            raise ValueError(f"devices can share {' and '.join(sorted(SPLITTABLE))} together, or nothing; got {sorted(self.split)}")

    @cached_property
    def device(self) -> jax.Device:
        """The first one of this process, which speaks for all."""
        return next(each for each in self.mesh.devices if each.process_index == jax.process_index())

    @property
    def mesh(self) -> Mesh:
        return Mesh(np.array([jax.devices()[number] for number in self.devices]), (MESH_AXIS,))

    @cached_property
    def whole(self) -> Sharding:
        """Of arrays that every device has."""
        return SingleDeviceSharding(self.device) if len(self.devices) == 1 else NamedSharding(self.mesh, PartitionSpec())

    @cached_property
    def spans_processes(self) -> bool:
        """Whether other processes have some of the devices."""
        return any(each.process_index != jax.process_index() for each in self.mesh.devices)

    def put(self, values: Any) -> Any:
        """These arrays, whole on every device. Every process puts the same."""
        if not self.spans_processes:
            return jax.device_put(values, self.whole)
        return jax.tree.map(partial(self._placed, sharding=self.whole), values)

    def _placed(self, values: Any, sharding: Sharding) -> Any:
        if not self.spans_processes:
            return jax.device_put(values, sharding)
        array = np.asarray(values)  # device_put would compare what the processes have, by a collective: 1.3 ms instead of 15 us
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def make(self, make: Callable[[], Any]) -> Any:
        """The arrays that it returns, whole on every device."""
        return jax.jit(make, out_shardings=self.whole)() if self.spans_processes else self.put(make())

    def abstract(self, make: Callable[[], Any]) -> Any:
        """The shapes of what it returns, whole on every device; nothing is allocated."""

        def placed(each: Any) -> Any:
            return jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=self.whole)

        return jax.tree.map(placed, jax.eval_shape(make))

    def nbytes(self, arrays: Any) -> int:
        """Bytes of these arrays on one device."""
        sizes = (math.prod(each.sharding.shard_shape(each.shape)) * each.dtype.itemsize for each in jax.tree.leaves(arrays))
        return sum(sizes)

    def weights(self, params: Any, config: ModelConfig) -> Any:
        """The parameters of a model with these sizes, each device with its part of those that are shared."""
        shares = Shares(config, len(self.devices))

        def placed(path: tuple, array: Any) -> jax.Array:
            axis = axis_of([getattr(key, "key", key) for key in path])
            if axis is None or axis.name not in self.split:
                return self.put(array)
            shared = NamedSharding(self.mesh, PartitionSpec(*(None,) * axis.dimension, MESH_AXIS))
            return self._placed(self._parts_in_order(np.asarray(array), axis, shares), shared)

        return jax.tree.map_with_path(placed, params)

    def _parts_in_order(self, array: np.ndarray, axis: Axis, shares: Shares) -> np.ndarray:
        """The array with the part of the first device in front, then that of the second, each padded to its width."""
        size = array.shape[axis.dimension]
        moved, parts = np.moveaxis(array, axis.dimension, 0), []
        for device in range(shares.tp):
            stretches = shares.slices(axis.name, device, size)
            room = shares.width(axis.name, size) // len(stretches)
            for each in stretches:
                padding = [(0, room - (each.stop - each.start)), *[(0, 0)] * (array.ndim - 1)]
                parts.append(np.pad(moved[each], padding))
        return np.moveaxis(np.concatenate(parts), 0, axis.dimension)

    def program(self, function: Callable[..., Any], weights: Any) -> Callable[..., Any]:
        """The function, run by every device on its part of the weights. Its other arguments and results are whole everywhere."""
        if len(self.devices) == 1:
            return function
        specs, whole = jax.tree.map(lambda array: array.sharding.spec, weights), PartitionSpec()

        def everywhere(params: Any, *others: Any) -> Any:
            inputs = (specs, *(whole,) * len(others))
            # Every device computes the same from the sums: nothing has to be proved.
            run = jax.shard_map(function, mesh=self.mesh, in_specs=inputs, out_specs=whole, check_vma=False)
            return run(params, *others)

        return everywhere

    def compiler_options(self, *, timed: bool = True) -> dict[str, Any] | None:
        """XLA's options for programs here. `timed`: it may try its choices on the device."""
        if jax.default_backend() != "gpu":
            return None
        return GPU_COMPILER_OPTIONS if timed else GPU_COMPILER_OPTIONS | UNTIMED


ONE_DEVICE = Placement()
