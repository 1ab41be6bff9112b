"""The choice of the draft tree for each cycle. Plain Python, no JAX.

A cycle of tree t emits accept_length(t) tokens per request and takes seconds(t, bucket), where a bucket is a compiled batch
size; plain decoding emits exactly one. The best tree has the highest accept_length / seconds. Both are measured in service: the
accept length depends on the text and hardly on the batch, so all buckets share one estimate; the seconds are kept per bucket. A
tree that is not in use is not measured, so it is tried for a few cycles now and then (a probe).
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from statistics import median_low
from typing import NamedTuple

from jaxspec.config import PLAIN, TreeShape
from jaxspec.engine.request import Request
from jaxspec.engine.stats import AdaptiveState

LONGEST_CHAIN = 3
"""Adaptive engines without adaptive_trees also use a chain of up to this length: it pays at batch sizes where wide trees don't."""
MAX_LAG = 16
"""Plain cycles after which the drafter must catch up: the device keeps features for this many."""
MARGIN = 0.04
"""Another tree must look better by this share, because estimates have errors of this size."""
PROBE_CYCLES = 8
PATIENCE = 900
"""Cycles: what the wait for a probe is measured in. Probes of a tree cost at most 0.3% of the throughput, times the tokens that one
of its cycles emits for one of the current tree's."""
TIMES_KEPT = 11
"""Cycle times in a median: few enough for a probe to outvote the old ones."""
MEMORY, OLD_MEMORY, PRIOR = 200.0, 40.0, 10.0
"""In verifications: the weight of an accept length (several requests, as they differ), that of an old one when its tree is used
again, and that of the first guess, half of the drafts."""


class PlannedCycle(NamedTuple):
    """A cycle that is about to be launched."""

    tree: TreeShape
    requests: list[Request]
    behind: list[Request]
    """The requests whose drafts must catch up before it."""
    in_two: bool
    """Its requests have grammars: the host makes masks between its halves."""


class UnreadCycle(NamedTuple):
    """A launched cycle whose result was not read yet."""

    tree: TreeShape
    bucket: int
    is_timed: bool
    """Whether the time since the previous result is this cycle's own."""


