"""The estimates behind an adaptive choice of the draft tree. Plain Python, no JAX.

A cycle of tree t emits accept_length(t) tokens per request and takes seconds(t, bucket), where a bucket is a compiled batch
size; plain decoding emits exactly one. The best tree has the highest accept_length / seconds. Both are measured in service: the
accept length depends on the text and hardly on the batch, so all buckets share one estimate; the seconds are kept per bucket. A
tree that is not in use is not measured, so it is tried for a few cycles now and then (a probe).

Texts differ more than trees do. So what is kept per tree is the accept length of a new request, and each request has factors of
its own (`DraftFactors`): its drafts accepted, over those that the estimates promised; one for trees with a head, and one for
those of n-grams alone, as a text that repeats may be none that the head knows. A batch shares a cycle, and is expected to
accept what its tree promises, times the mean factor of its requests. Of a request's results the estimate of the tree learns
only what its factor does not explain: its first cycles count (ten or so with a head, three of n-grams alone), and then ever less.
So a request whose drafts don't pay falls to plain decoding within some tens of cycles, and the next one begins with the tree as
before; only several such requests change that.

What n-grams alone would have drafted is known while other trees are in use (repeats.py). So their trees begin with a low guess,
are first tried when a text repeats, and need few probes: only their times may have changed.
"""

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

from jaxspec.config import PLAIN, TreeShape
from jaxspec.engine.stats import AdaptiveState

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
again, and that of the first guess, half of the head's levels."""
OWN_MEMORY, OWN_PRIOR = 50.0, 10.0
"""In verifications: the weight of a request's factor, and of its first guess, which is 1 (with a head)."""
TEXT_PRIOR = 3.0
"""The weight of the first guess where n-grams draft alone: texts differ more in how they repeat than in how a head fits them."""
OF_TEXT, PROMISING = 1.2, 1.3
"""The first guess of trees that n-grams draft alone, and the accept length from which one without a known time is tried."""
FIRST_TRY = 100
"""Cycles of plain decoding before a head's tree without a known time is tried: where programs compile at their first use, one that
a short text would hardly use must not hold it up."""
RARER = 10
"""How much longer these wait for a probe."""
LEAST = 0.05
"""Accepted drafts per verification that a tree promises, at least: factors are quotients by it."""


@dataclass(slots=True)
class DraftFactor:
    """How much more of its drafts one request accepts than others do."""

    value: float = 1.0
    weight: float = OWN_PRIOR
    """In verifications."""


class DraftFactors(NamedTuple):
    """Those of a request, from which they go when it ends."""

    with_head: DraftFactor
    of_text: DraftFactor
    """Where a head drafts nothing (TreeShape.head_steps is 0)."""

    @classmethod
    def new(cls) -> "DraftFactors":
        """Those of a new request."""
        return cls(DraftFactor(), DraftFactor(weight=TEXT_PRIOR))


