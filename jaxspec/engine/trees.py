"""Which draft tree each cycle uses. Plain Python, no JAX.

A cycle of tree t emits accept_length(t) tokens per request and takes seconds(t, bucket), where a bucket is a compiled batch
size; plain decoding emits exactly one. The best tree is the one with the highest accept_length / seconds. Both are
measured in service: the accept length depends on the text and hardly on the batch, so all buckets share one estimate; the seconds
are kept per bucket. What is not in use is not measured, so it is tried for a few cycles now and then (a probe).
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from statistics import median_low
from typing import NamedTuple, Protocol, runtime_checkable

from jaxspec.config import PLAIN, SpecConfig
from jaxspec.engine.request import Request

LONGEST_CHAIN = 3
"""Adaptive engines also compile a chain of so many steps: it pays at batch sizes at which a wide tree doesn't."""
MARGIN = 0.04
"""Another tree must look better by this share: below it, switching gains less than estimates are wrong by."""
PROBE_CYCLES = 8
PROBE_BUDGET = 0.015
"""Share of the throughput that probes may cost."""
LEAST_PROBE_LOSS = 0.25
"""A probe is counted as losing at least this share of its time: an estimate that calls probes free may be wrong."""
SWITCH_COST = 0.1
"""In cycles: the head's cache has to catch up."""
PLAUSIBLE = 1.3
"""What was not measured lately may have become better by this factor. A tree that would lose even then is hopeless."""
MAX_PATIENCE = 8
"""Each probe of a hopeless tree doubles the wait for the next, up to this factor."""
TIMES_KEPT, OLD_TIMES_KEPT = 21, 5
"""Cycle times in a median; of a tree that comes back after a rest only the last few count, so that a probe can outvote them."""
MEMORY, OLD_MEMORY, PRIOR = 200.0, 40.0, 10.0
"""Verifications: the time constant of accept lengths (long enough for several requests, which differ), the most that count
after a rest, and what the first guess counts for."""


class AdaptiveState(NamedTuple):
    """What the controller believes, for statistics and logs."""

    current: SpecConfig
    """In use, apart from probes."""
    best: dict[int, SpecConfig]
    """Per bucket that has cycle times: what looks fastest."""
    accept_lengths: dict[SpecConfig, float]
    seconds: dict[tuple[SpecConfig, int], float]
    """Of one cycle, per tree and bucket."""
    switches: int
    """How often another tree was used than in the cycle before."""
    probes: int


class AcceptLength:
    """Tokens per verification: a mean that forgets. It starts from the guess that half of the drafts are accepted."""

    def __init__(self, tree: SpecConfig):
        self._is_plain = tree.num_steps == 0
        self._verifications = PRIOR
        self._tokens = PRIOR * (1 + tree.num_steps / 2)

    @property
    def mean(self) -> float:
        return self._tokens / self._verifications

    def add(self, tokens: int, verifications: int) -> None:
        if not self._is_plain:  # plain decoding's one token needs no estimate
            kept = (1 - 1 / MEMORY) ** verifications
            self._tokens = self._tokens * kept + tokens
            self._verifications = self._verifications * kept + verifications

    def grow_old(self) -> None:
        """The mean stays and counts for less."""
        kept = min(1.0, OLD_MEMORY / self._verifications)
        self._tokens, self._verifications = self._tokens * kept, self._verifications * kept


