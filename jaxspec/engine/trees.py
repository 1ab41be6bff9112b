"""The choice of the draft tree for each cycle, and when drafters catch up. Plain Python, no JAX. adaptive.py has the estimates.

Requests of one batch share a cycle, unless they ask for a tree: two programs would read the weights twice.
"""

import time
from collections.abc import Callable, Collection, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from jaxspec.config import EngineConfig
from jaxspec.engine.adaptive import AdaptiveTrees, Outlook, level_of
from jaxspec.engine.request import Request
from jaxspec.engine.stats import AdaptiveState
from jaxspec.tree_shape import NGRAM_TREE, PLAIN, TreeShape

if TYPE_CHECKING:
    from jaxspec.decoding.drafter import DraftTraits

LONGEST_CHAIN = 3
"""Adaptive engines without adaptive_trees also use a chain of up to this length: it pays at batch sizes where wide trees don't."""
MAX_LAG = 16
"""Plain cycles after which the drafter must catch up: the device keeps features for this many."""


class Masks(Enum):
    """What the host's masks, made from grammars, are about."""

    NONE = auto()
    OF_ROOTS = auto()
    """One token per request: what may follow drafts is not known."""
    OF_NODES = auto()
    """The cycle is in two programs, with the host in between."""


class PlannedCycle(NamedTuple):
    """A cycle that is about to be launched."""

    tree: TreeShape
    requests: list[Request]
    behind: list[Request]
    """The requests whose drafts must catch up before it."""
    masks: Masks


class UnreadCycle(NamedTuple):
    """A launched cycle whose result was not read yet, if there are several trees to choose from."""

    tree: TreeShape
    requests: list[Request]
    outlooks: list[Outlook]
    """Of these requests."""
    bucket: int
    is_timed: bool
    """Whether the time since the previous result is this cycle's own."""


class TreeChoice:
    """The trees of an engine. Plans each step's cycles; with several trees to choose from, learns from their results.

    It also decides when drafters catch up: plain cycles leave the drafter out, so it lags behind by one slot each.
    """

    def __init__(
        self, config: EngineConfig, tree: TreeShape, traits: "DraftTraits", clock: Callable[[], float] = time.perf_counter
    ):
        """`tree`: the configured one. `traits`: the drafter's."""
        is_adaptive = config.adaptive and traits.max_topk > 0
        self.own = adaptive_trees(tree, config.adaptive_trees, limits_head=traits.limits_head) if is_adaptive else (tree,)
        """The trees to choose from."""
        self.all = tuple(dict.fromkeys((*self.own, *config.request_trees)))
        self.most_emitted = max(tree.num_steps for tree in self.all) + 1
        """Tokens that a cycle emits per request, at most."""
        self.lags = traits.lags and PLAIN in self.all
        """Plain cycles leave the drafter out, so it lags and catches up."""
        self._of_text = [tree for tree in self.own if tree.num_steps and (traits.from_text or tree.head_steps == 0)]
        self._depths = {tree.num_steps for tree in self._of_text}
        self._reads_text = traits.from_text or traits.limits_head
        self._adaptive = AdaptiveTrees(self.own, self._of_text) if len(self.own) > 1 else None
        self._clock = clock
        self._last_read: float | None = None
        """When the previous cycle's result arrived; None if no cycle came directly before."""
        self._unread: list[UnreadCycle] = []
        self._prefills_before = False

    def measure(
        self, time_cycle: Callable[[int, TreeShape], list[float]], batches: Sequence[int], ready: Collection[TreeShape]
    ) -> None:
        """Times every program that is there (Runner.time_cycle), so that the first choices are not blind."""
        if self._adaptive:
            for tree in (tree for tree in self.own if tree in ready):
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
        """The cycles of one step for these requests, one per tree, those under grammars first. Call it in every step, with or
        without requests.

        Args:
            batches: the compiled batch sizes.
            ready: the trees with compiled programs. A request for another tree gets the engine's choice meanwhile.
            in_two: those with compiled halves, for requests under grammars.
            prefills: whether the step launches prefills too. The device runs them after the step's cycles, so they delay the next.
        """
        free = [request for request in requests if request.matcher is None]
        parts: list[tuple[Sequence[Request], Collection[TreeShape], Masks]] = [(free, ready, Masks.NONE)]
        if len(free) < len(requests):
            constrained = [request for request in requests if request.matcher is not None]
            plain = PLAIN if PLAIN in ready else self.own[0]
            parts.insert(0, (constrained, in_two, Masks.OF_NODES) if in_two else (constrained, [plain], Masks.OF_ROOTS))
        cycles = [
            PlannedCycle(tree, group, self._catch_up(group, tree) if self.lags else [], masks)
            for some, usable, masks in parts
            for tree, group in self._by_tree(some, batches, usable).items()
        ]
        if self._adaptive is not None:
            self._expect(cycles, batches)
        self._prefills_before = prefills
        return cycles

    def _expect(self, cycles: list[PlannedCycle], batches: Sequence[int]) -> None:
        """Notes what there is to learn from these cycles. Those under grammars are read last."""
        is_timed = len(cycles) == 1 and not cycles[0].behind and not self._prefills_before
        for cycle in sorted(cycles, key=lambda cycle: cycle.masks is not Masks.NONE):
            size, known = bucket(len(cycle.requests), batches), outlooks(cycle.requests)
            self._unread.append(UnreadCycle(cycle.tree, cycle.requests, known, size, is_timed))
        if not cycles:
            self._last_read = None

    def choose(self, requests: Sequence[Request], batches: Sequence[int], ready: Collection[TreeShape]) -> TreeShape:
        """The tree for a cycle of these requests, one with programs."""
        if self._adaptive is None:
            return self.own[0]
        return self._adaptive.choose(bucket(len(requests), batches), outlooks(requests), ready)

    def was_read(self, emitted: Sequence[int], *, drafts_count: bool = True) -> None:
        """Records the result of the oldest unread cycle: `emitted` tokens for each of its requests, which have them by now.
        `drafts_count`: as for Launched."""
        if self._adaptive is None:
            return
        cycle, now, before = self._unread.pop(0), self._clock(), self._last_read
        self._last_read = now
        if not any(emitted) or cycle.tree not in self.own or not drafts_count:
            return
        self._adaptive.observe_accept(cycle.tree, emitted, cycle.outlooks)
        if before is not None and cycle.is_timed:
            self._adaptive.observe_time(cycle.tree, cycle.bucket, now - before)
        others = [tree for tree in self._of_text if tree != cycle.tree]
        for request in cycle.requests if self._reads_text else ():
            self._read_text(self._adaptive, request, others)

    def _read_text(self, adaptive: AdaptiveTrees, request: Request, others: Sequence[TreeShape]) -> None:
        """Looks for repeats in a text's new tokens, and records what these other trees would have emitted."""
        for depth, emitted, match in request.repeats.follow(request.tokens, len(request.prompt), self._depths):
            for tree in others:
                if tree.num_steps == depth:
                    adaptive.observe_accept(tree, [emitted], [Outlook(request.draft_factors, level_of(match))])

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
        chosen = self.choose(undecided, batches, ready)
        usable = [tree for tree in (chosen, self.own[0], *ready) if tree in ready] or self.own
        groups = {usable[0]: undecided}
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
        if tree.num_steps == 0:
            for request in requests:
                request.held.lag += 1
        return behind