class AdaptiveTrees:
    """Chooses the tree so that speculation costs little at worst. Call `choose` before each cycle and the observers when its
    results arrive; nothing depends on how late that is."""

    def __init__(self, trees: Sequence[TreeShape], of_text: Collection[TreeShape] = ()):
        """`trees` may be chosen, plain decoding among them; the first is used as long as nothing is known. `of_text`: those that
        n-grams draft alone, of which `observe_accept` is told whatever is in use."""
        if len(set(trees)) != len(trees) or PLAIN not in trees:
            raise ValueError(f"trees must differ and include plain decoding, got {', '.join(map(str, trees))}")
        self._current = self._last = trees[0]  # they differ during a probe
        self._bucket: int | None = None
        self._probe_cycles = 0  # left of the running probe
        self._of_text = frozenset(of_text)
        self._accept = {
            tree: OF_TEXT if tree in self._of_text or tree.head_steps == 0 else 1 + tree.of_head.num_steps / 2 for tree in trees
        }
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

    def observe_accept(self, tree: TreeShape, emitted: Sequence[int], factors: Sequence[DraftFactors]) -> None:
        """Records the tokens that a cycle emitted for each of its requests, and what they say of their factors. 0: the request had
        ended before."""
        if tree == PLAIN:  # its one token needs no estimate
            return
        promised, unexplained, verifications, kind = self._accept[tree] - 1, 0.0, 0, tree.head_steps == 0
        for tokens, own in zip(emitted, factors, strict=True):
            if tokens:
                verifications, factor = verifications + 1, own[kind]
                unexplained += tokens - 1 - factor.value * promised
                factor.weight = min(factor.weight, OWN_MEMORY) + 1
                factor.value += ((tokens - 1) / promised - factor.value) / factor.weight
        self._weight[tree] = min(self._weight[tree], MEMORY) + verifications
        self._accept[tree] = max(1 + LEAST, self._accept[tree] + unexplained / self._weight[tree])

    def choose(self, bucket: int, factors: Sequence[DraftFactors] = (), ready: Collection[TreeShape] | None = None) -> TreeShape:
        """The tree for the next cycle, at this compiled batch size, of the requests with these factors. (): of new ones. `ready`:
        those with programs. None: all."""
        # A new batch size ends a probe, because its cycle times differ.
        self._probe_cycles = max(0, self._probe_cycles - 1) if bucket == self._bucket else 0
        self._bucket, before = bucket, self._last
        if not self._probe_cycles:
            means = [sum([own[kind].value for own in factors]) / len(factors) for kind in (0, 1)] if factors else (1.0, 1.0)
            self._last = self._best_or_probe(bucket, means, self._accept if ready is None else ready)
        self._switches += self._last != before
        self._unused = {tree: 0 if tree == self._last else cycles + 1 for tree, cycles in self._unused.items()}
        return self._last

    def describe(self) -> AdaptiveState:
        """A snapshot for the statistics; cheap enough for every step."""
        best = {bucket: max(rates := self._rates(bucket, self._expected()), key=rates.__getitem__) for _, bucket in self._seconds}
        return AdaptiveState(self._current, best, dict(self._accept), dict(self._seconds), self._switches, self._probes)

    def _expected(self, means: Sequence[float] = (1.0, 1.0)) -> dict[TreeShape, float]:
        """Tokens per cycle and request of each tree, of requests with these mean factors."""
        return {tree: 1 + min(means[tree.head_steps == 0] * (accept - 1), tree.num_steps) for tree, accept in self._accept.items()}

    def _rates(self, bucket: int, expected: dict[TreeShape, float]) -> dict[TreeShape, float]:
        """The same per second, of the trees with known cycle times."""
        return {tree: tokens / self._seconds[tree, bucket] for tree, tokens in expected.items() if (tree, bucket) in self._seconds}

    def _best_or_probe(self, bucket: int, means: Sequence[float], ready: Collection[TreeShape]) -> TreeShape:
        """The current tree, which changes if another is better by more than errors; or one that begins a probe."""
        expected = {tree: tokens for tree, tokens in self._expected(means).items() if tree in ready}
        rates = self._rates(bucket, expected)
        best = max(rates, key=rates.__getitem__, default=self._current)
        if self._current in rates and rates[best] > rates[self._current] * (1 + MARGIN):
            self._current, self._weight[best] = best, min(self._weight[best], OLD_MEMORY)
        others = {tree: self._unused[tree] for tree in expected if tree != self._current}
        due = [tree for tree, cycles in others.items() if cycles >= len(others) * self._wait(tree, rates, bucket, expected[tree])]
        if not due:
            return self._current
        tree = max(due, key=lambda tree: rates.get(tree, float("inf")))
        self._probe_cycles, self._probes = PROBE_CYCLES, self._probes + 1
        self._weight[tree] = min(self._weight[tree], OLD_MEMORY)
        self._times.setdefault((tree, bucket), deque(maxlen=TIMES_KEPT))
        return tree

    def _wait(self, tree: TreeShape, rates: dict[TreeShape, float], bucket: int, expected: float) -> float:
        """Cycles out of use after which the only other tree is probed: more the further it is behind, as it is then unlikelier to
        have become the best."""
        if (tree, bucket) not in self._times:
            if tree in self._of_text:
                return 0.0 if expected >= PROMISING else math.inf
            return FIRST_TRY if self._current == PLAIN else 0.0
        patience = PATIENCE * (RARER if tree in self._of_text else 1)
        if tree not in rates or self._current not in rates:
            return patience
        return patience * (((1 + MARGIN) * max(1.0, rates[self._current] / rates[tree])) ** 2 - 1)