class AdaptiveTrees:
    """Call `choose` before each cycle and the observers when its results are there; nothing depends on how late that is."""

    def __init__(self, trees: Sequence[SpecConfig]):
        """`trees` may be chosen, plain decoding among them; the first is used as long as nothing is known."""
        if len(set(trees)) != len(trees) or PLAIN not in trees:
            raise ValueError(f"trees must differ and include plain decoding, got {', '.join(map(str, trees))}")
        self.trees = tuple(trees)
        self._current = self._last = self.trees[0]
        self._bucket: int | None = None
        self._probe = self._current
        self._probe_cycles = 0  # left of the running probe
        self._accept = {tree: AcceptLength(tree) for tree in trees}
        self._times: dict[tuple[SpecConfig, int], deque[float]] = defaultdict(lambda: deque(maxlen=TIMES_KEPT))
        self._rested = dict.fromkeys(trees, 0)  # cycles since each tree was used
        self._patience = dict.fromkeys(trees, 1)
        self._explored: set[tuple[SpecConfig, int]] = set()
        self._switches = self._probes = 0

    def observe_time(self, tree: SpecConfig, bucket: int, seconds: float) -> None:
        """A cycle, or a trial run at warm-up, took so long. Three trial runs per program survive one that was disturbed."""
        self._times[tree, bucket].append(seconds)

    def observe_accept(self, tree: SpecConfig, tokens: int, verifications: int) -> None:
        """A cycle emitted so many tokens in so many verifications, each the sum over its requests."""
        self._accept[tree].add(tokens, verifications)

    def choose(self, bucket: int) -> SpecConfig:
        """The tree for the next cycle, at this compiled batch size."""
        # A new batch size ends a probe: other times hold.
        self._probe_cycles = max(0, self._probe_cycles - 1) if bucket == self._bucket else 0
        self._bucket = bucket
        if not self._probe_cycles:
            rates = self._rates(bucket)
            self._decide(rates)
            self._start_probe(rates, bucket)
        chosen = self._probe if self._probe_cycles else self._current
        self._switches += chosen != self._last
        self._last = chosen
        self._rested = {tree: 0 if tree == chosen else cycles + 1 for tree, cycles in self._rested.items()}
        return chosen

    def describe(self) -> AdaptiveState:
        """For statistics and logs; costs about as much as ten choices."""
        buckets = sorted({bucket for _, bucket in self._times})
        return AdaptiveState(
            current=self._current,
            best={bucket: max(rates := self._rates(bucket), key=rates.__getitem__) for bucket in buckets},
            accept_lengths={tree: self._accept[tree].mean for tree in self.trees},
            seconds={key: median_low(times) for key, times in sorted(self._times.items(), key=str)},
            switches=self._switches,
            probes=self._probes,
        )

    def _rates(self, bucket: int) -> dict[SpecConfig, float]:
        """Tokens per second and request of the trees whose cycle time is known.

        The median: on a shared machine single cycles take three times as long. The lower one: of two times, that of the
        cycle that was not disturbed.
        """
        return {
            tree: self._accept[tree].mean / median_low(times) for tree in self.trees if (times := self._times.get((tree, bucket)))
        }

    def _decide(self, rates: dict[SpecConfig, float]) -> None:
        """Changes the current tree if another is better. The estimates are robust, so one decision is enough."""
        best = max(rates, key=rates.__getitem__, default=self._current)
        if self._current in rates and rates[best] > rates[self._current] * (1 + MARGIN):
            self._current = best
            self._grow_old(best)

    def _start_probe(self, rates: dict[SpecConfig, float], bucket: int) -> None:
        due = [tree for tree in self.trees if tree != self._current and self._rested[tree] >= self._rest(tree, rates, bucket)]
        if due:
            tree = max(due, key=lambda tree: rates.get(tree, float("inf")))
            self._probe, self._probe_cycles, self._probes = tree, PROBE_CYCLES, self._probes + 1
            self._patience[tree] = min(2 * self._patience[tree], MAX_PATIENCE) if self._hopeless(tree, rates) else 1
            self._explored.add((tree, bucket))
            self._grow_old(tree)

    def _rest(self, tree: SpecConfig, rates: dict[SpecConfig, float], bucket: int) -> float:
        """How many cycles after its last one the tree may be probed, so that all probes together stay within the budget."""
        if tree not in rates and (tree, bucket) not in self._explored:
            return 0.0
        length, loss = 1.0, 1.0  # of the probe's cycles, in current cycles
        if tree in rates and self._current in rates:
            gain = rates[tree] / rates[self._current]
            length = self._accept[tree].mean / self._accept[self._current].mean / gain
            loss = max(1 - gain, LEAST_PROBE_LOSS)
        cost = PROBE_CYCLES * length * loss + 2 * SWITCH_COST
        patience = self._patience[tree] if self._hopeless(tree, rates) else 1
        return cost * patience * (len(self.trees) - 1) / PROBE_BUDGET

    def _hopeless(self, tree: SpecConfig, rates: dict[SpecConfig, float]) -> bool:
        return tree in rates and self._current in rates and rates[tree] * PLAUSIBLE < rates[self._current]

    def _grow_old(self, tree: SpecConfig) -> None:
        """What is known of a tree that comes back after a rest counts for less, in all buckets: the world may have changed."""
        self._accept[tree].grow_old()
        for (timed, _), times in self._times.items():
            while timed == tree and len(times) > OLD_TIMES_KEPT:
                times.popleft()


