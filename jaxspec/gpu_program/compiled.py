"""Cycles compiled for a GPU: what it would launch and what memory that takes. The compiler runs in a process of its own."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.config import SpecConfig
from jaxspec.gpu_program.descriptions import DESCRIPTIONS
from jaxspec.gpu_program.launches import Launch

PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
GRAPH_KINDS = {"kCustomKernel", "kKernel", "kCopy", "kConditional", "kGemm", "kCublasLtMatmul", "kMemzero", "kMemset32BitValue"}
"""What may be launched: all of it can be part of a CUDA graph. A while loop can't."""


SECONDS_PER_CYCLE = 600
"""Ten times what a busy machine took; a compiler that hangs must not hang whoever asked."""
ANSWERS = "answers.json"
"""Where the worker leaves them."""


class CompilerError(Exception):
    """The GPU compiler failed; the message is the end of what it printed."""


@dataclass(frozen=True)
class CycleShape:
    """One cycle to compile."""

    spec: SpecConfig
    batch: int
    context: int
    """Tokens that each sequence has room for."""
    page_size: int = 16

    @property
    def pages(self) -> int:
        """Of one sequence."""
        return -(-(self.context + self.spec.num_steps + 1) // self.page_size)


@dataclass(frozen=True)
class CompiledCycle:
    """What the GPU compiler made of a cycle; bytes are of one GPU."""

    compile_seconds: float
    argument_bytes: int
    """Weights and state."""
    aliased_bytes: int
    """Of them, what is updated in place."""
    temporary_bytes: int
    cache_bytes: int
    touches_host: bool
    """Something is copied to or from the host's memory inside."""
    launches: tuple[Launch, ...]

    @property
    def greedy_launches(self) -> list[Launch]:
        """The launches of a greedy cycle without log probabilities."""
        return [launch for launch in self.launches if launch.by_default]

    @property
    def stages(self) -> dict[str, int]:
        """Launches of a greedy cycle, by the part of the algorithm that they belong to; most first."""
        return dict(Counter(launch.stage for launch in self.greedy_launches).most_common())

    def per_layer(self, num_layers: int) -> float:
        """Launches per layer of the target, committing its keys included."""
        own = [launch for launch in self.greedy_launches if launch.layer is not None or launch.stage == "commit"]
        return len(own) / num_layers

    @property
    def is_one_graph(self) -> bool:
        """Nothing needs the host: all is in CUDA graphs, without loops, without copies to or from the host."""
        return not self.touches_host and all(launch.in_graph and launch.kind in GRAPH_KINDS for launch in self.launches)


def why_not(gpu: str) -> str | None:
    """Why nothing can be compiled for this GPU here; None: it can."""
    if gpu not in DESCRIPTIONS:
        return f"XLA's compiler needs a description of the GPU; there is one of {', '.join(DESCRIPTIONS)}"
    if not any(map(_installed, PLUGINS)):
        return "JAX's plugin for CUDA is not installed: pip install 'jaxspec-llm[aot]' (it needs no GPU)"
    return None


def compile_cycles(
    model: Path,
    draft: Path | None,
    cycles: Sequence[CycleShape],
    *,
    gpu: str,
    dtype: str,
    token_map: Path | None = None,
    refuse_spills: bool = False,
) -> list[CompiledCycle]:
    """Compiles the cycles one after the other. `model` and `draft`: directories or config.json files.

    Raises:
        ValueError: it can't be done here (`why_not`).
        CompilerError: the compiler failed; with `refuse_spills` also if a kernel needs more registers than there are.
    """
    if reason := why_not(gpu):
        raise ValueError(reason)
    shapes = [
        {
            "tree": [each.spec.num_steps, each.spec.topk, each.spec.num_draft_tokens],
            "batch": each.batch,
            "pages": each.pages,
            "page_size": each.page_size,
        }
        for each in cycles
    ]
    paths = {name: path and str(path) for name, path in (("model", model), ("draft", draft), ("token_map", token_map))}
    return _ask(paths | {"gpu": gpu, "dtype": dtype, "refuse_spills": refuse_spills, "cycles": shapes})


def _ask(request: dict[str, Any]) -> list[CompiledCycle]:
    # JAX itself stays on the CPU; the plugin only lends its compiler, and must not look for a driver or CUDA's libraries.
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # what comes from a cache dumps nothing
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    command = [sys.executable, "-m", "jaxspec.gpu_program.worker"]
    with tempfile.TemporaryDirectory() as scratch:
        task = json.dumps(request | {"scratch": scratch})
        limit = SECONDS_PER_CYCLE * len(request["cycles"])
        try:
            done = subprocess.run(command, env=environment, input=task, capture_output=True, text=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            raise CompilerError(f"it took more than {limit} s") from None
        if done.returncode:
            raise CompilerError(f"exit status {done.returncode}, {done.stderr[-2000:].strip()}")
        answers = json.loads((Path(scratch) / ANSWERS).read_text())
    return [CompiledCycle(**each | {"launches": tuple(Launch(*launch) for launch in each["launches"])}) for each in answers]


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        return False