class TreeChoice:
    """The trees of an engine. Plans each step's cycles; with several trees to choose from, learns from their results.

    It also decides when drafters catch up: plain cycles leave the drafter out, so it lags behind by one slot each.
    """

    def __init__(
        self,
        tree: TreeShape,
        adaptive: bool,
        others: Sequence[TreeShape] = (),
        clock: Callable[[], float] = time.perf_counter,
        candidates: Sequence[TreeShape] = (),
        may_lag: bool = True,
    ):
        """Args:
        tree: the configured tree.
        others: trees that requests may ask for, but which are never chosen otherwise.
        candidates: as for `adaptive_trees`.
        may_lag: the drafter may be left out of plain cycles (Drafter.lags).
        """
        self.own = adaptive_trees(tree, candidates) if adaptive else (tree,)
        """The trees to choose from."""
        self.all = tuple(dict.fromkeys((*self.own, *others)))
        self.most_emitted = max(tree.num_steps for tree in self.all) + 1
        """Tokens that a cycle emits per request, at most."""
        self.lags = may_lag and PLAIN in self.all
        """Plain cycles leave the drafter out, so it lags and catches up."""
        self._adaptive = AdaptiveTrees(self.own) if len(self.own) > 1 else None
        self._clock = clock
        self._last_read: float | None = None
        """When the previous cycle's result arrived; None if no cycle came directly before."""
        self._unread: list[UnreadCycle] = []
        self._prefills_before = False

    def measure(self, time_cycle: Callable[[int, TreeShape], list[float]], batches: Sequence[int]) -> None:
        """Times every program (Runner.time_cycle), so that the first choices are not blind."""
        if self._adaptive:
            for tree in self.own:
                for batch in batches:
                    for seconds in time_cycle(batch, tree):
                        self._adaptive.observe_time(tree, batch, seconds)

    def plan(
        self,
        requests: Sequence[Request],
        batches: Sequence[int],
        ready: Collection[TreeShape],
        in_two: Collection[TreeShape] = (),
        *,
        prefills: bool,
    ) -> list[PlannedCycle]:
        """The cycles of one step for these requests, one per tree, and then those under grammars. Call it in every step, with or
        without requests.

        Args:
            batches: the compiled batch sizes.
            ready: the trees with compiled programs. A request for another tree gets the engine's choice meanwhile.
            in_two: those with compiled halves, for requests under grammars. The first of `own` must be among them.
            prefills: whether the step launches prefills too. The device runs them after the step's cycles, so they delay the next.
        """
        free = [request for request in requests if request.matcher is None]
        cycles = [
            PlannedCycle(tree, group, self._catch_up(group, tree), False)
            for tree, group in self._by_tree(free, batches, ready).items()
        ]
        if len(free) < len(requests):
            constrained = [request for request in requests if request.matcher is not None]
            cycles += [
                PlannedCycle(tree, group, self._catch_up(group, tree), True)
                for tree, group in self._by_tree(constrained, batches, in_two).items()
            ]
        is_timed = len(cycles) == 1 and not cycles[0].behind and not self._prefills_before
        self._unread += [UnreadCycle(cycle.tree, bucket(len(cycle.requests), batches), is_timed) for cycle in cycles]
        if not cycles:
            self._last_read = None
        self._prefills_before = prefills
        return cycles

    def choose(self, bucket: int) -> TreeShape:
        """The tree for a cycle at this compiled batch size."""
        return self._adaptive.choose(bucket) if self._adaptive else self.own[0]

    def was_read(self, emitted: Sequence[int]) -> None:
        """Records the result of the oldest unread cycle: `emitted` tokens for each of its requests."""
        cycle, now, before = self._unread.pop(0), self._clock(), self._last_read
        self._last_read = now
        active = [tokens for tokens in emitted if tokens]
        if self._adaptive is None or not active or cycle.tree not in self.own:
            return
        self._adaptive.observe_accept(cycle.tree, sum(active), len(active))
        if before is not None and cycle.is_timed:
            self._adaptive.observe_time(cycle.tree, cycle.bucket, now - before)

    def forget_launched(self) -> None:
        """Drops the launched cycles, whose results are lost."""
        self._unread, self._last_read = [], None

    def describe(self) -> AdaptiveState | None:
        """The trees in use and the estimates behind the choice; None if there is only one."""
        return self._adaptive.describe() if self._adaptive else None

    def _by_tree(
        self, requests: Sequence[Request], batches: Sequence[int], ready: Collection[TreeShape]
    ) -> dict[TreeShape, list[Request]]:
        """The requests by tree: the one a request asks for, if it is ready, else the one chosen for all other requests."""
        asked: dict[TreeShape | None, list[Request]] = {}
        for request in requests:
            asked.setdefault(request.tree, []).append(request)
        decided = {tree: group for tree, group in asked.items() if tree is not None and tree in ready}
        if len(decided) == len(asked):
            return decided
        undecided = [request for request in requests if request.tree not in decided]
        chosen = self.choose(bucket(len(undecided), batches))
        groups = {chosen if chosen in ready else self.own[0]: undecided}
        for tree, group in decided.items():
            groups[tree] = groups.get(tree, []) + group
        return groups

    def _catch_up(self, requests: list[Request], tree: TreeShape) -> list[Request]:
        """The requests for which the drafter must catch up before this cycle. Updates each request's lag to that after the cycle.

        The device counts the lag too, and exactly: a sequence that has ended gets no more slots. The host's count is never lower.
        """
        behind = [request for request in requests if request.held.lag]
        if tree.num_steps == 0 and all(request.held.lag < MAX_LAG for request in behind):
            behind = []
        for request in behind:
            request.held.lag = 0
        if tree.num_steps == 0 and self.lags:
            for request in requests:
                request.held.lag += 1
        return behind


def bucket(requests: int, batches: Sequence[int]) -> int:
    """The compiled batch size for this many requests.

    In:  3, (1, 2, 4, 8)
    Out: 4
    """
    return min([batch for batch in batches if batch >= requests])


def adaptive_trees(tree: TreeShape, candidates: Sequence[TreeShape] = ()) -> tuple[TreeShape, ...]:
    """The trees an adaptive engine chooses from: the configured one, the candidates (default: a chain), and plain decoding.

    In:  5/4/8
    Out: 5/4/8, 3/1/4, 0/1/1
    """
    chain = TreeShape(min(LONGEST_CHAIN, max(1, tree.num_steps)), 1)
    return tuple(dict.fromkeys((tree, *(candidates or (chain,)), PLAIN)))


