"""The cycles that the engine runs, with random weights and each kind of sampling."""

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from statistics import median
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxspec.decoding.cycle import cycle
from jaxspec.decoding.settings import SamplingKind
from jaxspec.engine.program_cache import CacheHits
from jaxspec.model_config import QUANTIZATIONS
from jaxspec.models.linear import DEFAULT_KERNELS, Kernels
from jaxspec.models.sharing import MESH_AXIS
from jaxspec.planner import estimate
from jaxspec.planner.gpus import GPUS, Gpu
from jaxspec.planner.time_model import time_model
from jaxspec.tree_shape import TreeShape
from pallas_kernels.dispatch import lowered_for

from .arrays import SAMPLING, batch_shapes, make_batch
from .lab import Cases, Lab, Skip

Cell = tuple[dict[str, Any], Callable[..., dict[str, Any]]]
GREEDY = ("greedy",)
GOAL_TREES = 4
"""The trees that `goals` times."""
BATCHES = (1, 4, 16, 64)
Options = Mapping[str, bool | int | str]
"""Of XLA's compiler."""
CHOICES = {
    "matmul skinny": Kernels(matmul="skinny"),
    "attention mosaic": Kernels(attention="mosaic"),
    "as it is": DEFAULT_KERNELS,
}
"""What could become the default: only whole cycles decide."""
EXCHANGES: Mapping[str, Options] = {
    "as it is": {},
    "collective kernels": {"xla_gpu_experimental_use_collective_kernels": "COLLECTIVE_KERNEL_ALL_REDUCE"},
    "symmetric buffers": {"xla_gpu_experimental_enable_nccl_symmetric_buffers": True},
    "user buffers": {"xla_gpu_enable_nccl_user_buffers": True},
    "latency hiding": {"xla_gpu_enable_latency_hiding_scheduler": True},
}
"""The same for how GPUs exchange sums."""
SUMS, IN_A_ROW = (1 << 13, 1 << 16, 1 << 20, 1 << 25), 64
"""Bytes of the sums that `exchanges` times alone, and how many of each follow one another."""


def build_cycle(
    lab: Lab, tree: TreeShape, batch: int, context: int, kernels: Kernels, options: Options
) -> tuple[jax.stages.Compiled, dict[str, Any]]:
    """The program that engine.programs.CycleProgram names, for these sizes; with the engine's options of the compiler and these.

    The columns are seconds for tracing and lowering, and for compiling (autotuning included).
    """
    merge = lab.merger(kernels)

    def cycle_program(params, state, rows, page_table):
        return cycle(merge(params), state, rows, page_table, tree=tree)

    chosen = os.environ.get("XLA_FLAGS", "")
    own = {name: value for name, value in (lab.placement.compiler_options() or {}).items() if name not in chosen}
    started = time.perf_counter()
    with CacheHits() as hits, lowered_for("cuda" if lab.on_gpu else "cpu"):
        arguments = (lab.parameter_shapes, *batch_shapes(lab, batch, context))
        lowered = jax.jit(lab.placement.program(cycle_program, arguments[0]), donate_argnums=1).lower(*arguments)
        traced = time.perf_counter()
        program = lowered.compile(compiler_options=own | dict(options))
        columns = {"trace_seconds": traced - started, "compile_seconds": time.perf_counter() - traced}
        return program, columns | {"found_in_cache": hits.in_this_thread > 0}


def goals(lab: Lab) -> Cases:
    """Whole cycles at batch 1 and the context that the goals are set for. All kinds of sampling are in one program."""
    return cells(lab, lab.size.trees[:GOAL_TREES], list(SAMPLING), [(1, lab.size.context)])


def choices(lab: Lab) -> Cases:
    """Cycles with other kernels, at batch 1; with the defaults too where `goals` doesn't measure them."""
    for context in sorted({lab.size.context, lab.size.contexts[-1]}):
        for name, kernels in CHOICES.items():
            if kernels != DEFAULT_KERNELS or context != lab.size.context:
                for case, measure in cells(lab, lab.size.trees[:2], ("greedy", "top_p"), [(1, context)]):
                    yield {"kernels": name, **case}, partial(measure, kernels=kernels)


def exchanges(lab: Lab) -> Cases:
    """Sums between devices alone, each of the one before; and greedy cycles with other ways to exchange them, at batch 1."""
    for nbytes in lab.few(SUMS):
        yield {"sum": f"{nbytes} bytes"}, partial(time_sum, lab, nbytes)
    for name, options in EXCHANGES.items() if lab.tp > 1 else ():
        for case, measure in cells(lab, lab.size.trees[:2], GREEDY, [(1, lab.size.context)]):
            yield {"exchanges": name, **case}, partial(measure, options=options)


