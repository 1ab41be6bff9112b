"""From accept lengths and cycle times to a choice: predict every tree's speed-up, then measure those that may be best.

A tree that accepts a tokens per verification, and whose cycle takes as long as c plain steps, decodes a / c times as fast. Accept
lengths depend on the text and not on the batch, so one pass per tree tells them for all batch sizes; c takes a dozen cycles.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from tqdm import tqdm

from benchmarks.engines import Spread, alternate, check_nothing_compiled
from benchmarks.load import Load, side_by_side
from benchmarks.record import shares
from benchmarks.speculative.sweep import Sweep
from jaxspec.commands.workbench import CompilationCounter, depth_acceptance
from jaxspec.config import PLAIN, SpecConfig

CLOSE = 0.7
"""A tree whose predicted speed-up is below this share of the best one's is not measured. A dozen cycles tell no more: on two cores
of a shared machine predictions were off by up to 20% (November 2026)."""
GROUP = 4
"""Trees that run side by side with one plain decoding."""


@dataclass(frozen=True)
class Acceptance:
    """What one pass over the prompts told about a tree."""

    accept_length: float
    """Mean tokens per verification, bonus included."""
    by_depth: list[float]
    """How often a draft at depth 1, 2, ... was accepted, given that all before it were."""
    equal: int
    """Prompts whose tokens are plain decoding's."""
    prompts: int

    @classmethod
    def of(cls, load: Load, plain: Load) -> "Acceptance":
        return cls(load.accept_length, depth_acceptance(load.verifications), load.count_equal(plain), len(plain.tokens))


@dataclass
class Timed:
    """A tree at one batch size."""

    tree: SpecConfig
    batch: int
    cycle_ms: list[float] = field(default_factory=list)
    cost: list[float] = field(default_factory=list)
    """Of a cycle, in plain steps that were timed right beside it: the accept length at which the tree breaks even."""
    tree_passes: list[Load] = field(default_factory=list)
    """End to end, as far as it was measured; plain_passes ran right beside them."""
    plain_passes: list[Load] = field(default_factory=list)

    def predicted(self, accept_length: float) -> float:
        """Speed-up of decoding over plain decoding; prefills are not counted."""
        return accept_length / median(self.cost)

    @property
    def speed_ups(self) -> list[float]:
        """Measured end to end, pair by pair."""
        return shares([load.tokens_per_second for load in self.tree_passes], [load.tokens_per_second for load in self.plain_passes])


def acceptances(sweep: Sweep, trees: Sequence[SpecConfig]) -> dict[SpecConfig, Acceptance]:
    """One pass of every tree, at the largest batch size."""
    sweep.compile(trees, sweep.batches[-1:])
    plain = sweep.accept(PLAIN)
    with tqdm(trees, desc="accept lengths", unit="tree") as bar:
        return {tree: Acceptance.of(sweep.accept(tree), plain) for tree in bar}


def cycle_times(sweep: Sweep, trees: Sequence[SpecConfig], batch: int, rounds: int) -> list[Timed]:
    """Every tree's cycle in plain steps, `rounds` times, each beside plain cycles."""
    timed = [Timed(tree, batch) for tree in trees]
    with tqdm(total=rounds * len(trees), desc=f"batch {batch}: cycle times", unit="tree") as bar:
        for number, each in alternate(timed, rounds):
            order = (PLAIN, each.tree) if number % 2 == 0 else (each.tree, PLAIN)
            taken = {tree: sweep.cycle_seconds(tree, batch) for tree in order}
            plain, seconds = taken[PLAIN], taken[each.tree]
            each.cycle_ms.append(1e3 * seconds)
            each.cost.append(seconds / plain)
            bar.update()
    return timed


def shortlist(timed: Sequence[Timed], accept_lengths: dict[SpecConfig, float]) -> list[Timed]:
    """The trees worth measuring end to end, the most promising first; at least one."""
    ranked = sorted(timed, key=lambda each: each.predicted(accept_lengths[each.tree]), reverse=True)
    best = ranked[0].predicted(accept_lengths[ranked[0].tree])
    return [each for each in ranked if each.predicted(accept_lengths[each.tree]) >= CLOSE * best]


def tournament(sweep: Sweep, candidates: Sequence[Timed], batch: int, rounds: int, counter: CompilationCounter) -> Timed:
    """The fastest of the candidates: all run a round end to end, the better half another one, and so on; the last two run
    `rounds` more.

    So most of the time goes into those that are hard to tell apart.
    """
    left = list(candidates)
    warm_up(sweep, left, batch)
    while len(left) > 2:
        measure(sweep, left, batch, 1, counter)
        left.sort(key=lambda each: median(each.speed_ups), reverse=True)
        left = left[: max(2, len(left) // 2)]
    measure(sweep, left, batch, rounds, counter)
    return max(left, key=lambda each: median(each.speed_ups))


def warm_up(sweep: Sweep, timed: Sequence[Timed], batch: int) -> None:
    """These trees and plain decoding, untimed. A whole round with and without the head, since prefills compile now, which belong to
    no tree; of the other trees a part."""
    parts = sweep.parts(batch)
    for number, tree in enumerate((PLAIN, *(each.tree for each in timed))):
        for part in parts if number < 2 else parts[:1]:
            sweep.run_part(tree, batch, part)


def measure(sweep: Sweep, timed: Sequence[Timed], batch: int, rounds: int, counter: CompilationCounter) -> None:
    """These trees end to end, a few at a time side by side with plain decoding. All of them ran before."""
    groups = [timed[first : first + GROUP] for first in range(0, len(timed), GROUP)]
    parts, before = sweep.parts(batch), counter.count
    with tqdm(total=rounds * len(timed), desc=f"batch {batch}: end to end", unit="tree") as bar:
        for number in range(rounds):
            for group in groups:
                trees = [PLAIN, *(each.tree for each in group)]
                plain, *loads = side_by_side(trees, parts, lambda tree, part: sweep.run_part(tree, batch, part), number)
                for each, load in zip(group, loads, strict=True):
                    each.plain_passes.append(plain)
                    each.tree_passes.append(load)
                bar.update(len(group))
    check_nothing_compiled(counter, before)


def anew(timed: Timed) -> Timed:
    """The same without what was measured end to end."""
    return Timed(timed.tree, timed.batch, timed.cycle_ms, timed.cost)


def confirm(sweep: Sweep, best: Timed, rounds: int, counter: CompilationCounter) -> Timed:
    """The winner, measured anew: the largest of several noisy figures is too large, and is not what anybody should quote."""
    again = anew(best)
    measure(sweep, [again], best.batch, rounds, counter)
    return again


def describe(each: Timed, accept_length: float | None) -> dict:
    """For JSON."""
    described: dict = {"tree": str(each.tree), "cycle_ms": median(each.cycle_ms), "cost": Spread(each.cost).describe()}
    if accept_length is not None:
        described["predicted_speed_up"] = each.predicted(accept_length)
    if each.tree_passes:
        described["speed_up"] = Spread(each.speed_ups).describe()
        described["tokens_per_second"] = Spread([load.tokens_per_second for load in each.tree_passes]).describe()
        described["plain_tokens_per_second"] = Spread([load.tokens_per_second for load in each.plain_passes]).describe()
    return described
