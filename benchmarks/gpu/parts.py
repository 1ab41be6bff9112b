"""The parts of benchmarks.gpu, in their order, and the format of the record. Plain Python, no JAX.

The record has one JSON object per line, written when it is known; a part's later lines replace those of earlier runs.

  {"part", "begins", "environment", "size"}     a part starts: the date; versions, devices and driver (benchmarks/record.py)
  {"part", "case", "row"}                       a case was measured; names of figures end in their unit
  {"part", "case", "skipped"} or "failed"       it was not, and why
  {"part", "seconds"}                           the part has ended; without this line it was interrupted
"""

from dataclasses import dataclass
from typing import NamedTuple

RECORD = "gpu.jsonl"
"""The record's file, unless --out names another."""


@dataclass(frozen=True)
class Part:
    """One question to the GPU. Its cases run in one process; a case that breaks it costs only itself."""

    name: str
    function: str
    """The function of this folder that yields the cases, as "module.function"."""
    about: str
    turn: float = 0.0
    """Seconds that earlier parts leave for it, so that a run of ten minutes reaches all that matters most."""
    limit: float = 120.0
    """Seconds that one case may take."""
    uses_jax: bool = True
    """False: the process must not take the GPU's memory for JAX."""


FLAGS: dict[str, dict[str, bool | int | str]] = {
    "command buffers off": {"xla_gpu_enable_command_buffer": ""},
    "PDL on": {"xla_gpu_enable_pdl": True, "xla_gpu_enable_pdl_launch": True},
    "autotune level 4": {"xla_gpu_autotune_level": 4},
    "cuBLASLt off": {"xla_gpu_enable_cublaslt": False},
    "Triton gemm off": {"xla_gpu_enable_triton_gemm": False},
    "CUB sort on": {"xla_gpu_enable_cub_radix_sort": True},
    "autotune level 0": {"xla_gpu_autotune_level": 0},
}
"""Compiler options by name. CUB's sort is off as it is (jaxspec/placement.py)."""
AT_ONCE = ("1", "8")
"""Requests that the server answers at a time, as the keys of its row."""
COMPILES = 300.0
"""Seconds for a case that compiles a cycle or an engine, which autotunes on first contact."""
PARTS = (
    Part("probe", "checks.probe", "versions, the smallest shape of each kernel a cycle runs, a cycle of one layer", turn=100.0),
    Part("copy", "attention.copy", "the bandwidth of a large copy and the speed of a large matrix product", turn=20.0),
    Part("cycle", "cycles.goals", "whole cycles at batch 1, context 1024: greedy, sampled, filtered", turn=215.0, limit=COMPILES),
    Part("flags", "cycles.flags", "3/1/4 with other settings of XLA", turn=50.0, limit=COMPILES),
    Part("text", "engine.texts", "the built-in model's text against the CPU's", turn=40.0, limit=COMPILES),
    Part("engine", "engine.cases", "the engine's time per cycle beside the device's, 1 and 8 requests", turn=120.0, limit=COMPILES),
    Part("choices", "cycles.choices", "cycles with other products and attention kernels, to choose defaults", limit=COMPILES),
    Part("profile", "profile.cases", "where a cycle's time goes, kernel by kernel", limit=COMPILES),
    Part("weights", "cycles.weights", "cycles with weights of 8 and 4 bits", limit=COMPILES),
    Part("packed", "products.packed", "products with weights of 8 and 4 bits, with other tiles"),
    Part("check", "checks.check", "every implementation of every kernel against the reference"),
    Part("gemm", "products.cases", "the matrix products of 1 to 64 rows: XLA four ways, our kernel"),
    Part("tiles", "attention.tiles", "attention with other splits, keys per block, stages and warps"),
    Part("peer", "peer.cases", "torch: products, a Llama in a CUDA graph, transformers", limit=COMPILES, uses_jax=False),
    Part("server", "server.cases", "a server under load; needs fastapi, uvicorn and pydantic", limit=COMPILES, uses_jax=False),
    Part("attention", "attention.times", "each implementation of attention at batches 1 to 64, contexts 512 to 32768"),
    Part("prefill", "cycles.prefills", "chunks of 256 and 2048 tokens", limit=COMPILES),
    Part("grid", "cycles.grid", "whole greedy cycles at batches 1 to 64 and contexts 512 to 32768", limit=COMPILES),
)
"""The most important first."""
ORDER = tuple(part.name for part in PARTS)
ANCHORS = {"plain": 5.26, "3/1/4": 7.1, "7/1/8": 8.6}
"""SGLang on an H200, Llama 3.1 8B with EAGLE-3, batch 1: milliseconds per greedy cycle of each tree."""


class Task(NamedTuple):
    """What a process is to do."""

    part: str | None
    """None: only tell the environment."""
    size: str
    first: int = 0
    """The number of the first case; those before it were started by earlier processes."""
    until: float = float("inf")
    """No case but the first starts later."""
    deadline: float = float("inf")
    """The process ends itself GRACE seconds later."""
    cache: str | None = None
    """The directory of compiled programs."""
    bandwidth: float | None = None
    """Bytes per second of a copy, if it has been measured."""
    arithmetic: float | None = None
    """Operations per second of a matrix product, likewise."""


GRACE = 15.0
OUT_OF_TIME = "time budget: its turn was over; --only names a part that gets all the time"
