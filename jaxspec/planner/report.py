"""A plan, as text and as JSON."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from jaxspec.commands.common import listing, table
from jaxspec.config import PLAIN, TreeShape
from jaxspec.engine.device_state import GRAPHS_SINCE, makes_graphs
from jaxspec.models.sharing import Shares
from jaxspec.planner.compile import KINDS, CompiledCycle
from jaxspec.planner.estimate import CycleCost, Memory, Pair
from jaxspec.planner.gpus import DRIVER, Gpu
from jaxspec.planner.time_model import constants, counts_of, time_model

NOTES = """Memory, bandwidth and arithmetic are the vendor's data-sheet numbers (GB = 10^9), which no program reaches:
"at least" and "at most" are limits, not forecasts. They leave out what launches cost{and_traffic}."""
SAMPLING = ("greedy", "temperature", "top_p, top_k or min_p", "penalties, bias or bans")
"""Names of the kinds of cycles."""
MOST_FOR_JAX = 0.95
"""The share of memory that JAX may use if nothing else runs on the GPU."""

STAGES = {
    "draft": "draft: the head, level by level",
    "build_tree": "tree: the best candidates",
    "verify": "verify: the target, once",
    "accept": "accept: the walk, stop tokens, the budget",
    "commit": "commit: accepted keys and values",
    "extend": "extend: the head follows",
    "logprobs": "logprobs branch (not taken)",
    "other": "other: rows of the state",
}
"""Names of the stages, in the order of a cycle."""


@dataclass(frozen=True)
class Plan:
    """The request and its results."""

    model: str
    models: Pair
    gpu: Gpu
    tree: TreeShape
    batch: int
    context: int
    longest: int
    """The model's context length, the default limit of a request."""
    memory: Memory
    cycle: CycleCost
    plain: CycleCost
    accept_lengths: tuple[float, ...]
    compiled: CompiledCycle | str
    """The compiled cycle, or the reason why it was not compiled."""
    copy_speed: float | None = None
    """Bytes per second that were given in place of the data sheet's."""
    driver: str = DRIVER
    """The CUDA version of its driver."""
    nodes: int = 1
    """Machines that the GPUs are in."""
    smallest: int | None = None
    """GPUs that are enough for the batch, a power of two; None: no number that was tried."""

    @property
    def temporaries(self) -> int:
        """Temporary bytes of the cycle; 0 if not counted."""
        return 0 if isinstance(self.compiled, str) else self.compiled.temporary_bytes

    @property
    def fits(self) -> bool:
        """True if the batch fits, with the context of each request and the cycle's temporaries."""
        return self.memory.requests(self.context) >= self.batch and self.temporaries <= self.memory.left_free

    @property
    def break_even(self) -> float:
        """The accept length at which speculation is as fast as plain decoding."""
        return self.cycle.seconds(self.gpu) / self.plain.seconds(self.gpu)

    @property
    def modelled(self) -> dict[str, dict[str, float]]:
        """The time model's parts in milliseconds, of a greedy cycle and a plain step."""
        return self.modelled_for(0)

    def modelled_for(self, kind: int) -> dict[str, dict[str, float]]:
        """`modelled` of cycles of another kind (decoding.settings.SamplingKind)."""
        counts = None if isinstance(self.compiled, str) else counts_of(self.compiled, self.tree)
        trees = {f"cycle {self.tree}": self.tree} if self.tree.num_steps else {}
        load = self.batch, self.context, self.gpu, counts, self.copy_speed
        return {
            name: time_model(self.models, tree, *load, kind=kind, in_graph=self.in_graph, nodes=self.nodes)
            for name, tree in (trees | {"plain step": PLAIN}).items()
        }

    @property
    def in_graph(self) -> bool:
        """Whether cycles are CUDA graphs."""
        return makes_graphs(self.driver)

    def speed(self, accept_length: float) -> float:
        """Tokens per second of all requests together, at most."""
        return self.batch * accept_length / self.cycle.seconds(self.gpu)


