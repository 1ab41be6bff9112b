"""What the GPU's compiler made of a cycle, as text and as JSON."""

from typing import Any

from jaxspec.commands.common import table
from jaxspec.gpu_program.compiled import CompiledCycle

STAGES = {
    "draft": "draft: the head, level by level",
    "build_tree": "tree: the best candidates",
    "verify": "verify: the target, once",
    "accept": "accept: the walk, stop tokens, the budget",
    "commit": "commit: accepted keys and values",
    "extend": "extend: the head follows",
    "logprobs": "log probabilities that nobody wants",
    "other": "between them: rows of the state",
}
"""Names of the stages, in the order of a cycle."""


def launches_of(compiled: CompiledCycle | str, num_layers: int) -> str:
    """A table of launches per stage, or why there is none."""
    if isinstance(compiled, str):
        return f"Launches and temporaries are not counted: {compiled}."
    stages = compiled.stages
    known = {name: title for name, title in STAGES.items() if name in stages}
    rows = [[title, f"{stages[name]}"] for name, title in known.items()]
    rows += [[name, f"{count}"] for name, count in stages.items() if name not in known]
    rows += [
        ["together", f"{len(compiled.greedy_launches)}"],
        ["per layer of the target, commit included", f"{compiled.per_layer(num_layers):.1f}"],
    ]
    where = "all in one CUDA graph" if compiled.is_one_graph else "NOT all in CUDA graphs: the host has to wait for some"
    return "\n".join(
        [
            table(["launches of a greedy cycle", "number"], rows),
            f"({where}; compiled in {compiled.compile_seconds:.0f} s, without a GPU, so without autotuning: on one, XLA may choose"
            " other matrix products)",
        ]
    )


def temporaries_as_json(compiled: CompiledCycle | str, left_free: float) -> dict[str, Any]:
    """Counted or not, and what is left for them."""
    if isinstance(compiled, str):
        return {"counted": False, "reason": compiled, "left_free_bytes": left_free}
    return {"counted": True, "bytes": compiled.temporary_bytes, "left_free_bytes": left_free}


def launches_as_json(compiled: CompiledCycle | str, num_layers: int) -> dict[str, Any]:
    """By stage, and in all."""
    if isinstance(compiled, str):
        return {"counted": False, "reason": compiled}
    return {
        "counted": True,
        "stages": compiled.stages,
        "total": len(compiled.greedy_launches),
        "per_target_layer": compiled.per_layer(num_layers),
        "in_one_graph": compiled.is_one_graph,
        "compile_seconds": compiled.compile_seconds,
    }
