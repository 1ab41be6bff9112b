"""Runs prompts through an engine with a fixed number of requests in flight, takes times, and compares engines side by side."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from jaxspec import SamplingParams, TreeShape
from jaxspec.commands import workbench
from jaxspec.commands.workbench import CompilationCounter, mean
from jaxspec.engine.engine import Engine

from .options import BenchmarkError


@dataclass
class Load:
    """One run of some prompts, or several added up."""

    seconds: float = 0.0
    tokens: list[tuple[int, ...]] = field(default_factory=list)
    """Of each prompt."""
    accept_lengths: list[tuple[int, ...]] = field(default_factory=list)
    """Of each prompt: tokens of every verification."""
    host_seconds: float = 0.0
    launching_seconds: float = 0.0
    waiting_seconds: float = 0.0
    cycles: int = 0
    """Of the engine, as the three above in EngineStats; one cycle serves a whole batch."""

    def __add__(self, other: "Load") -> "Load":
        return Load(*(mine + its for mine, its in zip(vars(self).values(), vars(other).values(), strict=True)))

    @property
    def verifications(self) -> list[int]:
        """Tokens of every verification of every request."""
        return [length for each in self.accept_lengths for length in each]

    @property
    def accept_length(self) -> float:
        """Mean tokens per verification, bonus included."""
        return mean(self.verifications)

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def per_cycle_ms(self) -> dict[str, float]:
        """The host's work, launching programs, and waiting for the device."""
        seconds = {"host": self.host_seconds, "launch": self.launching_seconds, "wait": self.waiting_seconds}
        return {what: 1e3 * each / max(1, self.cycles) for what, each in seconds.items()}


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    concurrency: int,
    tree: TreeShape | None = None,
) -> Load:
    """As workbench.run; it also tells the engine's times."""
    before, done, after = engine.stats(), workbench.run(engine, prompts, params, concurrency, tree), engine.stats()
    return Load(
        done.seconds,
        done.tokens,
        [output.speculation.accept_lengths for output in done.outputs],
        after.host_seconds - before.host_seconds,
        after.launching_seconds - before.launching_seconds,
        after.waiting_seconds - before.waiting_seconds,
        after.cycles - before.cycles,
    )


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
    return [sum(each, Load()) for each in loads]


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
