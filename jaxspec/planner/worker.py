"""Compiles cycles for a GPU that this machine need not have. Runs in its own process, because JAX is configured before it starts.

Reads one JSON request from standard input and writes the results to a file, because libraries print to standard output. Call
`compile_cycles` to use it.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike

from jaxspec.config import EngineConfig
from jaxspec.decoding.programs import CycleProgram, PrefillProgram, Program, ProposeProgram, SettleProgram
from jaxspec.decoding.state import Sizes
from jaxspec.engine.models import Merger, drafter_of, kernels_of, new_state
from jaxspec.engine.programs import Programs
from jaxspec.model_config import ModelConfig
from jaxspec.models.head import HeadConfig
from jaxspec.models.registry import abstract_model
from jaxspec.models.sharing import MESH_AXIS
from jaxspec.placement import Placement
from jaxspec.planner.compile import (
    ANSWERS,
    CycleShape,
    read_collectives,
    read_custom_calls,
    read_launches,
    read_sorts,
    touches_host,
)
from jaxspec.planner.gpus import DRIVER, GPUS
from jaxspec.planner.models import read_head, read_target
from jaxspec.tree_shape import TreeShape


def main() -> None:
    request = json.load(sys.stdin)
    answers = list(compile_all(request))
    (Path(request["scratch"]) / ANSWERS).write_text(json.dumps(answers))


def compile_all(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields one result per cycle of the request."""
    of_target, of_head = request["quantization"]
    target = read_target(Path(request["model"]), of_target)
    token_map = None if request["token_map"] is None else Path(request["token_map"])
    head = None if request["draft"] is None else read_head(Path(request["draft"]), target, token_map, of_head)
    placement = gpus(request["gpu"], request["tp"], request["nodes"], request["driver"])
    common = {"refuse_spills": request["refuse_spills"], "scratch": request["scratch"]}
    for cycle in request["cycles"]:
        shape = CycleShape(**cycle | {"tree": TreeShape(**cycle["tree"])})
        yield compile_cycle(target, head, jnp.dtype(request["dtype"]), placement, shape, **common)


@dataclass(frozen=True)
class Described(Placement):
    described: Mesh | None = None

    @property
    def mesh(self) -> Mesh:
        assert self.described is not None
        return self.described

    @cached_property
    def whole(self) -> Sharding:
        return NamedSharding(self.mesh, PartitionSpec())


def gpus(gpu: str, count: int, nodes: int = 1, driver: str = DRIVER) -> Described:
    """GPUs of several machines, whose driver is of this CUDA version."""
    compiler = GPUS[gpu].compiler
    assert compiler is not None
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name=gpu, topology=f"1x{nodes}x{count // nodes}", target_config=compiler.text(driver)
    )
    return Described(tuple(range(count)), Mesh(np.array(topology.devices), (MESH_AXIS,)))


def compile_cycle(
    target: ModelConfig,
    head: HeadConfig | None,
    dtype: DTypeLike,
    placement: Placement,
    shape: CycleShape,
    *,
    refuse_spills: bool,
    scratch: str,
) -> dict[str, Any]:
    """Compiles one cycle as the engine does; returns the fields of `CompiledCycle`."""
    models: list[Any] = [None if each is None else abstract_model(each, dtype) for each in (target, head)]
    config = EngineConfig(
        kv_cache_dtype=shape.kv_cache_dtype,
        draft_kv_cache_dtype=shape.draft_kv_cache_dtype,
        attention_kernel=shape.attention_kernel,
        matmul=shape.matmul,
        ngram=shape.ngram,
        tp_size=len(placement.devices),
    )
    drafter = drafter_of(models[1], config)
    params = {"target": placement.weights(models[0].params, target), "draft": drafter.placed(placement.weights)}
    batch, pages = shape.batch, shape.pages
    length = pages * shape.page_size
    sizes = Sizes(
        batch + 1, batch * pages, shape.page_size, length, max_lag=1, dtype=dtype, kv_cache_dtype=shape.kv_cache_dtype,
        devices=config.tp_size,
    )  # fmt: skip
    state, empty = (
        placement.abstract(partial(new_state, target, drafter, sizes._replace(num_pages=number))) for number in (batch * pages, 0)
    )
    merge = Merger.of(models[0].graph(kernels_of(config)), drafter)
    programs = Programs(merge, params, state, placement=placement)
    # Triton's backend asks the mesh for its GPU.
    with jax.set_mesh(placement.mesh), tempfile.TemporaryDirectory(dir=scratch) as dump:
        lowered = programs.lower(program_of(shape), "cuda")
        started = time.perf_counter()
        options = {"xla_dump_to": dump, "xla_gpu_fail_ptx_compilation_on_register_spilling": refuse_spills}
        try:
            compiled = lowered.compile(compiler_options=(placement.compiler_options(platform="cuda") or {}) | options)
        except jax.errors.JaxRuntimeError as error:
            raise RuntimeError(f"XLA failed; {libraries_called(Path(dump))}") from error
        seconds = time.perf_counter() - started
        launches, on_host = read_launches(Path(dump)), touches_host(Path(dump))
        kernels, others = read_custom_calls(Path(dump))
    memory: Any = compiled.memory_analysis()
    program_text = compiled.as_text() or ""
    return {
        "compile_seconds": seconds,
        "argument_bytes": memory.argument_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "cache_bytes": placement.nbytes(state) - placement.nbytes(empty),
        "touches_host": on_host,
        "launches": launches,
        "kernel_calls": kernels,
        "sorts": read_sorts(program_text),
        "collectives": read_collectives(program_text),
        "library_calls": others,
    }


def program_of(shape: CycleShape) -> Program:
    """Raises KeyError for an unknown half."""
    if shape.prefill_chunk:
        return PrefillProgram(shape.prefill_chunk, shape.pages, shape.batch)
    of_tree = shape.batch, shape.pages, shape.tree
    programs: dict[str, Program] = {
        "": CycleProgram(*of_tree),
        "propose": ProposeProgram(*of_tree),
        "settle": SettleProgram(*of_tree),
    }
    return programs[shape.half]


def libraries_called(dump: Path) -> str:
    """What a program that failed to compile calls beside our kernels: XLA makes some of these calls only where there is a GPU."""
    try:
        _, others = read_custom_calls(dump)
    except FileNotFoundError:  # it failed before
        return "it did not finish optimizing the program"
    return f"the program calls {', '.join(others) or 'no libraries'}"


if __name__ == "__main__":
    main()