def time_sum(lab: Lab, nbytes: int) -> dict[str, Any]:
    """Microseconds of a sum over all devices. Raises Skip for one device."""
    if lab.tp == 1:
        raise Skip("one device exchanges nothing: give --tp")

    def sums(array: jax.Array) -> jax.Array:
        for _ in range(IN_A_ROW):
            array = jax.lax.psum(array, MESH_AXIS) * 0.5
        return array

    array = lab.placement.put(jnp.ones(nbytes // 2, jnp.bfloat16))
    mapped = jax.shard_map(sums, mesh=lab.placement.mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    program = jax.jit(mapped).lower(array).compile(compiler_options=lab.placement.compiler_options())
    return {"microseconds": [1e3 * each / IN_A_ROW for each in lab.time(lambda: program(array))]}


def weights(lab: Lab) -> Cases:
    """Greedy cycles with quantised matrices, at batch 1; only one kind where figures mean nothing."""
    for kind in lab.few(QUANTIZATIONS):
        stored = lab.with_weights(kind)
        for case, measure in cells(stored, lab.size.trees[:2], GREEDY, [(1, lab.size.context)]):
            yield {"weights": kind, **case}, measure


def grid(lab: Lab) -> Cases:
    """Whole greedy cycles at all batch sizes and contexts."""
    return cells(lab, lab.size.trees, GREEDY, list(product(lab.few(BATCHES), lab.size.contexts)))


def cells(lab: Lab, trees: Sequence[TreeShape], kinds: Sequence[str], sizes: Sequence[tuple[int, int]]) -> Iterator[Cell]:
    """Each program is compiled alone, when its turn comes: one that can't be compiled in time costs no other."""
    for (batch, context), tree, sampling in product(sizes, trees, kinds):
        case = {"tree": tree.name, "sampling": sampling, "batch": batch, "context": context}
        yield case, partial(time_cycle, lab, tree, sampling, batch, context)


def time_cycle(
    lab: Lab,
    tree: TreeShape,
    sampling: str,
    batch: int,
    context: int,
    *,
    kernels: Kernels = DEFAULT_KERNELS,
    options: Options = MappingProxyType({}),
) -> dict[str, Any]:
    """Milliseconds per cycle, and the least that reading its bytes takes at the measured speed of a copy."""
    if kernels.attention not in (None, "reference"):
        lab.need_gpu()
    least = estimate.cycle_cost(lab.pair, tree, batch, context)
    moved = sum(least.moved.values())
    key = (tree, batch, context, kernels, tuple(options.items()))
    program, columns = lab.newest(key, lambda: build_cycle(lab, tree, batch, context, kernels, options))
    made = make_batch(lab, batch, context, sampling)

    def run() -> Any:
        """Each cycle feeds the next."""
        result = program(lab.params, made.state, made.rows, made.page_table)
        made.state = result.state
        return result.report

    try:
        jax.block_until_ready(lab.params)
        started = time.perf_counter()
        jax.block_until_ready(run())
        first = time.perf_counter() - started
        milliseconds = lab.time(run, prepare=made.put_back)
    finally:
        made.delete()
    roofline = 1e3 * moved / lab.bandwidth
    return {
        "milliseconds": milliseconds,
        "bytes": moved,
        "model_milliseconds": model(lab, tree, sampling, batch, context),
        "byte_roofline_ms": roofline,
        "share_of_byte_roofline": roofline / median(milliseconds),
        "first_run_seconds": first,
        **(columns if sampling == "greedy" else {}),
    }


def model(lab: Lab, tree: TreeShape, sampling: str, batch: int, context: int) -> float | None:
    """The time model's milliseconds at the measured bandwidth; None for a GPU that it does not know."""
    gpu, kind = known_gpu(lab.placement.device.device_kind), SamplingKind.of(SAMPLING[sampling])
    if gpu is None:
        return None
    return sum(time_model(lab.pair, tree, batch, context, gpu, copy_speed=lab.bandwidth, kind=kind).values())


def known_gpu(kind: str) -> Gpu | None:
    """The GPU with this name, or one with the same chip: the time model takes the measured bandwidth, not the data sheet's.

    In: "NVIDIA H100 80GB HBM3"  Out: GPUS["h100"]
    """
    chips = {name.replace("rtx-", "rtx ").split("-")[0]: gpu for name, gpu in reversed(GPUS.items())}
    return next((gpu for chip, gpu in chips.items() if re.search(rf"\b{chip}\b", kind.lower())), None)
