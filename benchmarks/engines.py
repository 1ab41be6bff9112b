"""What benchmarks share beside the workbench: repeated measurements, their order, and when figures are worth nothing."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from jaxspec.commands.workbench import CompilationCounter  # loads JAX, which a benchmark of a running server does without


class BenchmarkError(Exception):
    """A benchmark can't give figures; the message says why and what to do."""


@dataclass(frozen=True)
class Spread:
    """Repeated measurements of one thing."""

    values: list[float]

    def __str__(self) -> str:
        return f"{median(self.values):.2f} ({min(self.values):.2f}..{max(self.values):.2f})"

    def describe(self) -> dict:
        """For JSON."""
        return {"median": median(self.values), "min": min(self.values), "max": max(self.values), "values": self.values}


def check_nothing_compiled(counter: "CompilationCounter", before: int) -> None:
    """Raises BenchmarkError if anything was compiled since the count was `before`."""
    if counter.count != before:
        raise BenchmarkError(f"{counter.count - before} programs were compiled while time was taken, so the figures are worthless")


def alternate[Way](names: Sequence[Way], rounds: int) -> Iterator[tuple[int, Way]]:
    """Every one once per round, in turned order every other round, so that a drift of the machine hits all alike.

    In: ["a", "b"], 2  Out: (0, a), (0, b), (1, b), (1, a)
    """
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            yield number, name


def run_guarded(main: Callable[[], int]) -> int:
    """The exit status of a benchmark; what the user can fix becomes a message and status 2, not a traceback."""
    try:
        return main()
    except (ValueError, OSError, BenchmarkError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def exit_on_error(main: Callable[[], int]) -> NoReturn:
    """Runs a benchmark and ends the process with its status."""
    raise SystemExit(run_guarded(main))
