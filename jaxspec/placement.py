"""Where arrays lie: what each of several devices holds of a model's parameters, and how programs run on them.

This is the only place in serving that knows devices and shardings. A program runs whole on every device, under one `shard_map`:
inside it a model is a smaller model, kernels see local arrays, and the few sums between devices stand where products are
finished (Product.axis). One device is a placement like any other.
"""

import math
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxspec.host_memory import own_copy
from jaxspec.model_config import ModelConfig
from jaxspec.models.sharing import MESH_AXIS, Division, Shares, axis_of, parts_of
from jaxspec.typing import KeysValues

type Keys = tuple[str | int, ...]
BY_HEADS = PartitionSpec(None, None, MESH_AXIS)
"""How devices share keys and values [pages, page, kv_heads, head_dim] and [b, s, kv_heads, head_dim]."""
GPU_COMPILER_OPTIONS = {"xla_gpu_enable_cub_radix_sort": False}
"""XLA would replace sorts of whole vocabularies by calls to CUB, which can't be part of its CUDA graphs: the graph would be cut,
and the host would wait for the device in every cycle. `jaxspec plan` compiles with the same options."""
IN_ONE_GRAPH = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,COLLECTIVES,CONDITIONAL,DYNAMIC_SLICE_FUSION"
}
"""What CUDA graphs may contain: XLA's default, and sums between devices. Without these every sum would end a graph, 26 in a cycle
of 8 layers. (A list replaces the default; XLA_FLAGS also takes +COLLECTIVES, but options of one program don't.)"""
UNTIMED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
"""For programs that are compiled while a cache is allocated and requests run. Timing would take memory that these need, and time
them, too. cuBLAS then computes products, as it has rules of its own to choose by; Triton's would get tiles that fit nothing."""


def available_devices() -> list[jax.Device]:
    """JAX's devices, of all processes. Raises ValueError if it finds none, such as for another platform in JAX_PLATFORMS."""
    try:
        with _signals_held():
            return jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that a platform that it knows is there
        reason = " ".join(str(error).split())[:500] or "no such platform is here"
        raise ValueError(
            f"JAX finds no devices: {reason} (JAX_PLATFORMS is {jax.config.jax_platforms!r:.80}; unset, JAX takes what is here)"
        ) from None