@runtime_checkable
class TimedRunner(Protocol):
    """Who can try a cycle out."""

    def time_cycle(self, batch: int, spec: SpecConfig) -> list[float]: ...

    @property
    def batches(self) -> Sequence[int]: ...


class TreeChoice:
    """Names the tree of every cycle and, if there is a choice, learns from what the cycles took and gave.

    `others` are trees that are never chosen, but requests may ask for them; `candidates` are as for `adaptive_trees`.
    """

    def __init__(
        self,
        spec: SpecConfig,
        adaptive: bool,
        others: Sequence[SpecConfig] = (),
        clock: Callable[[], float] = time.perf_counter,
        candidates: Sequence[SpecConfig] = (),
    ):
        self.own = adaptive_trees(spec, candidates) if adaptive else (spec,)
        """Those that are chosen from."""
        self.all = tuple(dict.fromkeys((*self.own, *others)))
        self.most_emitted = max(tree.num_steps for tree in self.all) + 1
        """Tokens that a cycle emits per request, at most."""
        self._adaptive = AdaptiveTrees(self.own) if len(self.own) > 1 else None
        self._clock = clock
        self._last_read: float | None = None
        """When the result of the cycle before came; None if there was none just before."""
        self._measurable: list[bool] = []
        """For every launched cycle that was not read: whether the time between two reads is its own."""
        self._prefilled = False

    def measure(self, runner: TimedRunner) -> None:
        """Tries every program out, so that the first choices are not blind."""
        if self._adaptive:
            for tree in self.own:
                for batch in runner.batches:
                    for seconds in runner.time_cycle(batch, tree):
                        self._adaptive.observe_time(tree, batch, seconds)

    def choose(self, bucket: int) -> SpecConfig:
        """The tree for a cycle that is about to be launched, at this compiled batch size."""
        return self._adaptive.choose(bucket) if self._adaptive else self.own[0]

    def split(self, cycle: Sequence[Request], bucket_of: Callable[[int], int]) -> dict[SpecConfig, list[Request]]:
        """Which of the requests that are due run with which tree: the one they ask for, or the one chosen for all others."""
        groups: dict[SpecConfig, list[Request]] = {}
        undecided = [request for request in cycle if request.tree is None]
        if undecided:
            groups[self.choose(bucket_of(len(undecided)))] = undecided
        for request in cycle:
            if request.tree is not None:
                groups.setdefault(request.tree, []).append(request)
        return groups

    def launched(self, *, cycles: int, catch_up: bool, prefill: bool) -> None:
        """To be called in every step after its launches. On the device, a step's prefills come behind its cycles and before the
        next one, whose time they lengthen."""
        self._measurable += [cycles == 1 and not (catch_up or self._prefilled)] * cycles
        if not cycles:
            self._last_read = None
        self._prefilled = prefill

    def was_read(self, spec: SpecConfig, bucket: int, emitted: Sequence[int]) -> None:
        """A cycle's result is there: how many tokens each of its requests got."""
        now, before, measurable = self._clock(), self._last_read, self._measurable.pop(0)
        self._last_read = now
        active = [tokens for tokens in emitted if tokens]
        if self._adaptive is None or not active or spec not in self.own:
            return
        self._adaptive.observe_accept(spec, sum(active), len(active))
        if before is not None and measurable:
            self._adaptive.observe_time(spec, bucket, now - before)

    def forget_launched(self) -> None:
        """Launched cycles will not be read."""
        self._measurable, self._last_read = [], None

    def describe(self) -> AdaptiveState | None:
        """What was learnt; None if there is no choice."""
        return self._adaptive.describe() if self._adaptive else None


def adaptive_trees(spec: SpecConfig, candidates: Sequence[SpecConfig] = ()) -> tuple[SpecConfig, ...]:
    """What an adaptive engine chooses from: the configured tree, these candidates or else a chain, and plain decoding.

    In:  5/4/8
    Out: 5/4/8, 3/1/4, 0/1/1
    """
    chain = SpecConfig(min(LONGEST_CHAIN, max(1, spec.num_steps)), 1)
    return tuple(dict.fromkeys((spec, *(candidates or (chain,)), PLAIN)))
