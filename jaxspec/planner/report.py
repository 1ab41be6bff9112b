"""A plan as text: the verdict, one table, and what to know beside it."""

from dataclasses import replace

from jaxspec.commands.common import table
from jaxspec.engine.device import GRAPHS_SINCE
from jaxspec.models.sharing import Shares
from jaxspec.planner.details import details
from jaxspec.planner.plan import Plan

MOST_FOR_JAX = 0.95
"""The share of memory that JAX may use if nothing else runs on the GPU."""


def show(plan: Plan, *, with_details: bool = False) -> str:
    more = details(plan) if with_details else ["--details shows what these are made of: memory, the parts of the time, launches."]
    return "\n\n".join([verdict(plan), answer_table(plan), "\n".join(notes(plan)), *more])


def verdict(plan: Plan) -> str:
    """One line: whether it fits and how long a cycle takes, or what is missing and what to do."""
    number, requests = plan.memory.requests(plan.context), requests_of(plan.batch, plan.context)
    if plan.fits:
        of = f" of {plan.batch}" if plan.batch > 1 else ""
        what = "a cycle" if plan.tree.num_steps else "a step"
        return f"fits {gpus(plan)}: {requests_of(number, plan.context)}, {shown(plan.forecast)} {what}{of}"
    lacks = []
    if number < plan.batch:
        needed = (plan.batch * plan.memory.taken(plan.context) * plan.memory.cache_per_token - plan.memory.room) / 1e9
        lacks.append(f"{needed:.2f} GB are missing for {requests}")
    if plan.temporaries > plan.memory.left_free:
        lacks.append(f"a cycle takes {plan.temporaries / 1e9:.2f} GB while it runs, and {plan.memory.left_free / 1e9:.2f} are left")
    return f"does not fit {gpus(plan)}: {', and '.join(lacks)}; {advice(plan)}"


def advice(plan: Plan) -> str:
    """What makes it fit."""
    memory, ways = plan.memory, []
    if replace(plan, memory=replace(memory, jax_share=MOST_FOR_JAX)).fits:
        ways.append(f"XLA_PYTHON_CLIENT_MEM_FRACTION={MOST_FOR_JAX:g} (here --jax-memory-share {MOST_FOR_JAX:g})")
    if plan.temporaries > memory.left_free:
        ways.append("a lower --mem-fraction-static, a smaller batch or a smaller tree")
    if 0 < memory.requests(plan.context) < plan.batch:
        ways.append(f"--batch {memory.requests(plan.context)}")
    elif 0 < (context := memory.tokens // plan.batch // memory.page_size * memory.page_size) < plan.context:
        ways.append(f"--context {context}")
    if plan.fewer_bits:
        ways.append(f"--quantization {plan.fewer_bits}")
    if plan.smallest is not None and plan.smallest > plan.models.tp:
        ways.append(f"--tp {plan.smallest}")
    return f"try {', or '.join(ways)}" if ways else "it needs a larger GPU, or more of them than can share it"


def answer_table(plan: Plan) -> str:
    memory, models, head = plan.memory, plan.models, plan.models.head_config
    number = f"{plan.batch} request{'s' * (plan.batch > 1)}"
    per_token = f"{memory.cache_per_token / 1024:g} KiB per token"
    rows = [
        ["weights", f"{models.weights / 1e9:.2f} GB"],
        ["cache" if memory.room >= 0 else "missing for the weights", f"{abs(memory.room) / 1e9:.2f} GB"],
        [f"tokens in the cache, {per_token}", f"{memory.tokens:,}"],
        [f"requests of {plan.context:,} tokens in the cache", f"{memory.requests(plan.context):,}"],
    ]
    times = list(plan.milliseconds().values())
    if plan.tree.num_steps:
        rows += [
            [f"cycle of {number}, tree {plan.tree}", shown(times[0])],
            [f"step of {number} without drafts", shown(times[1])],
            ["accept length from which drafts pay", f"{plan.break_even:.2f}"],
        ]
    else:
        rows.append([f"step of {number}", shown(times[0])])
    for length in plan.accept_lengths:
        at = f" at accept length {length:g}" if plan.tree.num_steps else ""
        gain = f", {length / plan.break_even:.2f} times plain decoding" if plan.tree.num_steps else ""
        each = f" ({plan.speed(length) / plan.batch:,.0f} each)" if plan.batch > 1 else ""
        rows.append([f"tokens/s{at}", f"{plan.speed(length):,.0f}{each}{gain}"])
    drafts = f" with {head.algorithm} drafts" if head else ""
    return table([f"{plan.model}{drafts}, {models.dtype}", f"{'each of ' * (models.tp > 1)}{gpus(plan)}"], rows)


def notes(plan: Plan) -> list[str]:
    """What the numbers do not say, one sentence a line."""
    memory, models, compiled = plan.memory, plan.models, plan.compiled
    lines = ["Times are a model's forecast for greedy requests, not a measurement."]
    if isinstance(compiled, str):
        lines.append(f"Launches and temporaries are not counted: {compiled}.")
    elif not plan.in_graph:
        needed = ".".join(map(str, GRAPHS_SINCE))
        lines.append(f"The cycle is NOT in a CUDA graph, which needs a driver of CUDA {needed} or newer.")
    elif not compiled.is_one_graph:
        lines.append("The cycle is NOT all in CUDA graphs: the host has to wait for some launches.")
    if not isinstance(compiled, str) and compiled.spills:
        lines.append(f"Some kernel spills registers to memory: {compiled.spills}")
    if plan.fits and memory.tokens < plan.longest:
        lines.append(f"The model's context is {plan.longest:,} tokens: serve with --context-length {memory.tokens} or less.")
    if plan.context > plan.longest:
        lines.append(f"The model was made for {plan.longest:,} tokens: text beyond that may be poor.")
    if plan.fits and plan.smallest is not None and models.tp > 1:
        lines.append(f"The fewest of these GPUs for this batch and context: --tp {plan.smallest}.")
    if models.tp > 1 and not Shares(models.target.config, models.tp).splits_heads:
        lines.append(f"{models.tp} GPUs can't divide the attention heads: each has all of them.")
    return lines


def shown(milliseconds: float) -> str:
    """In:  5.837
    Out: about 5.8 ms"""
    return f"about {milliseconds:.2g} ms" if milliseconds < 10 else f"about {milliseconds:,.0f} ms"


def requests_of(number: int, context: int) -> str:
    """In:  2, 4096
    Out: 2 requests of 4,096 tokens"""
    return f"{number:,} request{'s' * (number != 1)} of {context:,} tokens"


def gpus(plan: Plan) -> str:
    return f"{plan.models.tp} {plan.gpu.name}" if plan.models.tp > 1 else f"one {plan.gpu.name}"
