"""The tuner's method: which trees to try, their predicted speed-ups, and the end-to-end measurement of the best.

A tree with accept length a, whose cycle takes as long as c plain steps, decodes a / c times as fast as plain decoding. a depends on
the text and not on the batch size, so one pass per tree suffices for all batch sizes; c takes a dozen cycles.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import le
from statistics import median

from tqdm import tqdm

from jaxspec.commands.workbench import CompilationCounter, Pass, count_equal, depth_acceptance
from jaxspec.tree_shape import PLAIN, TreeShape

from .record import Spread, shares
from .side_by_side import alternate, check_nothing_compiled, side_by_side
from .sweep import Sweep

CLOSE = 0.7
"""Trees predicted below this share of the best prediction are not measured. Predictions come from a dozen cycles: on two cores of a
shared machine they were off by up to 20% (November 2026)."""
GROUP = 4
"""Trees that run side by side with one plain decoding."""


def grid(steps: Sequence[int], topks: Sequence[int], nodes: Sequence[int]) -> tuple[list[TreeShape], dict[str, str]]:
    """All trees of these sizes, and the combinations that are not tried, with the reason. A zero stands for plain decoding, as in
    SGLang's sweep, and is ignored: every sweep measures it anyway.

    In:  steps [0, 2], topks [1, 2], nodes [4, 16]
    Out: trees 2/1/3, 2/2/4; skipped 2/2/16 (more nodes than 1 + topk + (steps - 1) * topk^2 = 7)
    """
    trees, skipped = list[TreeShape](), dict[str, str]()
    for step in filter(None, sorted(set(steps))):
        for topk in filter(None, sorted(set(topks))):
            for count in sorted(set(nodes)) if topk > 1 else [step + 1]:  # a chain has one size
                reason = why_not(step, topk, count)
                if reason is None:
                    trees.append(TreeShape(step, topk, count))
                elif count:
                    skipped[f"{step}/{topk}/{count}"] = reason
    return trees, skipped


def why_not(step: int, topk: int, count: int) -> str | None:
    """The reason to skip these sizes, or None."""
    available = 1 + topk + (step - 1) * topk**2
    if count > available:
        return f"more nodes than 1 + topk + (steps - 1) * topk^2 = {available} that are drafted"
    if count <= step:
        return f"{count} nodes cannot hold a path of {step} drafts below the root: fewer steps give the same tree"
    return None


def dominated(accept_lengths: dict[TreeShape, float], tolerance: float = 0.005) -> dict[TreeShape, TreeShape]:
    """Trees that need not be timed, each with the tree that beats it.

    A tree none of whose numbers (`size`) exceeds another's is assumed to cost no more at any batch size. If it also accepts as much
    (within the relative `tolerance`), the larger one can hardly win. Only kept trees drop others, so tolerances do not add up.
    """
    kept, beaten = list[TreeShape](), dict[TreeShape, TreeShape]()
    for tree in sorted(accept_lengths, key=size):
        enough = accept_lengths[tree] * (1 - tolerance)
        other = next((each for each in kept if accept_lengths[each] >= enough and all(map(le, size(each), size(tree)))), None)
        if other is None:
            kept.append(tree)
        else:
            beaten[tree] = other
    return beaten


def size(tree: TreeShape) -> tuple[int, int, int, int]:
    return tree.num_steps, tree.topk, tree.num_draft_tokens, tree.of_head.num_steps


@dataclass
class Timed:
    """A tree at one batch size."""

    tree: TreeShape
    cycle_ms: list[float] = field(default_factory=list)
    cost: list[float] = field(default_factory=list)
    """Time of a cycle divided by that of a plain step timed next to it: the accept length at which the tree breaks even."""
    tree_passes: list[Pass] = field(default_factory=list)
    """End-to-end runs, if there were any; plain_passes are the plain runs next to them."""
    plain_passes: list[Pass] = field(default_factory=list)

    def predicted(self, accept_length: float) -> float:
        """Predicted speed-up over plain decoding, without prefill."""
        return accept_length / median(self.cost)

    @property
    def speed_ups(self) -> list[float]:
        """Measured end to end, one per pair of runs."""
        return shares([each.tokens_per_second for each in self.tree_passes], [each.tokens_per_second for each in self.plain_passes])


def acceptances(sweep: Sweep, trees: Sequence[TreeShape]) -> dict[TreeShape, dict]:
    """Runs every tree once, at the largest batch size, and compares its texts with plain decoding's. For JSON."""
    sweep.compile(trees, sweep.batches[-1:])
    plain, found = sweep.accept(PLAIN).tokens, dict[TreeShape, dict]()
    for tree in tqdm(trees, desc="accept lengths", unit="tree"):
        done = sweep.accept(tree)
        found[tree] = {
            "accept_length": done.accept_length,
            "by_depth": depth_acceptance(done.verifications),
            "equal": count_equal(done.tokens, plain),
            "prompts": len(plain),
        }
    return found


