"""Where a cycle's time goes: the time of each kernel, named after what it does."""

import re
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxspec.models.linear import DEFAULT_KERNELS

from .arrays import make_batch
from .cycles import GOAL_TREES, build_cycle
from .lab import Cases, Lab

CYCLES = 8
"""Cycles that are recorded."""
NO_GRAPH = {"xla_gpu_enable_command_buffer": ""}
"""Compiler options: every kernel is launched by itself, so that the profiler knows its instruction. It takes as long as in a graph;
the gaps between kernels are not those of a graph."""
KERNELS = "Stream"
"""How the names of the profile's lines of kernels begin; others repeat them by module and operation."""
INSTRUCTION = re.compile(r'^ *(?:ROOT )?%([\w.-]+) = .*op_name="([^"]*)"', re.MULTILINE)
NO_NAMES = re.compile(r"jit\(.*\)|cond|branch_\d+_fun|pallas_call|vmap\(\)")
"""Parts of a scope that name no part of the algorithm."""


class Kernel(NamedTuple):
    """One run of a kernel."""

    instruction: str
    """XLA's instruction; empty if the profiler does not know it."""
    kernel: str
    nanoseconds: float


def cases(lab: Lab) -> Cases:
    """The cycles of `goals`, greedy and filtered; both are one program."""
    for tree, sampling in product(lab.size.trees[:GOAL_TREES], ("greedy", "top_p")):
        case = {"tree": tree.name, "sampling": sampling, "batch": 1, "context": lab.size.context}
        yield case, partial(profiled, lab, tree, sampling)


def profiled(lab: Lab, tree: Any, sampling: str) -> dict[str, Any]:
    """Microseconds and launches per cycle of each kind of kernel, the longest first, and their sum."""
    lab.need_gpu()
    context = lab.size.context
    program, _ = lab.newest(tree, lambda: build_cycle(lab, tree, 1, context, DEFAULT_KERNELS, NO_GRAPH))
    made = make_batch(lab, 1, context, sampling)

    def run() -> None:
        for _ in range(CYCLES):
            made.state = program(lab.params, made.state, made.rows, made.page_table).state
        jax.block_until_ready(made.state.sequences.length)

    try:
        run()
        made.put_back()
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                run()
            (file,) = Path(folder).rglob("*.xplane.pb")
            kernels = list(read_kernels(jax.profiler.ProfileData.from_file(str(file))))
    finally:
        made.delete()
    names = dict(INSTRUCTION.findall(program.as_text() or ""))
    kinds = by_kind(kernels, names)
    return {
        "busy_milliseconds": sum(microseconds for microseconds, _ in kinds.values()) / 1e3,
        "kernels": sum(count for _, count in kinds.values()),
        "microseconds_and_launches": kinds,
    }


def read_kernels(data: Any) -> Iterator[Kernel]:
    """The kernels and copies on the device's streams."""
    for plane in data.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if line.name.startswith(KERNELS):
                for event in line.events:
                    instruction = next((str(value) for name, value in event.stats if name == "hlo_op"), "")
                    yield Kernel(instruction, event.name, event.duration_ns)


def by_kind(kernels: Iterable[Kernel], scopes: dict[str, str]) -> dict[str, tuple[float, float]]:
    """Microseconds and launches per cycle by what kernels do, the longest first.

    `scopes`: JAX's scope of each instruction.
    """
    found: dict[str, list[float]] = {}
    for each in kernels:
        total = found.setdefault(kind_of(each, scopes), [0.0, 0.0])
        total[0] += each.nanoseconds / 1e3 / CYCLES
        total[1] += 1 / CYCLES
    longest = sorted(found.items(), key=lambda item: -item[1][0])
    return {kind: (microseconds, count) for kind, (microseconds, count) in longest}


def kind_of(kernel: Kernel, scopes: dict[str, str]) -> str:
    """The part of the algorithm and the kernel, without the numbers of layers and instructions.

    In:  instruction gemm_fusion_dot.12, scope "jit(cycle_program)/verify/layer_3/dot_general"
    Out: "verify/layer/dot_general gemm_fusion_dot"
    """
    scope = scopes.get(kernel.instruction, "")
    parts = [re.sub(r"_\d+$", "", part) for part in scope.split("/") if not NO_NAMES.fullmatch(part)]
    base = re.sub(r"[._\d]+$", "", kernel.instruction or kernel.kernel)
    return " ".join(filter(None, ["/".join(parts), base]))
