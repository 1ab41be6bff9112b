"""The trees of an engine: one, or several of which each cycle takes the best. Plain Python, no JAX."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from jaxspec.config import PLAIN, SpecConfig
from jaxspec.engine.adaptive import AdaptiveState, AdaptiveTrees
from jaxspec.engine.request import Request

LONGEST_CHAIN = 3
"""Adaptive engines also compile a chain of so many steps: it pays at batch sizes at which a wide tree doesn't."""


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
