"""The parts of benchmarks.gpu, in their order, and the format of the record. Plain Python, no JAX.

The record is one JSON object, written anew after every message of a worker:

  benchmark    "gpu"
  environment  date, versions, devices, driver (benchmarks/record.py)
  note         only if the figures mean nothing: no GPU, or tiny sizes
  flags        the options of the last command that wrote it
  results      by part: {"date", "rows", "skipped", "failed", "seconds"}; a part without "seconds" was interrupted

A row holds the name of its case and what was measured; an entry of "skipped" is {"case", "reason"}, one of "failed"
{"case", "error"}. Names of figures end in their unit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf


@dataclass(frozen=True)
class Run:
    """The processes of a part that have the same environment."""

    name: str = ""
    xla_flags: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    uses_jax: bool = True
    """False: the process must not take the GPU's memory for JAX."""


@dataclass(frozen=True)
class Part:
    """One question to the GPU."""

    name: str
    function: str
    """The function of this folder that yields the cases of a run, as "module.function"."""
    about: str
    runs: tuple[Run, ...] = (Run(),)
    alone: bool = False
    """Each case has a process of its own."""
    seconds: float = inf
    """Starts no case later than this after its start, without the time for compiling, so that other parts get their turn."""


FLAGS = {
    "as it is": "",
    "command buffers off": "--xla_gpu_enable_command_buffer=",
    "PDL on": "--xla_gpu_enable_pdl=true --xla_gpu_enable_pdl_launch=true",
    "cuBLASLt off": "--xla_gpu_enable_cublaslt=false",
    "Triton gemm off": "--xla_gpu_enable_triton_gemm=false",
    "CUB sort on": "--xla_gpu_enable_cub_radix_sort=true",
    "autotune level 0": "--xla_gpu_autotune_level=0",
    "autotune level 4": "--xla_gpu_autotune_level=4",
}
"""Settings of XLA, by name. CUB's sort is off as it is (jaxspec/engine/programs.py says why)."""
AT_ONCE = ("1", "8")
"""Requests that the server answers at a time, as the keys of its row."""
UPDATES = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "command_buffer_thunk=3,command_executor=1"}
"""Lets XLA log how many nodes of a CUDA graph it changes before a launch."""
OTHER = Run("torch", uses_jax=False)
PARTS = (
    Part(
        "probe", "probe.cases", "versions, imports, the smallest shape of each kernel, cycles of one layer, in a process each",
        alone=True,
    ),
    Part("copy", "kernels.copy", "the bandwidth of a large copy and the speed of a large matrix product: the rooflines"),
    Part("gemm", "products.cases", "the matrix products of 1 to 64 rows: XLA four ways, our kernel, torch", (Run("jax"), OTHER)),
    Part("cycle", "cycles.goals", "whole cycles at batch 1 and context 1024, each compiled alone; launches and CUDA graphs"),
    Part("flags", "cycles.flags", "plain and 3/1/4 under other settings of XLA", tuple(Run(*each) for each in FLAGS.items())),
    Part("text", "engine.texts", "the built-in model's greedy text against the CPU's, for each attention kernel and three trees"),
    Part(
        "engine", "engine.cases", "the engine's time per cycle beside the device's: overlap, 1 and 8 requests; updates of graphs",
        (Run("timed"), Run("graph updates", environment=UPDATES)),
    ),
    Part("check", "kernels.check", "every implementation of every kernel against the reference", seconds=120.0),
    Part("attention", "cycles.by_attention", "whole cycles with each attention kernel, to choose the default"),
    Part("tiles", "kernels.tiles", "attention with other splits, keys per block, stages and warps", seconds=120.0),
    Part(
        "peer", "peer.cases", "torch: a Llama in a CUDA graph (cuBLAS, SDPA), and transformers with torch.compile", (OTHER,),
        alone=True,
    ),
    Part(
        "server", "server.cases", "a server with the built-in model under load; needs fastapi, uvicorn and pydantic",
        (Run("server", uses_jax=False),),
    ),
    Part("compile", "cycles.compiling", "compiling one cycle: with nothing stored, with stored autotuning, from the cache"),
    Part("kernels", "kernels.times", "each implementation of attention at batches 1 to 64, contexts 512 to 32768", seconds=110.0),
    Part("prefill", "cycles.prefills", "chunks of 256 and 2048 tokens", seconds=60.0),
    Part("grid", "cycles.grid", "whole cycles at batches 1 to 64 and contexts 512 to 32768"),
)  # fmt: skip
"""The most important first."""
ORDER = tuple(part.name for part in PARTS)
ANCHORS = {"plain": 5.26, "3/1/4": 7.1, "7/1/8": 8.6}
"""SGLang on an H200, Llama 3.1 8B with EAGLE-3, batch 1: milliseconds per cycle of each tree."""