def show(plan: Plan) -> str:
    """The plan as text."""
    models, gpu, head = plan.models, plan.gpu, plan.models.head_config
    gpus = f"{models.tp} x {gpu.name}, of each" if models.tp > 1 else f"one {gpu.name}"
    title = f"{plan.model} {f'with {head.algorithm} drafts' if head else 'alone'}, {models.dtype}, on {gpus}:"
    requests = f"{plan.batch} request{'s' * (plan.batch > 1)} of {plan.context:,} tokens"
    return "\n\n".join(
        [
            title,
            table([f"memory of {gpu.memory / 1e9:g} GB", "GB"], memory_rows(plan)),
            listing(fit_lines(plan)),
            table([f"one cycle of {requests} moves at least", "GB"], moved_rows(plan)),
            time_table(plan),
            speed_table(plan),
            *([model_table(plan), kinds_table(plan)] if plan.modelled else []),
            launches_of(plan),
            NOTES.format(and_traffic=" and the traffic between GPUs" if models.tp > 1 else ""),
        ]
    )


def memory_rows(plan: Plan) -> list[list[str]]:
    """One GPU's memory, part by part."""
    memory, models = plan.memory, plan.models
    sizes = {
        f"not for JAX ({1 - memory.jax_share:.0%})": memory.total - memory.managed,
        f"left free for temporaries ({1 - memory.mem_fraction:.0%} of the rest)": memory.left_free,
        **({} if isinstance(plan.compiled, str) else {"  of which the cycle uses": plan.temporaries}),
        f"target, {models.target.weights.parameters:,} parameters": models.target.weights.total / models.tp,
    }
    if models.head:
        sizes[f"head, {models.head.weights.parameters:,} parameters"] = models.head.weights.total / models.tp
    sizes["cache" if memory.room >= 0 else "MISSING"] = abs(memory.room)
    return [[name, f"{size / 1e9:.2f}"] for name, size in sizes.items()]


def fit_lines(plan: Plan) -> dict[str, str]:
    """Tokens and requests that fit in the cache, and advice if they are too few."""
    memory, models = plan.memory, plan.models
    own = f"{memory.cache_per_token / 1024:g} KiB per token"
    if models.head:
        own += f", {models.head.cache / models.tp / 1024:g} of them the head's"
    lines = {
        "cache": f"{memory.tokens:,} tokens ({own})",
        "requests": f"{memory.requests(plan.context):,} of {plan.context:,} tokens at once",
        "fits": "yes" if plan.fits else f"NO: {missing(plan)}",
    }
    if not plan.fits and replace(plan, memory=replace(memory, jax_share=MOST_FOR_JAX)).fits:
        lines["but"] = f"it does with XLA_PYTHON_CLIENT_MEM_FRACTION={MOST_FOR_JAX:g}; see --jax-memory-share {MOST_FOR_JAX:g}"
    elif 0 < memory.tokens < plan.longest:
        lines["beware"] = f"the model's context is {plan.longest:,} tokens: serve with --context-length {memory.tokens} or less"
    if plan.smallest is not None and (plan.smallest > 1 or models.tp > 1):
        lines["GPUs"] = f"{plan.smallest} of these are the fewest for this batch and context: --tp {plan.smallest}"
    if models.tp > 1 and not Shares(models.target.config, models.tp).splits_heads:
        lines["and"] = f"{models.tp} GPUs can't divide the attention heads: each has all of them"
    return lines


def missing(plan: Plan) -> str:
    """The reasons why it does not fit."""
    lacks = []
    if plan.memory.requests(plan.context) < plan.batch:
        lacks.append(f"{plan.batch * plan.context:,} tokens of cache are needed")
    if plan.temporaries > plan.memory.left_free:
        lacks.append(
            f"a cycle takes {plan.temporaries / 1e9:.2f} GB while it runs: lower --mem-fraction-static, the batch or the tree"
        )
    return "; ".join(lacks)


def moved_rows(plan: Plan) -> list[list[str]]:
    """Bytes that a cycle moves, part by part and in total."""
    rows = [[name, f"{size / 1e9:.3f}"] for name, size in plan.cycle.moved.items()]
    return [*rows, ["together", f"{sum(plan.cycle.moved.values()) / 1e9:.3f}"]]