@contextmanager
def _signals_held() -> Iterator[None]:
    """Delays Python's signal handlers until the end, because JAX drops whatever they raise while it loads its plugins."""
    came: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()  # no other one may set handlers
    known = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2) if is_main}
    handlers = {number: handler for number, handler in known.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


@dataclass(frozen=True)
class Placement:
    """The devices that share a model, by their numbers among JAX's."""

    devices: tuple[int, ...] = (0,)

    @classmethod
    def of(cls, tp_size: int) -> "Placement":
        """The first devices; in a group of processes, as many of each. Raises ValueError if there are fewer."""
        processes = jax.process_count()
        if processes > 1:
            each, rest = divmod(tp_size, processes)
            own = [[n for n, one in enumerate(jax.devices()) if one.process_index == rank] for rank in range(processes)]
            if rest or any(len(numbers) < each for numbers in own):
                raise ValueError(
                    f"tp_size={tp_size} needs as many devices of each of {processes} hosts, and they have {[*map(len, own)]}"
                )
            return cls(tuple(number for numbers in own for number in numbers[:each]))
        found = jax.device_count()
        if found < tp_size:
            virtual = f"; JAX_NUM_CPU_DEVICES={tp_size} makes virtual ones to try it with, which are no faster"
            on_cpu = jax.default_backend() == "cpu"
            raise ValueError(f"tp_size={tp_size} needs {tp_size} devices, and JAX finds {found}{virtual if on_cpu else ''}")
        return cls(tuple(range(tp_size)))

    @property
    def device(self) -> jax.Device:
        """The first one of this process, which speaks for all."""
        own = (jax.devices()[number] for number in self.devices)
        return next(each for each in own if each.process_index == jax.process_index())

    @property
    def mesh(self) -> Mesh:
        return Mesh(np.array([jax.devices()[number] for number in self.devices]), (MESH_AXIS,))

    @cached_property
    def whole(self) -> Sharding:
        """The sharding of arrays that every device has whole."""
        return SingleDeviceSharding(self.device) if len(self.devices) == 1 else NamedSharding(self.mesh, PartitionSpec())

    @cached_property
    def spans_processes(self) -> bool:
        """Whether other processes have some of the devices."""
        return any(each.process_index != jax.process_index() for each in self.mesh.devices)

    def put(self, values: Any) -> Any:
        """These arrays, whole on every device. Every process puts the same."""
        if not self.spans_processes:
            return jax.device_put(values, self.whole)

        def everywhere(each: Any) -> jax.Array:
            array = np.asarray(each)  # device_put would compare what the processes have, by a collective: 1.3 ms instead of 15 us
            return jax.make_array_from_callback(array.shape, self.whole, lambda index: array[index])

        return jax.tree.map(everywhere, values)

    def new(self, make: Callable[[], Any]) -> Any:
        """The arrays that it makes, each device its part of keys and values."""
        if len(self.devices) == 1:
            return self.put(make())
        return jax.jit(make, out_shardings=jax.tree.map(lambda each: each.sharding, self.abstract(make)))()

    def abstract(self, make: Callable[[], Any]) -> Any:
        """The shapes of what it makes, and where these arrays lie; nothing is allocated."""

        def placed(each: Any, spec: PartitionSpec) -> Any:
            here = self.whole if spec == PartitionSpec() else NamedSharding(self.mesh, spec)
            return jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=here)

        shapes = jax.eval_shape(make)
        return jax.tree.map(placed, shapes, self._specs(shapes))

    def nbytes(self, arrays: Any) -> int:
        """Bytes of these arrays on one device."""
        return sum(math.prod(each.sharding.shard_shape(each.shape)) * each.dtype.itemsize for each in jax.tree.leaves(arrays))

    def weights(self, params: Any, config: ModelConfig | None) -> Any:
        """The parameters of layers with these sizes, each device with its part of those that are shared. None: all are whole.

        Those that lie there already, as loading with this placement leaves them, stay. Abstract ones stay abstract.
        """
        if config is None or len(self.devices) == 1:
            return jax.tree.map(lambda array: self._parameter(array, None, array.dtype), params)
        return unflatten_dict(self.parameters(flatten_dict(params), config))

    def parameters(
        self, arrays: Mapping[Keys, Any], config: ModelConfig, shapes: Mapping[Keys, Any] | None = None
    ) -> dict[Keys, Any]:
        """Parameters by their keys, as `weights`, in the dtypes of these shapes; None: in their own.

        Arrays may be views of files, of which each process reads what its devices hold.
        """
        shares, placed = Shares(config, len(self.devices)), dict[Keys, Any]()
        for path, layer in layers_of(arrays).items():
            axis = axis_of(path)
            is_divided = axis is not None and shares.divides(axis)
            are_there = self._have(layer.values(), divided=is_divided)
            parts = parts_of(layer, axis, shares) if axis is not None and is_divided and not are_there else {}
            for name, array in layer.items():
                keys = (*path, name) if name else path
                dtype = array.dtype if shapes is None else shapes[keys].dtype
                placed[keys] = array if are_there else self._parameter(array, parts.get(name), dtype)
        return placed

    def _have(self, layer: Iterable[Any], *, divided: bool) -> bool:
        """Whether the arrays of a layer lie on the devices already, divided if they shall be."""
        shardings = [array.sharding if isinstance(array, jax.Array) else None for array in layer]
        own = [each.spec for each in shardings if isinstance(each, NamedSharding) and each.mesh == self.mesh]
        return len(own) == len(shardings) and (not divided or any(MESH_AXIS in spec for spec in own))

    def _parameter(self, array: Any, part: Division | None, dtype: Any) -> Any:
        """The array, with this part on each device; None: whole."""
        shape, here = list(array.shape), self.whole
        if part is not None:
            shape[part.dimension] = part.width * len(self.devices)
            here = NamedSharding(self.mesh, PartitionSpec(*(None,) * part.dimension, MESH_AXIS))
        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=here)
        if part is None and self.spans_processes:
            return self.put(np.asarray(array).astype(dtype))
        if part is None:
            return self.put(array if isinstance(array, jax.Array) else own_copy(np.asarray(array))).astype(dtype)
        values, own = np.asarray(array) if isinstance(array, jax.Array) else array, part

        def of_device(index: Any) -> np.ndarray:
            return own.of(values, (index[own.dimension].start or 0) // own.width, dtype)

        return jax.make_array_from_callback(tuple(shape), here, of_device)

    @staticmethod
    def _specs(arrays: Any) -> Any:
        """How devices share arrays other than weights: keys and values by their heads, nothing else."""

        def spec(each: Any) -> Any:
            return KeysValues(*(BY_HEADS,) * 2) if isinstance(each, KeysValues) else PartitionSpec()  # type: ignore[arg-type]

        return jax.tree.map(spec, arrays, is_leaf=lambda each: isinstance(each, KeysValues))

    def program(self, function: Callable[..., Any], weights: Any) -> Callable[..., Any]:
        """The function, run by every device on its part of weights, keys and values. All else is whole everywhere."""
        if len(self.devices) == 1:
            return function
        of_weights = jax.tree.map(lambda array: array.sharding.spec, weights)

        def everywhere(params: Any, *others: Any) -> Any:
            structure: Any = None

            def run(*arguments: Any) -> list[tuple[Any, ...]]:
                nonlocal structure  # it is known when the function was traced, too late to say how its results lie
                leaves, structure = jax.tree.flatten(function(*arguments), is_leaf=lambda each: isinstance(each, KeysValues))
                return [
                    tuple(leaf if isinstance(leaf, KeysValues) == divided else () for leaf in leaves) for divided in (True, False)
                ]

            inputs = (of_weights, *map(self._specs, others))
            # Every device computes the same from the sums: nothing has to be proved.
            mapped = jax.shard_map(run, mesh=self.mesh, in_specs=inputs, out_specs=[BY_HEADS, PartitionSpec()], check_vma=False)
            divided, whole = mapped(params, *others)
            return jax.tree.unflatten(
                structure, [each if each != () else other for each, other in zip(divided, whole, strict=True)]
            )

        return everywhere

    def compiler_options(self, *, timed: bool = True, platform: str | None = None) -> dict[str, Any] | None:
        """XLA's options for programs here. `timed`: it may try its choices on the device. `platform`: None: JAX's."""
        if (platform or jax.default_backend()) not in ("gpu", "cuda"):
            return None
        several = IN_ONE_GRAPH if len(self.devices) > 1 else {}
        return GPU_COMPILER_OPTIONS | several | ({} if timed else UNTIMED)


def layers_of(arrays: Mapping[Keys, Any]) -> dict[Keys, dict[str, Any]]:
    """Parameters by the path of their layer, and their names in it; one outside any layer stands alone.

    In:  {("mlp", "down_proj", "kernel"): w, ("embed_tokens",): e}
    Out: {("mlp", "down_proj"): {"kernel": w}, ("embed_tokens",): {"": e}}
    """
    layers: dict[Keys, dict[str, Any]] = {}
    for keys, array in arrays.items():
        length = len(keys) - (axis_of(keys[:-1]) is not None)
        layers.setdefault(keys[:length], {})[".".join(map(str, keys[length:]))] = array
    return layers


ONE_DEVICE = Placement()
