"""The estimates behind an adaptive choice of the draft tree. Plain Python, no JAX.

A cycle of tree t emits accept_length(t) tokens per request and takes seconds(t, bucket), where a bucket is a compiled batch
size; plain decoding emits exactly one. The best tree has the highest accept_length / seconds. Both are measured in service: the
accept length depends on the text and hardly on the batch, so all buckets share one estimate; the seconds are kept per bucket. A
tree that is not in use is not measured, so it is tried for a few cycles now and then (a probe).

Texts differ more than trees do. So what is kept per tree is the accept length of a new request, and each request has factors of
its own (`DraftFactors`): its accepted drafts divided by those that the estimates promised; one for trees with a head, and one for
trees of n-grams alone. A batch shares a cycle, and is expected to accept what its tree promises to each request, times the
request's factor. From its results the estimate of a tree with a head learns only what the factor does not explain: the request's
first ten cycles or so count, later ones ever less. So a request whose drafts don't pay falls to plain decoding within some tens of
cycles, and the next one begins with the tree as before; only several such requests change that.

N-grams draft well where a text repeats, and that changes from cycle to cycle. How many of its last tokens came before (its match)
tells it, in all texts much alike: after 16 equal tokens nearly all drafts are accepted, after none hardly any. So all estimates
are kept per level of the match, and those of n-grams alone learn from all results. What they would have drafted is known while
other trees are in use (repeats.py). So their trees are first tried when a text repeats, and need few probes: only their times may
have changed.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean, median_low
from typing import NamedTuple

from jaxspec.engine.stats import AdaptiveState
from jaxspec.tree_shape import PLAIN, TreeShape

MARGIN = 0.04
"""Another tree must look better by this share, because estimates have errors of this size."""
PROBE_CYCLES = 8
PROBE_WAIT = 900
"""The unit of the wait for a probe, in cycles. Probes of a tree cost at most 0.3% of the throughput, times the ratio of the tokens
that its cycles emit to those of the current tree's."""
TIMES_KEPT = 11
"""Cycle times in a median: few enough for a probe to outvote the old ones."""
ACCEPT_MEMORY = 200.0
"""The highest weight of an accept length, in verifications as the next two: of several requests, because these differ."""
OLD_ACCEPT_MEMORY = 40.0
"""The highest weight of an old accept length when its tree is used again."""
ACCEPT_PRIOR = 10.0
"""The weight of the first guess, which is half of the head's levels."""
OLD = 300
"""Cycles without a tree after which its accept length is old."""
SEEN = 2000
"""Over how many cycles of requests `describe` takes the mean text."""
OWN_MEMORY = 75.0
"""The highest weight of a request's factor, in promised drafts, as the next two."""
OWN_PRIOR = 15.0
"""The weight of a factor's first guess, which is 1, for trees with a head."""
TEXT_PRIOR = 3.0
"""The weight of a factor's first guess for trees of n-grams alone."""
LEVELS = (2, 4, 8, 16)
"""The lengths of a match, in tokens, at which its level goes up by one."""
TEXT_SHARES = (0.03, 0.1, 0.3, 0.5, 0.9)
"""By level, the share of their depth to which n-grams are accepted, as a first guess (measured for depth 7, one cycle before the
draft: 0.04, 0.1, 0.25, 0.5, 0.9)."""
PROMISING = 1.3
"""The accept length from which a tree of n-grams alone is tried while its time is unknown."""
FIRST_TRY = 100
"""Cycles of plain decoding before a head's tree without a known time is tried: where programs compile at their first use, one that
a short text would hardly use must not hold it up."""
RARER = 10
"""How much longer trees of n-grams alone wait for a probe."""
LEAST = 0.05
"""The fewest accepted drafts per verification that a tree promises, because factors are divided by it."""


@dataclass(slots=True)
class DraftFactor:
    """How much more of its drafts one request accepts than others do."""

    value: float = 1.0
    weight: float = OWN_PRIOR
    """In promised drafts."""

    def observe(self, accepted: int, promised: float) -> None:
        """Records the drafts of one verification."""
        self.weight = min(self.weight, OWN_MEMORY) + promised
        self.value += (accepted - self.value * promised) / self.weight


