"""Runs prompts through an engine with a fixed number of requests in flight, takes times, and compares engines side by side."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from jaxspec import SamplingParams, TreeShape
from jaxspec.commands.workbench import CompilationCounter, mean
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import GenerationRequest
from jaxspec.engine.stats import EngineStats

from .options import BenchmarkError


@dataclass
class Load:
    """One run of some prompts. The dictionaries are keyed by the number of the prompt."""

    seconds: float = 0.0
    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    accept_lengths: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Tokens of every verification."""
    host_ms: float = 0.0
    """Host time per cycle, in milliseconds."""
    launch_ms: float = 0.0
    """Time to launch the programs of a cycle, in milliseconds."""
    wait_ms: float = 0.0
    """Time the host waited for the device, in milliseconds per cycle."""
    cycles: int = 0
    """Cycles of the engine; one cycle serves a whole batch."""

    @property
    def verifications(self) -> list[int]:
        """Tokens of every verification of every request."""
        return [length for each in self.accept_lengths.values() for length in each]

    @property
    def accept_length(self) -> float:
        """Mean tokens per verification, bonus included."""
        return mean(self.verifications)

    def count_equal(self, other: "Load") -> int:
        """The number of prompts with the same tokens in both runs."""
        return sum(self.tokens[number] == tokens for number, tokens in other.tokens.items())

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens.values())) / self.seconds


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    concurrency: int,
    tree: TreeShape | None = None,
) -> Load:
    """Keeps `concurrency` requests in the engine until every prompt is done. `tree` is the requests' draft tree (Engine.add)."""
    load, before, started = Load(), engine.stats(), time.perf_counter()
    waiting = list(reversed(range(len(prompts))))
    numbers: dict[str, int] = {}
    while waiting or engine.has_work:
        while waiting and len(numbers) < concurrency:
            number = waiting.pop()
            numbers[engine.add(GenerationRequest(tuple(prompts[number]), params[number], tree=tree)).id] = number
        for update in engine.step():
            if update.output:
                number = numbers.pop(update.request_id)
                if update.output.error:
                    raise BenchmarkError(update.output.error)
                load.tokens[number] = update.output.token_ids
                load.accept_lengths[number] = update.output.speculation.accept_lengths
    load.seconds = time.perf_counter() - started
    load.host_ms, load.launch_ms, load.wait_ms = per_cycle(before, after := engine.stats())
    load.cycles = after.cycles - before.cycles
    return load


def per_cycle(before: EngineStats, after: EngineStats) -> tuple[float, float, float]:
    """Milliseconds per cycle: host work, launching, and waiting for the device."""
    cycles = max(1, after.cycles - before.cycles)
    host, launching = after.host_seconds - before.host_seconds, after.launching_seconds - before.launching_seconds
    waiting = after.waiting_seconds - before.waiting_seconds
    return 1e3 * host / cycles, 1e3 * launching / cycles, 1e3 * waiting / cycles


def parts_of(requests: int, batch: int) -> list[range]:
    """Splits a round into parts that run in one go: one request at batch 1, otherwise two per row. At least two whole parts.

    In: 3, 1  Out: 0..0, 1..1, 2..2    In: 9, 4  Out: 0..7, 8..15
    """
    size = 1 if batch == 1 else 2 * batch
    return [range(first, first + size) for first in range(0, max(requests, size + 1), size)]


def side_by_side[Way](
    ways: Sequence[Way], parts: Sequence[range], run_part: Callable[[Way, range], Load], number: int
) -> list[Load]:
    """Runs every way over all parts and returns one load per way. The order is reversed every other part, so that a machine that
    changes its speed slows all ways alike; `number` is the number of the round."""
    loads: list[list[Load]] = [[] for _ in ways]
    for index, part in enumerate(parts):
        order = range(len(ways)) if (index + number) % 2 == 0 else reversed(range(len(ways)))
        for way in order:
            loads[way].append(run_part(ways[way], part))
    return [merged(each) for each in loads]


def merged(loads: Sequence[Load]) -> Load:
    """Joins consecutive loads: requests are renumbered, times per cycle become means."""
    whole, first = Load(), 0
    for load in loads:
        whole.seconds += load.seconds
        for name in ("tokens", "accept_lengths"):
            vars(whole)[name].update({first + number: value for number, value in vars(load)[name].items()})
        for name in ("host_ms", "launch_ms", "wait_ms"):
            vars(whole)[name] += vars(load)[name] * load.cycles
        whole.cycles += load.cycles
        first += len(load.tokens)
    for name in ("host_ms", "launch_ms", "wait_ms"):
        vars(whole)[name] /= max(1, whole.cycles)
    return whole


def alternate[Way](ways: Sequence[Way], rounds: int) -> Iterator[tuple[int, Way]]:
    """Every way once per round, in reversed order every other round, so that drift of the machine affects all alike.

    In: ["a", "b"], 2  Out: (0, a), (0, b), (1, b), (1, a)
    """
    for number in range(rounds):
        for way in ways if number % 2 == 0 else reversed(ways):
            yield number, way


def check_nothing_compiled(counter: CompilationCounter, before: int) -> None:
    """Raises BenchmarkError if anything was compiled since the count was `before`."""
    if counter.count != before:
        raise BenchmarkError(f"{counter.count - before} programs were compiled during the timed part, so its figures are worthless")