class AdaptiveTrees:
    """Chooses the tree so that speculation costs little at worst. Call `choose` before each cycle and the observers when its
    results arrive; nothing depends on how late that is."""

    def __init__(self, trees: Sequence[TreeShape]):
        """`trees` may be chosen, plain decoding among them; the first is used as long as nothing is known."""
        if len(set(trees)) != len(trees) or PLAIN not in trees:
            raise ValueError(f"trees must differ and include plain decoding, got {', '.join(map(str, trees))}")
        self._current = self._last = trees[0]  # they differ during a probe
        self._bucket: int | None = None
        self._probe_cycles = 0  # left of the running probe
        self._accept = {tree: 1 + tree.num_steps / 2 for tree in trees}
        self._weight = dict.fromkeys(trees, PRIOR)  # of the accept lengths
        self._times: dict[tuple[TreeShape, int], deque[float]] = {}  # of all that were tried
        self._seconds: dict[tuple[TreeShape, int], float] = {}  # their medians
        self._unused = dict.fromkeys(trees, 0)  # cycles since each tree was used
        self._switches = self._probes = 0

    def observe_time(self, tree: TreeShape, bucket: int, seconds: float) -> None:
        """Records the time of a cycle, or of a trial run at warm-up. Three trial runs per program outvote one disturbed run.

        The median is used, because on a shared machine some cycles take three times as long. Of two times it is the lower one,
        which is the less disturbed.
        """
        times = self._times.setdefault((tree, bucket), deque(maxlen=TIMES_KEPT))
        times.append(seconds)
        self._seconds[tree, bucket] = median_low(times)

    def observe_accept(self, tree: TreeShape, tokens: int, verifications: int) -> None:
        """Records the tokens and verifications of a cycle, each summed over its requests."""
        if tree != PLAIN:  # its one token needs no estimate
            self._weight[tree] = min(self._weight[tree], MEMORY) + verifications
            self._accept[tree] += (tokens - verifications * self._accept[tree]) / self._weight[tree]

    def choose(self, bucket: int) -> TreeShape:
        """The tree for the next cycle, at this compiled batch size."""
        # A new batch size ends a probe, because its cycle times differ.
        self._probe_cycles = max(0, self._probe_cycles - 1) if bucket == self._bucket else 0
        self._bucket, before = bucket, self._last
        if not self._probe_cycles:
            self._last = self._best_or_probe(bucket)
        self._switches += self._last != before
        self._unused = {tree: 0 if tree == self._last else cycles + 1 for tree, cycles in self._unused.items()}
        return self._last

    def describe(self) -> AdaptiveState:
        """A snapshot for the statistics; cheap enough for every step."""
        best = {bucket: max(rates := self._rates(bucket), key=rates.__getitem__) for _, bucket in self._seconds}
        return AdaptiveState(self._current, best, dict(self._accept), dict(self._seconds), self._switches, self._probes)

    def _rates(self, bucket: int) -> dict[TreeShape, float]:
        """Tokens per second and request of the trees with known cycle times."""
        return {tree: mean / self._seconds[tree, bucket] for tree, mean in self._accept.items() if (tree, bucket) in self._seconds}

    def _best_or_probe(self, bucket: int) -> TreeShape:
        """The current tree, which changes if another is better by more than errors; or one that begins a probe."""
        rates = self._rates(bucket)
        best = max(rates, key=rates.__getitem__, default=self._current)
        if self._current in rates and rates[best] > rates[self._current] * (1 + MARGIN):
            self._current, self._weight[best] = best, min(self._weight[best], OLD_MEMORY)
        others = {tree: cycles for tree, cycles in self._unused.items() if tree != self._current}
        due = [tree for tree, cycles in others.items() if cycles >= len(others) * self._wait(tree, rates, bucket)]
        if not due:
            return self._current
        tree = max(due, key=lambda tree: rates.get(tree, float("inf")))
        self._probe_cycles, self._probes = PROBE_CYCLES, self._probes + 1
        self._weight[tree] = min(self._weight[tree], OLD_MEMORY)
        self._times.setdefault((tree, bucket), deque(maxlen=TIMES_KEPT))
        return tree

    def _wait(self, tree: TreeShape, rates: dict[TreeShape, float], bucket: int) -> float:
        """Cycles out of use after which the only other tree is probed: none before the first time, and more the further it is
        behind, as it is then unlikelier to have become the best."""
        if (tree, bucket) not in self._times:
            return 0.0
        if tree not in rates or self._current not in rates:
            return PATIENCE
        return PATIENCE * (((1 + MARGIN) * max(1.0, rates[self._current] / rates[tree])) ** 2 - 1)
