"""The parts of benchmarks.gpu, in their order, and the format of the record. Plain Python, no JAX.

The record has one JSON object per line, written when it is known; a part's later lines replace those of earlier runs.

  {"part", "begins", "environment", "size"}     a part starts: the date; versions, devices and driver (benchmarks/record.py)
  {"part", "case", "starts"}                    a case starts
  {"part", "case", "row"}                       it was measured; names of figures end in their unit
  {"part", "case", "skipped"} or "failed"       it was not, and why
  {"part", "seconds"}                           the part has ended; without this line it was interrupted
"""

from typing import NamedTuple

RECORD = "gpu.jsonl"
"""The record's file, unless --out names another."""


class Part(NamedTuple):
    """One question to the GPU. Its cases run in one process; a case that breaks it costs only itself."""

    name: str
    function: str
    """The function of this folder that yields the cases, as "module.function"."""
    about: str
    limit: float = 120.0
    """Seconds that one case may take."""


COMPILES = 300.0
"""Seconds for a case that compiles a cycle or an engine, which autotunes on first contact."""
PARTS = (
    Part("probe", "checks.probe", "the smallest shape of each kernel a cycle runs"),
    Part("copy", "attention.copy", "the bandwidth of a large copy"),
    Part("cycle", "cycles.goals", "whole cycles at batch 1, context 1024: greedy, sampled, filtered", limit=COMPILES),
    Part("text", "engine.texts", "the built-in model's text against the CPU's", limit=COMPILES),
    Part("engine", "engine.cases", "the engine's time per cycle beside the device's, 1 and 8 requests", limit=COMPILES),
    Part("choices", "cycles.choices", "cycles with other products and attention kernels, to choose defaults", limit=COMPILES),
    Part("exchanges", "cycles.exchanges", "with --tp: sums between GPUs, and cycles with other ways to exchange", limit=COMPILES),
    Part("profile", "profile.cases", "where a cycle's time goes, kernel by kernel", limit=COMPILES),
    Part("weights", "cycles.weights", "cycles with weights of 8 and 4 bits", limit=COMPILES),
    Part("packed", "products.packed", "products with weights of 8 and 4 bits, with other tiles"),
    Part("check", "checks.check", "every implementation of every kernel against the reference"),
    Part("gemm", "products.cases", "the matrix products of 1 to 64 rows: XLA four ways, our kernel"),
    Part("tiles", "attention.tiles", "attention with other splits, keys per block, stages and warps"),
    Part("attention", "attention.times", "each implementation of attention at batches 1 to 64, contexts 512 to 32768"),
    Part("grid", "cycles.grid", "whole greedy cycles at batches 1 to 64 and contexts 512 to 32768", limit=COMPILES),
)
"""The most important first: a run of ten minutes reaches at least the first five."""
ORDER = tuple(part.name for part in PARTS)
GRACE = 15.0
"""Seconds for which a case may go on after the end of the budget."""
OUT_OF_TIME = "out of time: name the part with --only, or give a larger --budget"


class Task(NamedTuple):
    """What a process is to do."""

    part: str
    size: str
    out: str
    """The record, which the process adds to."""
    deadline: float
    """No case starts later, and the process ends itself GRACE seconds later."""
    cache: str | None = None
    """The directory of compiled programs."""
    tp: int = 1
    """Devices that share the models."""
    first: int = 0
    """The number of the first case; those before it were started by earlier processes."""
    parent: int = 0
    """The process that waits for this one, which may be killed before this one has loaded JAX."""
