"""The four parts of a cycle as programs of their own, and the whole beside them."""

from functools import partial
from statistics import median

from benchmarks import stages as parts_of
from benchmarks.gpu.cycles import lower_cycle, time_steps
from benchmarks.gpu.kernels import Cases
from benchmarks.gpu.lab import Lab
from benchmarks.gpu.state import make_batch
from jaxspec.config import SpecConfig


def stages(lab: Lab) -> Cases:
    """Per tree one case, which measures all parts in turn, at batch 1 and the context of the goals."""
    for spec in lab.size.staged_trees:
        case = {"tree": str(spec), "batch": 1, "context": lab.size.goal_context}
        yield case, partial(time_stages, lab, spec)


def time_stages(lab: Lab, spec: SpecConfig) -> dict:
    """Milliseconds of each part, of their sum, and of the whole cycle."""
    made = make_batch(lab, 1, lab.size.goal_context)
    try:
        batch = parts_of.Batch(made.state, made.rows, made.page_table)
        parts, made.state = parts_of.time_parts(lab.merge, lab.params, batch, spec, lambda call: lab.time(call).values)
        made.put_back()
        whole = lower_cycle(lab, spec, 1, lab.size.goal_context).compile()
        whole_ms, _ = time_steps(lab, made, lambda state: whole(lab.params, state, made.rows, made.page_table))
    finally:
        made.delete()
    total = sum(median(values) for values in parts.values())
    return {"milliseconds": {**parts, "whole cycle": whole_ms}, "sum_over_whole": total / median(whole_ms)}
