"""What stands behind a plan's answer: `jaxspec plan --details`."""

from jaxspec.commands.common import table
from jaxspec.planner.compile import CompiledCycle
from jaxspec.planner.plan import SAMPLING, Plan
from jaxspec.planner.time_model import constants

NOTES = """Memory, bandwidth and arithmetic are the vendor's data-sheet numbers (GB = 10^9).
The least time is a limit and no forecast: it leaves out what launches cost{and_traffic}."""
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


def details(plan: Plan) -> list[str]:
    """Tables of memory, traffic, times and launches, each with its notes."""
    requests = f"{plan.batch} request{'s' * (plan.batch > 1)} of {plan.context:,} tokens"
    moved = plan.cycle.moved | {"together": sum(plan.cycle.moved.values())}
    return [
        table([f"memory of {plan.gpu.memory / 1e9:g} GB", "GB"], memory_rows(plan)),
        model_table(plan),
        kinds_table(plan),
        table([f"one cycle of {requests} moves at least", "GB"], [[name, f"{size / 1e9:.3f}"] for name, size in moved.items()]),
        bounds_table(plan),
        *([] if isinstance(plan.compiled, str) else [launches_of(plan, plan.compiled)]),
        NOTES.format(and_traffic=" and the traffic between GPUs" if plan.models.tp > 1 else ""),
    ]


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


def bounds_table(plan: Plan) -> str:
    """The least time of a cycle, and of a plain step, that the data sheet allows."""
    gpu = plan.gpu
    steps = {f"cycle {plan.tree}": plan.cycle} if plan.tree.num_steps else {}
    rows = []
    for name, step in (steps | {"plain step": plan.plain}).items():
        seconds = (step.memory_seconds(gpu), step.arithmetic_seconds(gpu), step.seconds(gpu))
        rows.append([name, *(f"{1e3 * each:.3g}" for each in seconds)])
    what = f"the least time at {gpu.bandwidth / 1e9:,.0f} GB/s and {gpu.arithmetic / 1e12:g} TFLOP/s"
    return table([what, "memory, ms", "arithmetic, ms", "at least, ms"], rows)


def model_table(plan: Plan) -> str:
    """The time model, part by part, and what it assumes."""
    modelled, assumed = plan.modelled(), constants(plan.gpu, plan.copy_speed)
    columns = list(modelled.values())
    rows = [[part, *(f"{column[part]:.2f}" if part in column else "" for column in columns)] for part in columns[0]]
    rows.append(["together", *(f"{sum(column.values()):.2f}" for column in columns)])
    return "\n".join(
        [
            table(["time of greedy requests, by a MODEL", *(f"{name}, ms" for name in modelled)], rows),
            f"(assumed: copies at {assumed['copy_bytes_per_second'] / 1e12:.2f} TB/s, products of a few rows at "
            f"{assumed['products_share_of_copy_speed']:.0%} of that, {1e6 * assumed['seconds_per_launch']:g} µs per launch in a "
            f"CUDA graph, {1e6 * assumed['seconds_of_attention_without_its_cache']:g} µs per attention and layer beside its cache; "
            "jaxspec/planner/time_model.py explains them)",
        ]
    )


def kinds_table(plan: Plan) -> str:
    """The model by kind of sampling: a batch takes the time of its most demanding request."""
    rows = [[name, *(f"{each:.2f}" for each in plan.milliseconds(kind).values())] for kind, name in enumerate(SAMPLING)]
    return table(["by what one request of the batch asks for", *(f"{name}, ms" for name in plan.milliseconds())], rows)


def launches_of(plan: Plan, compiled: CompiledCycle) -> str:
    stages, num_layers = compiled.stages, plan.models.target.config.num_layers
    ordered = dict.fromkeys(name for name in (*STAGES, *stages) if name in stages)
    rows = [[STAGES.get(name, name), f"{stages[name]}"] for name in ordered]
    rows += [
        ["together", f"{len(compiled.greedy_launches)}"],
        ["per layer of the target, commit included", f"{compiled.per_layer(num_layers):.1f}"],
    ]
    if compiled.collectives:
        rows.append(["sums and gatherings between GPUs, of them", f"{len(compiled.collectives)}"])
    rows += [[f"together with {name}", f"{len(compiled.launches_of(kind))}"] for kind, name in enumerate(SAMPLING) if kind]
    where = "all in one CUDA graph, " if compiled.is_one_graph and plan.in_graph else ""
    return "\n".join(
        [
            table(["launches of a greedy cycle", "number"], rows),
            f"({where}driver of CUDA {plan.driver} assumed; compiled in {compiled.compile_seconds:.0f} s, without a GPU, so "
            f"without autotuning: on one, XLA may choose other matrix products)",
        ]
    )