class DraftFactors(NamedTuple):
    """The factors of one request, which end with it."""

    with_head: DraftFactor
    of_text: DraftFactor
    """Where n-grams draft alone."""

    @classmethod
    def new(cls) -> "DraftFactors":
        """Those of a new request."""
        return cls(DraftFactor(), DraftFactor(weight=TEXT_PRIOR))


class Outlook(NamedTuple):
    """What is known of one request's drafts when a cycle is chosen."""

    factors: DraftFactors
    level: int = 0
    """That of its text's match (`level_of`)."""


def level_of(match: int) -> int:
    """The level of a match of so many tokens.

    In:  9
    Out: 3
    """
    return bisect_right(LEVELS, match)


class AdaptiveTrees:
    """Chooses the tree so that speculation costs little at worst. Call `choose` before each cycle and the observers when its
    results arrive; nothing depends on how late that is."""

    def __init__(self, trees: Sequence[TreeShape], of_text: Collection[TreeShape] = ()):
        """`trees` may be chosen, plain decoding among them; the first is used as long as nothing is known. `of_text`: the trees
        that n-grams draft alone: `observe_accept` gets their results whichever tree is in use."""
        if len(set(trees)) != len(trees) or PLAIN not in trees:
            raise ValueError(f"trees must differ and include plain decoding, got {', '.join(map(str, trees))}")
        self._first = self._current = self._last = trees[0]  # the last two differ during a probe
        self._bucket: int | None = None
        self._probe_cycles = 0  # left of the running probe
        self._of_text = frozenset(of_text)
        # For each tree that merges a head with n-grams, except the first: its tree of n-grams alone.
        self._merged = {tree: tree.limited(0) for tree in trees[1:] if tree.head_steps and tree.limited(0) in self._of_text}
        self._accept = {tree: self._guess(tree) for tree in trees}  # by level
        self._weight = {tree: [ACCEPT_PRIOR] * len(TEXT_SHARES) for tree in trees}  # of the accept lengths
        self._seen = [1.0, *[0.0] * len(LEVELS)]  # how often requests had each level
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

    def observe_accept(self, tree: TreeShape, emitted: Sequence[int], requests: Sequence[Outlook]) -> None:
        """Records the tokens that a cycle emitted for each of its requests, with the levels by which it was chosen. 0: the request
        had ended before."""
        if tree == PLAIN:  # its one token needs no estimate
            return
        of_text, weight = tree in self._of_text, self._weight[tree]
        promised = {level: self._promised(tree, level) for level in {own.level for own in requests}}
        unexplained, verifications = dict.fromkeys(promised, 0.0), dict.fromkeys(promised, 0)
        for tokens, own in zip(emitted, requests, strict=True):
            if tokens:
                level, factor = own.level, own.factors[of_text]
                unexplained[level] += tokens - 1 - promised[level] * (1.0 if of_text else factor.value)
                verifications[level] += 1
                factor.observe(tokens - 1, promised[level])
        for level, count in verifications.items():
            weight[level] = min(weight[level], ACCEPT_MEMORY) + count
            self._accept[tree][level] = 1 + max(LEAST, promised[level] + unexplained[level] / weight[level])

    def choose(self, bucket: int, requests: Sequence[Outlook] = (), ready: Collection[TreeShape] | None = None) -> TreeShape:
        """The tree for the next cycle, at this compiled batch size, of these requests. (): of new ones. `ready`: those with
        programs. None: all."""
        for request in requests:
            self._seen[request.level] += 1
        if sum(self._seen) > SEEN:
            self._seen = [count / 2 for count in self._seen]
        # A new batch size ends a probe, because its cycle times differ.
        self._probe_cycles = max(0, self._probe_cycles - 1) if bucket == self._bucket else 0
        self._bucket, before = bucket, self._last
        if not self._probe_cycles:
            trees = [tree for tree in self._accept if ready is None or tree in ready]
            self._last = self._best_or_probe(bucket, self._expected(trees, requests or [Outlook(DraftFactors.new())]))
        self._switches += self._last != before
        self._unused = {tree: 0 if tree == self._last else cycles + 1 for tree, cycles in self._unused.items()}
        return self._last

    def describe(self) -> AdaptiveState:
        """A snapshot for the statistics, of a request with a mean text; cheap enough for every step."""
        levels = range(len(self._seen))
        expected = {tree: 1 + fmean([self._promised(tree, level) for level in levels], self._seen) for tree in self._accept}
        buckets = {bucket for _, bucket in self._seconds}
        best = {bucket: max(rates := self._rates(bucket, expected), key=rates.__getitem__) for bucket in sorted(buckets)}
        return AdaptiveState(self._current, best, expected, dict(self._seconds), self._switches, self._probes)

    def _guess(self, tree: TreeShape) -> list[float]:
        """The accept lengths with which a tree begins, by level."""
        of_head = 0.0 if tree in self._of_text else tree.of_head.num_steps / 2
        return [1 + max(of_head, tree.num_steps * share) for share in TEXT_SHARES]

    def _expected(self, trees: Sequence[TreeShape], requests: Sequence[Outlook]) -> dict[TreeShape, float]:
        """Tokens per cycle and request. (Many requests make this long, so it looks up little for each.)"""
        expected, levels = {}, {own.level for own in requests}
        for tree in trees:
            of_text, most = tree in self._of_text, tree.num_steps
            promises = {level: self._promised(tree, level) for level in levels}
            drafts = sum([min(own.factors[of_text].value * promises[own.level], most) for own in requests])
            expected[tree] = 1 + drafts / len(requests)
        return expected

    def _promised(self, tree: TreeShape, level: int) -> float:
        """The accepted drafts of a cycle for a new request. For an untried tree that merges a head with n-grams, the sum of
        the first tree's and those of n-grams alone."""
        alone = self._merged.get(tree)
        if alone is None or self._weight[tree][level] > ACCEPT_PRIOR:
            return self._accept[tree][level] - 1
        return min(self._accept[self._first][level] + self._accept[alone][level] - 2, tree.num_steps)

    def _rates(self, bucket: int, expected: dict[TreeShape, float]) -> dict[TreeShape, float]:
        """Tokens per second and request of the trees with known cycle times."""
        return {tree: tokens / self._seconds[tree, bucket] for tree, tokens in expected.items() if (tree, bucket) in self._seconds}

    def _best_or_probe(self, bucket: int, expected: dict[TreeShape, float]) -> TreeShape:
        """The current tree, which changes if another is better by more than errors; or one that begins a probe."""
        rates = self._rates(bucket, expected)
        best = max(rates, key=rates.__getitem__, default=self._current)
        if self._current in rates and rates[best] > rates[self._current] * (1 + MARGIN):
            self._current = best
            self._doubt(best)
        others = {tree: self._unused[tree] for tree in expected if tree != self._current}
        due = [tree for tree, cycles in others.items() if cycles >= len(others) * self._wait(tree, rates, bucket, expected[tree])]
        if not due:
            return self._current
        tree = max(due, key=lambda tree: rates.get(tree, float("inf")))
        self._probe_cycles, self._probes = PROBE_CYCLES, self._probes + 1
        self._doubt(tree)
        self._times.setdefault((tree, bucket), deque(maxlen=TIMES_KEPT))
        return tree

    def _doubt(self, tree: TreeShape) -> None:
        """What was known of it counts less if it was not used for long, unless the text tells."""
        if self._unused[tree] >= OLD and tree not in self._of_text:
            self._weight[tree] = [min(weight, OLD_ACCEPT_MEMORY) for weight in self._weight[tree]]

    def _wait(self, tree: TreeShape, rates: dict[TreeShape, float], bucket: int, expected: float) -> float:
        """Cycles out of use after which a tree is probed, if it is the only other one: the further it is behind, the more, as it is
        then less likely to have become the best."""
        if (tree, bucket) not in self._times:
            if tree in self._of_text:
                return 0.0 if expected >= PROMISING else math.inf
            return FIRST_TRY if self._current == PLAIN else 0.0
        patience = PROBE_WAIT * (RARER if tree in self._of_text else 1)
        if tree not in rates or self._current not in rates:
            return patience
        return patience * (((1 + MARGIN) * max(1.0, rates[self._current] / rates[tree])) ** 2 - 1)
