"""A plan: a model, a GPU and a load, and what follows from them. Its JSON."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from jaxspec.engine.device import makes_graphs
from jaxspec.planner.compile import CompiledCycle
from jaxspec.planner.estimate import CycleCost, Memory, Pair
from jaxspec.planner.gpus import DRIVER, Gpu
from jaxspec.planner.time_model import constants, counts_of, time_model
from jaxspec.tree_shape import PLAIN, TreeShape

SAMPLING = ("greedy", "temperature", "top_p, top_k or min_p", "penalties, bias or bans")
"""Names of the kinds of cycles."""


@dataclass(frozen=True)
class Plan:
    """What was asked for, and the results."""

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
    """The smallest power of two of GPUs that suffices for the batch; None: no number that was tried does."""
    fewer_bits: str | None = None
    """For a batch that does not fit: the --quantization with which it does. None: none of those that were tried."""

    @property
    def temporaries(self) -> int:
        """Temporary bytes of the cycle; 0 if not counted."""
        return 0 if isinstance(self.compiled, str) else self.compiled.temporary_bytes

    @property
    def fits(self) -> bool:
        """True if the batch fits, with the context of each request and the cycle's temporaries."""
        return self.memory.requests(self.context) >= self.batch and self.temporaries <= self.memory.left_free

    def milliseconds(self, kind: int = 0) -> dict[str, float]:
        """The time model's forecast for a cycle and a plain step, or for the latter only; the times shown are greedy ones."""
        return {name: sum(parts.values()) for name, parts in self.modelled(kind).items()}

    @property
    def forecast(self) -> float:
        """The greedy forecast for a cycle, or for a plain step if the tree is plain."""
        return next(iter(self.milliseconds().values()))

    @property
    def break_even(self) -> float:
        """The accept length at which speculation is as fast as plain decoding, by that forecast."""
        cycle, *plain = self.milliseconds().values()
        return cycle / plain[0] if plain else 1.0

    def speed(self, accept_length: float) -> float:
        """Tokens per second of all requests together, by that forecast."""
        return 1e3 * self.batch * accept_length / self.forecast

    def modelled(self, kind: int = 0) -> dict[str, dict[str, float]]:
        """The time model's parts in milliseconds, of a cycle of this kind (decoding.settings.SamplingKind) and a plain step."""
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


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan for programs: bytes and seconds of each GPU, tokens of all requests.

    Times and speeds outside of "time_model" are the limits that the data sheet's bandwidth and arithmetic set.
    """
    bound = plan.cycle.seconds(plan.gpu)
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
            "milliseconds": plan.modelled(),
            "together": plan.milliseconds(),
            "by_sampling": {name: plan.milliseconds(kind) for kind, name in enumerate(SAMPLING)},
            "break_even_accept_length": plan.break_even,
            "tokens_per_second": {f"{length:g}": plan.speed(length) for length in plan.accept_lengths},
            "assumed": constants(gpu, plan.copy_speed),
        },
        "break_even_accept_length": bound / plan.plain.seconds(gpu),
        "tokens_per_second": {f"{length:g}": plan.batch * length / bound for length in plan.accept_lengths},
    }


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