def time_table(plan: Plan) -> str:
    """The limits of a cycle's time, and of a plain step's."""
    gpu = plan.gpu
    steps = {f"cycle {plan.tree}": plan.cycle} if plan.tree.num_steps else {}
    rows = []
    for name, step in (steps | {"plain step": plan.plain}).items():
        seconds = (step.memory_seconds(gpu), step.arithmetic_seconds(gpu), step.seconds(gpu))
        rows.append([name, *(f"{1e3 * each:.3g}" for each in seconds)])
    what = f"at {gpu.bandwidth / 1e9:,.0f} GB/s and {gpu.arithmetic / 1e12:g} TFLOP/s"
    return table([what, "memory, ms", "arithmetic, ms", "at least, ms"], rows)


def speed_table(plan: Plan) -> str:
    """Tokens per second by accept length, and where speculation begins to pay."""
    alone = plan.batch == 1
    header = ["accept length", "tokens/s at most", *([] if alone else ["of each request"]), "times plain decoding"]
    rows = []
    for length in plan.accept_lengths:
        each = [] if alone else [f"{plan.speed(length) / plan.batch:,.0f}"]
        rows.append([f"{length:g}", f"{plan.speed(length):,.0f}", *each, f"{length / plan.break_even:.2f}"])
    if plan.tree.num_steps:
        rows.insert(0, [f"{plan.break_even:.2f}, break-even", f"{plan.speed(plan.break_even):,.0f}", *([""] * (not alone)), "1.00"])
    return table(header, rows)


def model_table(plan: Plan) -> str:
    """The time model, part by part, and what it assumes."""
    modelled, assumed = plan.modelled, constants(plan.gpu, plan.copy_speed)
    columns = list(modelled.values())
    rows = [[part, *(f"{column[part]:.2f}" if part in column else "" for column in columns)] for part in columns[0]]
    rows.append(["together", *(f"{sum(column.values()):.2f}" for column in columns)])
    return "\n".join(
        [
            table(["a MODEL of the time of greedy requests, not a measurement", *(f"{name}, ms" for name in modelled)], rows),
            f"(assumed: copies at {assumed['copy_bytes_per_second'] / 1e12:.2f} TB/s, products of a few rows at "
            f"{assumed['products_share_of_copy_speed']:.0%} of that, {1e6 * assumed['seconds_per_launch']:g} µs per launch in a "
            f"CUDA graph, {1e6 * assumed['seconds_of_attention_without_its_cache']:g} µs per attention and layer beside its cache; "
            "jaxspec/planner/time_model.py explains them)",
        ]
    )


def kinds_table(plan: Plan) -> str:
    """The model by kind of sampling: a batch takes the time of its most demanding request."""
    columns = [plan.modelled_for(kind) for kind in KINDS]
    rows = [
        [name, *(f"{sum(parts.values()):.2f}" for parts in column.values())] for name, column in zip(SAMPLING, columns, strict=True)
    ]
    return table(["the MODEL by what one request of the batch asks for", *(f"{name}, ms" for name in columns[0])], rows)