def outlooks(requests: Sequence[Request]) -> list[Outlook]:
    """What is known of their drafts by now."""
    return [Outlook(request.draft_factors, level_of(request.repeats.match)) for request in requests]


def bucket(requests: int, batches: Sequence[int]) -> int:
    """The compiled batch size for this many requests.

    In:  3, (1, 2, 4, 8)
    Out: 4
    """
    return min([batch for batch in batches if batch >= requests])


def adaptive_trees(tree: TreeShape, candidates: Sequence[TreeShape] = (), *, limits_head: bool = False) -> tuple[TreeShape, ...]:
    """The trees an adaptive engine chooses from: the configured one, the candidates (default: a chain), and plain decoding.

    In:  5/4/8
    Out: 5/4/8, 3/1/4, 0/1/1

    A head that is merged with n-grams (`limits_head`) brings two more: deeper n-grams beside it, for text that repeats now and
    then, and n-grams alone, for text that repeats so much that the head's forwards are wasted. None is of the head alone: n-grams
    take some 0.15 ms, and a discount of their scores keeps wrong ones out of the tree. And there are no more: each takes a program
    per batch size, and all share the probes.

    In:  5/4/8, limits_head
    Out: 5/4/8, 7/4/8/5, 7/4/8/0, 3/1/4, 0/1/1
    """
    default = [TreeShape(min(LONGEST_CHAIN, tree.num_steps or LONGEST_CHAIN), 1)]
    if limits_head:
        deeper = with_deeper_text(tree)
        default = [deeper, deeper.limited(0), *default]
    return tuple(dict.fromkeys((tree, *(candidates or default), PLAIN)))


def with_deeper_text(tree: TreeShape) -> TreeShape:
    """The tree in which n-grams go at least as deep as by default, and a head with them no deeper than in this one.

    In:  3/1/4
    Out: 7/4/8/3
    """
    deep = NGRAM_TREE if tree.num_steps < NGRAM_TREE.num_steps else tree
    return deep.limited(tree.of_head.num_steps)
