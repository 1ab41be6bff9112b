"""Compiles cycles for a GPU, without one: their launches and their memory.

XLA's GPU compiler runs in a process of its own (worker.py); the launches are read from the files that it dumps.
"""

import importlib.util
import json
import math
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec.planner.gpus import DRIVER, GPUS
from jaxspec.server_process import PYTHON
from jaxspec.tree_shape import TreeShape

PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
GRAPH_KINDS = {
    "kCustomKernel", "kKernel", "kCopy", "kConditional", "kGemm", "kCublasLtMatmul", "kMemzero", "kMemset32BitValue", "kCustomCall",
    "kAllReduce", "kAllGather", "kPartitionId",
}  # fmt: skip
"""Launches that can be part of a CUDA graph. A while loop can't; a custom call can if its library says so."""
KERNEL_CALLS = {"__gpu$xla.gpu.triton": "Pallas' Triton", "mosaic_gpu_v2": "Pallas' Mosaic"}
"""The custom calls that are kernels of our own, and what makes them. All of them can be captured in a graph."""
NO_LAUNCHES = ("kSequential", "kAsyncStart", "kAsyncDone")
"""Rows that only group others or say when they begin and end."""
TOPK = "__gpu$TopK"
"""The k largest of each row: a custom call by name only, which XLA compiles to a kernel of its own."""

NO_CALL = "AllocateBuffer"
"""XLA's name for memory without content: nothing is called."""

WITHOUT_GPU = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # what comes from a cache dumps nothing
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
"""Environment of the worker: JAX itself stays on the CPU; the plugin, used for its compiler, must not look for a driver or CUDA."""
SECONDS_PER_CYCLE = 600
"""Ten times the time on a busy machine: a compiler that hangs must not block the caller forever."""
ANSWERS = "answers.json"
"""The file of the worker's results."""


class CompilerError(Exception):
    """The GPU compiler failed; the message is the end of what it printed."""


class Quantizations(NamedTuple):
    """How the matrices of target and head are quantised, in addition to what their checkpoints say; as `planned` takes it."""

    target: str | None = None
    head: str | None = None


AS_PUBLISHED = Quantizations()