def cycle_times(sweep: Sweep, trees: Sequence[TreeShape], batch: int, rounds: int) -> list[Timed]:
    """Times every tree's cycle `rounds` times, each next to plain cycles."""
    timed = [Timed(tree) for tree in trees]
    with tqdm(total=rounds * len(trees), desc=f"batch {batch}: cycle times", unit="tree") as bar:
        for number, each in alternate(timed, rounds):
            order = (PLAIN, each.tree) if number % 2 == 0 else (each.tree, PLAIN)
            taken = {tree: sweep.cycle_seconds(tree, batch) for tree in order}
            plain, seconds = taken[PLAIN], taken[each.tree]
            each.cycle_ms.append(1e3 * seconds)
            each.cost.append(seconds / plain)
            bar.update()
    return timed


def shortlist(timed: Sequence[Timed], accept_lengths: dict[TreeShape, float]) -> list[Timed]:
    """The trees worth measuring end to end, best prediction first; at least one."""
    ranked = sorted(timed, key=lambda each: each.predicted(accept_lengths[each.tree]), reverse=True)
    best = ranked[0].predicted(accept_lengths[ranked[0].tree])
    return [each for each in ranked if each.predicted(accept_lengths[each.tree]) >= CLOSE * best]


def tournament(sweep: Sweep, candidates: Sequence[Timed], batch: int, rounds: int, counter: CompilationCounter) -> Timed:
    """The fastest candidate. All run one round end to end, the better half another one, and so on; the last two run `rounds` more.

    Most of the time thus goes into trees that are hard to tell apart.
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
    """Runs these trees and plain decoding untimed. Prefills compile here: one whole round without the head and one with it; the
    other trees run one part."""
    parts = sweep.parts(batch)
    for number, tree in enumerate((PLAIN, *(each.tree for each in timed))):
        for part in parts if number < 2 else parts[:1]:
            sweep.run_part(tree, batch, part)


def measure(sweep: Sweep, timed: Sequence[Timed], batch: int, rounds: int, counter: CompilationCounter) -> None:
    """Measures these trees end to end, a few at a time side by side with plain decoding. They must be warm."""
    groups = [timed[first : first + GROUP] for first in range(0, len(timed), GROUP)]
    parts, before = sweep.parts(batch), counter.count
    with tqdm(total=rounds * len(timed), desc=f"batch {batch}: end to end", unit="tree") as bar:
        for number in range(rounds):
            for group in groups:
                trees = [PLAIN, *(each.tree for each in group)]
                plain, *passes = side_by_side(trees, parts, lambda tree, part: sweep.run_part(tree, batch, part), number)
                for each, done in zip(group, passes, strict=True):
                    each.plain_passes.append(plain)
                    each.tree_passes.append(done)
                bar.update(len(group))
    check_nothing_compiled(counter, before)


def describe(each: Timed, accept_length: float) -> dict:
    """For JSON."""
    described: dict = {"tree": str(each.tree), "cycle_ms": median(each.cycle_ms), "cost": Spread(each.cost).describe()}
    described["predicted_speed_up"] = each.predicted(accept_length)
    if each.tree_passes:
        described["speed_up"] = Spread(each.speed_ups).describe()
        described["tokens_per_second"] = Spread([done.tokens_per_second for done in each.tree_passes]).describe()
        described["plain_tokens_per_second"] = Spread([done.tokens_per_second for done in each.plain_passes]).describe()
        for name, passes in (("per_cycle_ms", each.tree_passes), ("plain_per_cycle_ms", each.plain_passes)):
            times = [done.per_cycle_ms for done in passes]
            described[name] = {what: median(each[what] for each in times) for what in times[0]}
    return described
