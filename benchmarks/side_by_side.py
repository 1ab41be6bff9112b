"""Several ways to run the same requests, side by side."""

from collections.abc import Callable, Iterator, Sequence

from jaxspec.commands.workbench import CompilationCounter, Pass

from .options import BenchmarkError


def parts_of(requests: int, batch: int) -> list[range]:
    """Splits a round into parts that run in one go: one request at batch 1, otherwise two per row. At least two whole parts.

    In: 3, 1  Out: 0..0, 1..1, 2..2    In: 9, 4  Out: 0..7, 8..15
    """
    size = 1 if batch == 1 else 2 * batch
    return [range(first, first + size) for first in range(0, max(requests, size + 1), size)]


def side_by_side[Way](
    ways: Sequence[Way], parts: Sequence[range], run_part: Callable[[Way, range], Pass], number: int
) -> list[Pass]:
    """Runs every way over all parts and returns one pass per way. The order is reversed every other part, so that a machine that
    changes its speed slows all ways alike; `number` is the number of the round."""
    passes: list[list[Pass]] = [[] for _ in ways]
    order = range(len(ways)) if number % 2 == 0 else range(len(ways))[::-1]
    for index, way in alternate(order, len(parts)):
        passes[way].append(run_part(ways[way], parts[index]))
    return [sum(each, Pass()) for each in passes]


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