@dataclass(frozen=True)
class CycleShape:
    """One cycle to compile."""

    tree: TreeShape
    batch: int
    context: int
    """Tokens per sequence."""
    page_size: int = 16
    kv_cache_dtype: str = "auto"
    draft_kv_cache_dtype: str | None = None
    attention_kernel: str | None = None
    matmul: str = "auto"
    ngram: bool = False
    """All six as in EngineConfig."""
    prefill_chunk: int = 0
    """Not a cycle, but a prefill of chunks of this many tokens."""
    half: str = ""
    """Not all of a cycle, but "propose" or "settle"."""

    @property
    def pages(self) -> int:
        """Pages per sequence."""
        return -(-(self.context + self.tree.num_steps + 1) // self.page_size)


_COLLECTIVE = re.compile(r"= (.*?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
_SHAPE = re.compile(r"([a-z]+)(\d*)\[([\d,]*)\]")
_ROW = re.compile(r"( *)(\d+): (k\w+) +\[.*?\] ?(.*)")
_BRANCH = re.compile(r" *(branch_\d+|true_branch|false_branch):")
_INSTRUCTION = re.compile(r' *(?:ROOT )?%([\w.-]+) = .*metadata=\{op_name="((?:[^"\\]|\\.)*)"')
_CUSTOM_CALL = re.compile(r'custom_call_target="([^"]*)"')
_OP_NAME = re.compile(r'op_name="([^"]*/[^"]*)"')
_SORT = re.compile(r"= \(?\w+\[([\d,]+)\].* sort\(.*")
_METADATA = re.compile(r'profile_annotation: "([^"]*)"\s*thunk_id: (\d+)')
KINDS = tuple(range(4))
"""The kinds of cycles: the highest decoding.settings.SamplingKind of the batch."""


class Launch(NamedTuple):
    """One launch of a kernel, copy or conditional."""

    kind: str
    """XLA's name: kCustomKernel, kCopy, ..."""
    kernel: str
    """The kernel's name; empty for other things."""
    scope: str
    """JAX's named scopes: jit(cycle_program)/verify/layer_3/... If XLA lost them, as for rewritten matrix products, the
    scope of the launch before."""
    in_graph: bool
    """It is part of a CUDA graph (XLA's command buffer)."""
    kinds: Sequence[int] = KINDS
    """The kinds of cycles, without log probabilities, in which it runs."""

    @property
    def stage(self) -> str:
        """The part of the algorithm: draft, verify, accept, commit, ... ; "other": between them."""
        parts = [part for part in self.scope.split("/")[1:-1] if not part.startswith(("jit(", "layer_"))]
        return parts[0] if parts else "other"

    @property
    def layer(self) -> int | None:
        """The target's layer, if it belongs to one."""
        found = re.search(r"/layer_(\d+)/", self.scope)
        return int(found[1]) if found else None


class Sort(NamedTuple):
    """A sort in an optimized program."""

    size: int
    """Numbers in a row."""
    scope: str
    """As in Launch."""


class Collective(NamedTuple):
    """An exchange between GPUs in an optimized program."""

    kind: str
    """XLA's name: all-reduce, all-gather, ..."""
    nbytes: int
    """Of its result."""


@dataclass(frozen=True)
class CompiledCycle:
    """A compiled cycle; bytes are per GPU."""

    compile_seconds: float
    argument_bytes: int
    """Weights and state."""
    aliased_bytes: int
    """Arguments that are updated in place."""
    temporary_bytes: int
    cache_bytes: int
    touches_host: bool
    """The program copies to or from the host's memory."""
    launches: tuple[Launch, ...]
    kernel_calls: dict[str, int]
    """Our own kernels in the optimized program, and XLA's `topk`: how often each is called, in all branches."""
    sorts: tuple[Sort, ...]
    """In all branches."""
    library_calls: dict[str, int]
    """The other custom calls, by XLA's name, such as CUB's sorts. It isn't known what they launch, or whether they wait."""
    collectives: tuple[Collective, ...] = ()
    """In all branches; none on one GPU."""
    spills: str = ""
    """Why it can't be compiled without spilling registers to memory; empty: it can, or that was not tried."""

    @property
    def greedy_launches(self) -> list[Launch]:
        """The launches of a greedy cycle without log probabilities."""
        return self.launches_of(0)

    def launches_of(self, kind: int) -> list[Launch]:
        """The launches of a cycle of this kind, 0 to 3, without log probabilities."""
        return [launch for launch in self.launches if kind in launch.kinds]

    @property
    def stages(self) -> dict[str, int]:
        """Launches of a greedy cycle by stage of the algorithm, most first."""
        return dict(Counter(launch.stage for launch in self.greedy_launches).most_common())

    def per_layer(self, num_layers: int) -> float:
        """Launches per layer of the target, committing its keys included."""
        own = [launch for launch in self.greedy_launches if launch.layer is not None or launch.stage == "commit"]
        return len(own) / num_layers

    @property
    def is_one_graph(self) -> bool:
        """True if everything runs in CUDA graphs: no loops, no copies to or from the host, no library's calls."""
        return not (self.touches_host or self.library_calls) and all(
            launch.in_graph and launch.kind in GRAPH_KINDS for launch in self.launches
        )


ROWS: dict[str, Callable[..., NamedTuple]] = {"launches": Launch, "sorts": Sort, "collectives": Collective}
"""The fields of a CompiledCycle that the worker writes as lists."""


def why_not(gpu: str) -> str | None:
    """The reason why cycles can't be compiled for this GPU here; None: they can."""
    if gpu not in GPUS or GPUS[gpu].compiler is None:
        known = ", ".join(name for name, described in GPUS.items() if described.compiler)
        return f"XLA's compiler needs a description of the GPU; there is one of {known}"
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
    quantization: Quantizations = AS_PUBLISHED,
    driver: str = DRIVER,
    tp: int = 1,
    nodes: int = 1,
    refuse_spills: bool = False,
) -> list[CompiledCycle]:
    """Compiles the cycles. `model` and `draft` are directories or config.json files; `driver` is the CUDA version of the
    driver; `tp` GPUs in `nodes` machines share the models.

    Raises:
        ValueError: cycles can't be compiled here (`why_not`).
        CompilerError: the compiler failed; with `refuse_spills` also if a kernel needs more registers than there are.
    """
    if reason := why_not(gpu):
        raise ValueError(reason)
    request: dict[str, Any] = {"model": model, "draft": draft, "token_map": token_map, "gpu": gpu, "dtype": dtype}
    request |= {"quantization": quantization, "driver": driver, "refuse_spills": refuse_spills, "tp": tp, "nodes": nodes}
    shapes = [asdict(each) for each in cycles]
    command, limit = [*PYTHON, "jaxspec.planner.worker"], SECONDS_PER_CYCLE * len(cycles)
    with tempfile.TemporaryDirectory() as scratch:
        task = json.dumps(request | {"cycles": shapes, "scratch": scratch}, default=str)  # of paths
        try:
            done = subprocess.run(
                command, env=os.environ | WITHOUT_GPU, input=task, capture_output=True, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired:
            raise CompilerError(f"it took more than {limit} s") from None
        if done.returncode:
            raise CompilerError(f"exit status {done.returncode}, {done.stderr[-2000:].strip()}")
        answers = json.loads((Path(scratch) / ANSWERS).read_text())
    return [CompiledCycle(**each | {name: tuple(starmap(kind, each[name])) for name, kind in ROWS.items()}) for each in answers]


def read_collectives(program: str) -> list[Collective]:
    """The collectives in the text of an optimized program."""
    found = []
    for shapes, kind in _COLLECTIVE.findall(program):
        sizes = [(int(bits or 8) // 8, dimensions) for _, bits, dimensions in _SHAPE.findall(shapes)]
        # The start of an all-gather lists its operand before its result.
        found.append(Collective(kind, max(size * math.prod(map(int, filter(None, each.split(",")))) for size, each in sizes)))
    return found


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def read_launches(dump: Path) -> list[Launch]:
    """The launches of the one program that was dumped there, in order; a conditional and its branches' launches are all listed.

    Raises FileNotFoundError if nothing was dumped.
    """
    sequence = _only(dump, "*thunk_sequence_after_thunk_passes.txt", "*thunk_sequence.txt")
    scopes = _scopes(dump)
    found: list[Launch] = []
    graph: int | None = None  # the indentation of the command buffer that we are in
    branches: list[tuple[int, Sequence[int]]] = []  # and of the branches, with the kinds of cycles that take them
    conditionals: dict[int, str] = {}  # the scope of the last one, by indentation
    scope = ""
    for line in sequence.read_text().splitlines():
        indentation = len(line) - len(line.lstrip())
        while branches and indentation <= branches[-1][0]:
            branches.pop()
        kinds = branches[-1][1] if branches else KINDS
        if (branch := _BRANCH.match(line)) is not None:
            of = conditionals[max(place for place in conditionals if place < indentation)]
            branches.append((indentation, [each for each in kinds if each in _kinds_of(branch[1], of)]))
            continue
        if (row := _ROW.match(line)) is None:
            continue
        number, kind, rest = int(row[2]), row[3], row[4]
        if graph is not None and indentation <= graph:
            graph = None
        if kind == "kCommandBuffer":
            graph = indentation
        elif kind not in NO_LAUNCHES:
            kernel = rest.split(" ")[0] if kind == "kCustomKernel" else ""
            scope = scopes.get(number) or scope
            found.append(Launch(kind, kernel, scope, graph is not None, kinds))
            if kind == "kConditional":
                conditionals[indentation] = scope
    return found


def _kinds_of(branch: str, conditional: str) -> Sequence[int]:
    """The kinds of cycles that take a branch. A switch of four is by kind. A switch of two asks, where a drafter learns, whether
    a request is sampled, and elsewhere for something that no request is assumed to want. XLA compiles it to a test for its first
    branch, which becomes the true branch."""
    if branch.startswith("branch_"):
        return [int(branch.removeprefix("branch_"))]
    is_first = branch == "true_branch"
    if "/learn/" in conditional:
        return KINDS[:1] if is_first else KINDS[1:]
    return KINDS if is_first else ()


def touches_host(dump: Path) -> bool:
    """True if the program uses the host's memory, which XLA marks as memory space 5."""
    return "S(5)" in _only(dump, "*gpu_after_optimizations.txt").read_text()


def read_sorts(program: str) -> tuple[Sort, ...]:
    """The sorts in an optimized program, HLO as text."""
    found = []
    for line in _SORT.finditer(program):
        scope = _OP_NAME.search(line[0])
        found.append(Sort(max(map(int, line[1].split(","))), scope[1] if scope else ""))
    return tuple(found)


def read_custom_calls(dump: Path) -> tuple[dict[str, int], dict[str, int]]:
    """The custom calls of the dumped program with their number: kernels by name, and all others, libraries, by XLA's name."""
    kernels, others = Counter[str](), Counter[str]()
    for line in _only(dump, "*gpu_after_optimizations.txt").read_text().splitlines():
        if (target := _CUSTOM_CALL.search(line)) is None or target[1] == NO_CALL:
            continue
        if target[1] == TOPK:
            kernels["topk"] += 1
        elif target[1] in KERNEL_CALLS and (scope := _OP_NAME.search(line)) is not None:
            kernels[scope[1].split("/")[-2]] += 1  # JAX puts the primitive after the kernel's name
        else:
            others[target[1]] += 1
    return dict(kernels), dict(others)


def _scopes(dump: Path) -> dict[int, str]:
    """The scope of each launch by its number, found through the instruction that the launch was made from."""
    program = _only(dump, "*gpu_after_optimizations.txt").read_text()
    by_instruction = {found[1]: found[2] for line in program.splitlines() if (found := _INSTRUCTION.match(line))}
    metadata = _only(dump, "*thunk_metadata.txt").read_text()
    return {int(number): by_instruction.get(name, "") for name, number in _METADATA.findall(metadata)}


def _only(dump: Path, *patterns: str) -> Path:
    """The largest file that matches the first pattern with any match: besides the program's there may be tiny ones."""
    for pattern in patterns:
        if files := sorted(dump.glob(pattern), key=lambda file: file.stat().st_size):
            return files[-1]
    raise FileNotFoundError(f"XLA dumped nothing that matches {' or '.join(patterns)}")