def launches_of(plan: Plan) -> str:
    """A table of launches per stage, or why there is none."""
    compiled, num_layers = plan.compiled, plan.models.target.config.num_layers
    if isinstance(compiled, str):
        return f"Launches and temporaries are not counted: {compiled}."
    stages = compiled.stages
    ordered = dict.fromkeys(name for name in (*STAGES, *stages) if name in stages)
    rows = [[STAGES.get(name, name), f"{stages[name]}"] for name in ordered]
    rows += [
        ["together", f"{len(compiled.greedy_launches)}"],
        ["per layer of the target, commit included", f"{compiled.per_layer(num_layers):.1f}"],
    ]
    if compiled.collectives:
        rows.append(["sums and gatherings between GPUs, of them", f"{len(compiled.collectives)}"])
    rows += [[f"together with {name}", f"{len(compiled.launches_of(kind))}"] for kind, name in enumerate(SAMPLING) if kind]
    where = "all in one CUDA graph" if compiled.is_one_graph else "NOT all in CUDA graphs: the host has to wait for some"
    if not plan.in_graph:
        where = f"NOT in a CUDA graph, which needs a driver of CUDA {'.'.join(map(str, GRAPHS_SINCE))} or newer"
    spills = f"\nSome kernel spills registers to memory: {compiled.spills}" if compiled.spills else ""
    return "\n".join(
        [
            table(["launches of a greedy cycle", "number"], rows),
            f"({where}; driver of CUDA {plan.driver} assumed; compiled in {compiled.compile_seconds:.0f} s, without a GPU, so "
            f"without autotuning: on one, XLA may choose other matrix products){spills}",
        ]
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan for programs: bytes and seconds of each GPU, tokens of all requests."""
    models, gpu, memory = plan.models, plan.gpu, plan.memory
    parts = {"target": models.target} | ({"head": models.head} if models.head else {})
    return {
        "model": plan.model,
        "head": models.head_config.algorithm if models.head_config else None,
        "dtype": models.dtype,
        "gpu": {
            "name": gpu.name,
            "memory": gpu.memory,
            "bandwidth": gpu.bandwidth,
            "arithmetic": gpu.arithmetic,
            "source": "the vendor's data sheet, unless given",
        },
        "tp": models.tp,
        "nodes": plan.nodes,
        "smallest_tp": plan.smallest,
        "tree": plan.tree.name,
        "batch": plan.batch,
        "context": plan.context,
        "parameters": {name: part.weights.parameters for name, part in parts.items()},
        "weight_bytes": {name: part.weights.total / models.tp for name, part in parts.items()},
        "cache_bytes_per_token": {name: part.cache / models.tp for name, part in parts.items()},
        "cuda_driver": plan.driver,
        **compiled_as_json(plan.compiled, memory.left_free, models.target.config.num_layers),
        "cache_tokens": memory.tokens,
        "concurrent_requests": memory.requests(plan.context),
        "fits": plan.fits,
        "cycle": limits(plan.cycle, gpu),
        "plain_step": limits(plan.plain, gpu),
        "time_model": {
            "is_a_measurement": False,
            "milliseconds": plan.modelled,
            "together": totals(plan.modelled),
            "by_sampling": {name: totals(plan.modelled_for(kind)) for kind, name in enumerate(SAMPLING)},
            "assumed": constants(gpu, plan.copy_speed),
        },
        "break_even_accept_length": plan.break_even,
        "tokens_per_second": {f"{length:g}": plan.speed(length) for length in plan.accept_lengths},
    }


def totals(modelled: dict[str, dict[str, float]]) -> dict[str, float]:
    """Milliseconds of whole cycles."""
    return {name: sum(parts.values()) for name, parts in modelled.items()}


def limits(step: CycleCost, gpu: Gpu) -> dict[str, Any]:
    """A cycle's bytes and times."""
    return {
        "moved_bytes": step.moved,
        "operations": step.operations,
        "memory_seconds": step.memory_seconds(gpu),
        "arithmetic_seconds": step.arithmetic_seconds(gpu),
        "seconds_at_least": step.seconds(gpu),
    }


def compiled_as_json(compiled: CompiledCycle | str, left_free: float, num_layers: int) -> dict[str, dict[str, Any]]:
    """Temporaries, in bytes, with those left for them, and launches by stage and in total; or why they are not counted."""
    if isinstance(compiled, str):
        unknown = {"counted": False, "reason": compiled}
        return {"temporaries": unknown | {"left_free_bytes": left_free}, "launches": unknown}
    launches = {
        "counted": True,
        "stages": compiled.stages,
        "total": len(compiled.greedy_launches),
        "per_target_layer": compiled.per_layer(num_layers),
        "total_by_sampling": {name: len(compiled.launches_of(kind)) for kind, name in enumerate(SAMPLING)},
        "in_one_graph": compiled.is_one_graph,
        "collectives": dict(Counter(each.kind for each in compiled.collectives)),
        "spills_registers": bool(compiled.spills),
        "compile_seconds": compiled.compile_seconds,
    }
    temporaries = {"counted": True, "bytes": compiled.temporary_bytes, "left_free_bytes": left_free}
    return {"temporaries": temporaries, "launches": launches}
