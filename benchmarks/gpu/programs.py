"""Compiles one program as the engine does, and tells what the compiler made of it: seconds, launches, CUDA graphs."""

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from jaxspec.engine.program_cache import CacheHits, source_digest
from jaxspec.placement import GPU_COMPILER_OPTIONS
from jaxspec.planner.compile import GRAPH_KINDS, read_custom_calls, read_launches, touches_host
from pallas_kernels.dispatch import lowered_for

from .lab import Lab


@dataclass(frozen=True)
class Built:
    """A compiled program."""

    program: jax.stages.Compiled
    columns: dict[str, Any]
    """Seconds for tracing, lowering and compiling (autotuning included), and what XLA's dump shows of the launches."""


Options = Mapping[str, bool | int | str]
"""Of XLA's compiler."""


def build(
    lab: Lab, function: Callable[..., Any], arguments: tuple, *, name: str, layers: int, options: Options = MappingProxyType({})
) -> Built:
    """Compiles `function`, whose second argument is donated, for these arguments or shapes; with the engine's options and these.

    A program from the cache dumps nothing, so what the dump shows is kept beside the cache, under `name`.
    """
    with CacheHits() as hits, tempfile.TemporaryDirectory() as dump:
        before, times = tuned(lab), [time.perf_counter()]
        with lowered_for("cuda" if lab.on_gpu else "cpu"):
            traced = jax.jit(function, donate_argnums=1).trace(*arguments)
            times.append(time.perf_counter())
            lowered = traced.lower()
        times.append(time.perf_counter())
        program = lowered.compile(compiler_options=own_options(lab) | dict(options) | ({"xla_dump_to": dump} if lab.on_gpu else {}))
        times.append(time.perf_counter())
        columns = {f"{step}_seconds": times[n + 1] - times[n] for n, step in enumerate(("trace", "lower", "compile"))}
        columns["found_in_cache"] = hits.in_this_thread > 0
        columns["autotuned"] = tuned(lab) - before
        columns |= remembered(lab, f"{name} {dict(options)}", lambda: launches(Path(dump), layers)) if lab.on_gpu else {}
    memory = program.memory_analysis()
    return Built(program, columns | {"temporary_bytes": memory.temp_size_in_bytes if memory else None})


def own_options(lab: Lab) -> dict[str, bool | int | str]:
    """The engine's compiler options, except for those that XLA_FLAGS sets."""
    chosen = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in GPU_COMPILER_OPTIONS.items() if lab.on_gpu and name not in chosen}


def tuned(lab: Lab) -> int:
    """Fusions whose autotuning is in the cache."""
    return 0 if lab.cache is None else sum(1 for _ in (lab.cache / "xla_gpu_per_fusion_autotune_cache_dir").glob("*"))


def launches(dump: Path, layers: int) -> dict[str, Any]:
    """What the dump shows of a greedy cycle's launches. Raises FileNotFoundError if the program came from the cache."""
    found = read_launches(dump)
    greedy = [launch for launch in found if launch.by_default]
    own = [launch for launch in greedy if launch.layer is not None or launch.stage == "commit"]
    outside = sorted({launch.kind for launch in found if not launch.in_graph or launch.kind not in GRAPH_KINDS})
    return {
        "launches": len(greedy),
        "launches_per_layer": len(own) / layers,
        "custom_calls": read_custom_calls(dump),
        "outside_the_graph": [*outside, *(["host memory"] if touches_host(dump) else [])],
    }


def remembered(lab: Lab, name: str, find: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """What `find` returns; if it can't, what it returned when this program was compiled. Empty if that was never."""
    key = "\n".join((name, jax.__version__, lab.device.device_kind, os.environ.get("XLA_FLAGS", ""), source_digest()))
    file = lab.cache and lab.cache / "launches" / f"{sha256(key.encode()).hexdigest()[:24]}.json"
    try:
        found = dict(find())
    except FileNotFoundError:
        return json.loads(file.read_text()) if file and file.exists() else {}
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found))
    return found
