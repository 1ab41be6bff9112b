"""The adaptive choice of the tree in simulated worlds, against always the configured tree and always plain decoding."""

import bisect
import itertools
import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from jaxspec.engine.adaptive import FIRST_TRY, LEVELS, PROBE_CYCLES, AdaptiveTrees, DraftFactors, Outlook, level_of
from jaxspec.tree_shape import TreeShape

PLAIN, CHAIN, TREE, LARGE = TreeShape(num_steps=0), TreeShape(3, 1), TreeShape(3, 2, 6), TreeShape(5, 4, 16)
BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True)
class World:
    """What is true; all may depend on the cycle's number."""

    seconds: Callable[[TreeShape, int, int], float]
    """Of one cycle, given tree, bucket and number."""
    hits: Callable[[int], float] = lambda now: 0.7
    """The probability that a draft is accepted if its parent was."""
    batch: Callable[[int], int] = lambda now: 1
    request: Callable[[int], int] = lambda now: 0
    """The first of the batch, by a number of its own; the others are those that follow."""
    seeded: float | None = 1.0
    """What warm-up measures, as a multiple of the first true times. None: no warm-up."""
    trees: Sequence[TreeShape] = (CHAIN, PLAIN)
    cycles: int = 3000

    def bucket(self, now: int) -> int:
        return BUCKETS[bisect.bisect_left(BUCKETS, self.batch(now))]

    def tokens(self, tree: TreeShape, now: int) -> float:
        """Expected of one cycle."""
        hits = self.hits(now)
        return self.batch(now) * sum(hits**depth for depth in range(tree.num_steps + 1))

    def against_fixed(self, chosen: Sequence[TreeShape], start: int = 0) -> float:
        """How long the better fixed policy, the first tree or plain decoding, would take for the same tokens, over the own time.

        From cycle `start` on, and expected values, so that the comparison itself has no noise.
        """
        seconds, fixed = 0.0, {self.trees[0]: 0.0, PLAIN: 0.0}
        for now in range(start, self.cycles):
            bucket, caught_up = self.bucket(now), not now or chosen[now - 1] == chosen[now]
            seconds += self.seconds(chosen[now], bucket, now) * (1.0 if caught_up else 1.1)
            tokens = self.tokens(chosen[now], now)
            for tree in fixed:
                fixed[tree] += tokens / self.tokens(tree, now) * self.seconds(tree, bucket, now)
        return min(fixed.values()) / seconds


def noisy(seconds: float, rng: random.Random) -> float:
    """Most cycles take a little longer or shorter, one in a hundred three times as long."""
    return seconds * (3 if rng.random() < 0.01 else max(0.7, rng.gauss(1, 0.05)))


def accepted(hits: float, depth: int, rng: random.Random) -> int:
    return 1 if not depth or rng.random() >= hits else 1 + accepted(hits, depth - 1, rng)


def new_request() -> Outlook:
    return Outlook(DraftFactors.new())


Requests = defaultdict[int, Outlook]


def running(world: World, requests: Requests, now: int) -> list[Outlook]:
    return [requests[world.request(now) + row] for row in range(world.batch(now))]


def observe(controller: AdaptiveTrees, world: World, requests: Requests, tree: TreeShape, now: int, rng: random.Random) -> None:
    batch = world.batch(now)
    if now and world.batch(now - 1) == batch:  # otherwise a prefill came between
        controller.observe_time(tree, world.bucket(now), noisy(world.seconds(tree, world.bucket(now), now), rng))
    emitted = [accepted(world.hits(now), tree.num_steps, rng) for _ in range(batch)]
    controller.observe_accept(tree, emitted, running(world, requests, now))


def simulate(world: World, seed: int) -> tuple[AdaptiveTrees, list[TreeShape]]:
    """Runs the controller; what a cycle measured arrives after the next choice, as in the engine."""
    rng, controller, requests = random.Random(seed), AdaptiveTrees(world.trees), Requests(new_request)
    chosen: list[TreeShape] = []
    late: deque[tuple[TreeShape, int]] = deque()
    for tree in world.trees if world.seeded is not None else ():
        for bucket in BUCKETS:
            for _ in range(3):
                controller.observe_time(tree, bucket, noisy(world.seconds(tree, bucket, 0) * world.seeded, rng))
    for now in range(world.cycles):
        chosen.append(controller.choose(world.bucket(now), running(world, requests, now)))
        late.append((chosen[-1], now))
        if len(late) > 1:
            observe(controller, world, requests, *late.popleft(), rng)
    return controller, chosen


def rows(cost: float, growth: Callable[[TreeShape, int], float] = lambda tree, now: 1.0) -> Callable[[TreeShape, int, int], float]:
    """A cycle reads the weights once, computes bucket * nodes rows, and drafts its levels; its time may change by `growth`."""

    def seconds(tree: TreeShape, bucket: int, now: int) -> float:
        return (1 + cost * (bucket * tree.num_draft_tokens - 1) + 0.06 * tree.num_steps) * growth(tree, now)

    return seconds


def chain_gains(share: float) -> Callable[[TreeShape, int, int], float]:
    """The chain is better than plain decoding by this share, at any batch size."""
    accept_length = sum(0.7**depth for depth in range(CHAIN.num_steps + 1))
    return lambda tree, bucket, now: 1.0 if tree == PLAIN else accept_length / (1 + share)


def grows(grown: TreeShape, share: float) -> Callable[[TreeShape, int], float]:
    """One tree's cycles become slower by this share over the first 1500 cycles."""
    return lambda tree, now: 1 + share * min(1.0, now / 1500) * (tree == grown)


def changing_batch(longest: int, seed: int = 1) -> Callable[[int], int]:
    rng, batches = random.Random(seed), list[int]()
    while len(batches) < 3000:
        batches += [rng.randint(1, 16)] * rng.randint(1, longest)
    return lambda now: batches[now]


def differing_requests(low: float, high: float, cycles: int, batch: int = 1) -> dict[str, Any]:
    """Every request has its own probability of a hit; one batch of them follows the other."""
    rng, hits, first = random.Random(3), list[float](), list[int]()
    while len(hits) < 3000:
        of_text, length, number = rng.uniform(low, high), rng.randint(cycles // 2, cycles * 3 // 2), len(hits) * batch
        hits, first = hits + [of_text] * length, first + [number] * length
    return {"hits": lambda now: hits[now], "request": lambda now: first[now], "batch": lambda now: batch}


MANY = (CHAIN, PLAIN, TREE, LARGE)
WORLDS = {
    "always wins": World(rows(0.01)),
    "never wins": World(rows(0.5), batch=lambda now: 8),
    **{f"wins when small, batch {batch}": World(rows(0.14), batch=lambda now, batch=batch: batch) for batch in (1, 2, 4, 8, 16)},
    "wins when small, batch changes": World(rows(0.14), batch=changing_batch(40)),
    "batch changes quickly": World(rows(0.14), batch=changing_batch(8)),
    "requests differ": World(rows(0.25), **differing_requests(0.3, 0.95, 50)),
    "requests differ, batch 8": World(rows(0.05), **differing_requests(0.5, 0.85, 20, 8)),
    "little to gain": World(chain_gains(0.08)),
    "acceptance collapses": World(rows(0.15), hits=lambda now: 0.7 if now < 1500 else 0.1),
    "no warm-up, always wins": World(rows(0.01), seeded=None),
    "no warm-up, never wins": World(rows(0.5), seeded=None, batch=lambda now: 8),
    "no warm-up, batch changes": World(rows(0.14), seeded=None, batch=changing_batch(40)),
    "warm-up too fast": World(rows(0.6), seeded=0.8),
    "warm-up too slow": World(rows(0.14), seeded=1.3),
    "tree becomes slower": World(rows(0.2, grows(CHAIN, 0.3))),
    "plain becomes slower": World(rows(0.4, grows(PLAIN, 0.3))),
    "plain becomes faster": World(rows(0.3, grows(PLAIN, -0.3))),
    "all slower now and then": World(rows(0.5, lambda tree, now: 1.6 if now % 700 > 500 else 1.0)),
    "many trees": World(rows(0.05), trees=MANY),
    "many trees, no warm-up": World(rows(0.05), trees=MANY, seeded=None, batch=lambda now: 8),
}


def switches_of(values: Sequence[object]) -> int:
    return sum(before != after for before, after in itertools.pairwise(values))


@pytest.mark.parametrize("name", WORLDS)
def test_never_much_slower_than_the_better_fixed_policy(name):
    world = WORLDS[name]
    _, chosen = simulate(world, seed=0)
    ratio, switches = world.against_fixed(chosen), switches_of(chosen)
    assert ratio >= 0.95, f"{ratio:.3f} of the better fixed policy, with {switches} switches"
    assert switches <= 120 + switches_of([world.bucket(now) for now in range(world.cycles)]) / 2


# What changes does so at cycle 2000. At a batch of 8, as many cycles see eight times as many verifications.
CHANGES = {
    "collapse": (World(rows(0.15), lambda now: 0.7 if now < 2000 else 0.1, cycles=3000), 300),
    "collapse, batch 8": (World(rows(0.02), lambda now: 0.7 if now < 2000 else 0.1, lambda now: 8, cycles=3000), 60),
    "recovery": (World(rows(0.15), lambda now: 0.1 if now < 2000 else 0.7, cycles=6000), 3000),
    "recovery, batch 8": (World(rows(0.02), lambda now: 0.1 if now < 2000 else 0.7, lambda now: 8, cycles=4500), 2000),
    "faster tree": (World(rows(0.6, lambda tree, now: 0.6 if tree == CHAIN and now >= 2000 else 1.0), cycles=4500), 1200),
}


@pytest.mark.parametrize("name", CHANGES)
def test_catches_up_after_a_change(name):
    world, cycles = CHANGES[name]
    for seed in range(3):
        _, chosen = simulate(world, seed)
        assert world.against_fixed(chosen, start=2000 + cycles) >= 0.95


@pytest.mark.parametrize("gain", [-0.01, 0.0, 0.01])
def test_equally_good_trees_do_not_flap(gain):
    for seed in range(3):
        controller, chosen = simulate(World(chain_gains(gain)), seed)
        own = controller.describe()
        assert own.switches == switches_of(chosen)
        assert own.probes <= 50 and own.switches - 2 * own.probes <= 20


def test_starts_with_the_tree_that_pays():
    """The first guess is optimistic enough to try, and few verifications correct it."""
    for hits, seconds in ((0.7, rows(0.1)), (0.1, rows(0.1)), (0.5, rows(0.5))):
        world = World(seconds, hits=lambda now, hits=hits: hits, cycles=300)
        for seed in range(5):
            assert world.against_fixed(simulate(world, seed)[1]) >= 0.93


def test_the_further_behind_a_tree_is_the_rarer_are_its_probes():
    waits = []
    for seconds in (2.8, 5.0, 10.0):  # a cycle of the chain emits what 2.5 plain ones do, as guessed
        controller = AdaptiveTrees((CHAIN, PLAIN))
        for tree, time in ((CHAIN, seconds), (PLAIN, 1.0)):
            controller.observe_time(tree, 1, time)
        chosen = [controller.choose(1) for _ in range(50000)]
        starts = [now for now in range(50000) if chosen[now] == CHAIN != chosen[now - 1]]
        assert PROBE_CYCLES * (seconds - 2.5) * len(starts) / 50000 < 0.008
        waits.append(starts[0])
    assert waits[1] > 5 * waits[0] and waits[2] > 4 * waits[1], f"{waits} cycles before the first probe"


def test_many_trees_share_the_budget_of_probes():
    controller = AdaptiveTrees(MANY)
    for tree in MANY:
        controller.observe_time(tree, 1, 1.0 if tree == PLAIN else 1.25 * (1 + tree.num_steps / 2))  # a fifth less than plain
    chosen = [controller.choose(1) for _ in range(10000)]
    lost = sum((1 + tree.num_steps / 2) * 0.25 for tree in chosen if tree != PLAIN)
    assert set(chosen) == set(MANY) and lost / 10000 < 0.02


def steady(seconds: dict[TreeShape, float], tokens: int) -> AdaptiveTrees:
    """A controller that knows exact times, and that a chain's four verifications emit `tokens`."""
    controller, requests = AdaptiveTrees((CHAIN, PLAIN)), [new_request() for _ in range(20)]
    for _ in range(30):
        controller.observe_accept(CHAIN, [tokens // 4 + (number < tokens % 4) for number in range(4)] * 5, requests)
        for tree, time in seconds.items():
            controller.observe_time(tree, 1, time)
    return controller


@dataclass
class Text:
    """A request, and the chance of a hit in it."""

    hits: float
    outlook: Outlook = field(default_factory=new_request)


def serve(controller: AdaptiveTrees, texts: Sequence[Text], cycles: int, rng: random.Random) -> list[TreeShape]:
    """The trees that were chosen for these requests together, where a cycle of the chain takes 1.8 plain ones."""
    chosen, requests = [], [text.outlook for text in texts]
    for _ in range(cycles):
        chosen.append(tree := controller.choose(len(texts), requests))
        controller.observe_time(tree, len(texts), 1.8 if tree == CHAIN else 1.0)
        controller.observe_accept(tree, [accepted(text.hits, tree.num_steps, rng) for text in texts], requests)
    return chosen


def used_to(good: float, batch: int, rng: random.Random) -> AdaptiveTrees:
    """One that knows all times, and texts of this kind."""
    controller = AdaptiveTrees((CHAIN, PLAIN))
    for size in (1, batch):
        controller.observe_time(CHAIN, size, 1.8)
        controller.observe_time(PLAIN, size, 1.0)
    for _ in range(5):
        assert serve(controller, [Text(good)], 200, rng)[-100:].count(CHAIN) >= 90
    return controller


def test_a_request_whose_drafts_do_not_pay_falls_to_plain_decoding_and_the_next_begins_with_the_tree():
    for seed in range(10):
        controller = used_to(0.8, 1, rng := random.Random(seed))
        before = controller.describe().accept_lengths[CHAIN]
        bad = serve(controller, [Text(0.05)], 300, rng)
        assert bad[0] == CHAIN and PLAIN in bad[:40], "within some tens of cycles"
        assert bad[60:].count(PLAIN) >= 220, "but for probes"
        after = controller.describe().accept_lengths[CHAIN]
        assert after > 1 + 0.8 * (before - 1), "what others may expect has hardly changed"
        good = serve(controller, [Text(0.8)], 300, rng)
        assert good[0] == CHAIN and good.count(CHAIN) >= 280


def test_a_mixed_batch_follows_the_mean_of_its_requests():
    """Three bad texts: plain. Three good ones beside one bad one: the chain, for all, as they share the cycle."""
    for seed in range(10):
        controller = used_to(0.8, 4, rng := random.Random(seed))
        bad, good = [Text(0.02) for _ in range(4)], [Text(0.8) for _ in range(4)]
        assert serve(controller, [*bad[:3], good[0]], 150, rng)[60:].count(PLAIN) >= 60
        assert serve(controller, [bad[3], *good[1:]], 150, rng).count(CHAIN) >= 130


def test_it_tries_again_when_a_text_may_have_turned_good():
    for seed in range(10):
        controller, text = used_to(0.8, 1, rng := random.Random(seed)), Text(0.05)
        assert serve(controller, [text], 200, rng)[-50:].count(PLAIN) >= 30
        text.hits = 0.8
        after = serve(controller, [text], 3000, rng)
        assert after[-500:].count(CHAIN) >= 470, f"{after.count(CHAIN)} of 3000"


def test_each_cycle_is_drafted_by_what_the_match_promises():
    """N-grams alone after a long match, though the head pays, and the head after none, in one text, whatever came before. Long
    matches cost the head's tree nothing: after none its estimate stays."""
    alone, rng = TreeShape(7, 4, 8, 0), random.Random(0)
    seconds = {LARGE: 2.0, alone: 1.4, PLAIN: 1.0}
    controller = AdaptiveTrees(tuple(seconds), [alone])
    for tree, time in seconds.items():
        controller.observe_time(tree, 1, time)
    chosen: dict[int, list[TreeShape]] = {0: [], len(LEVELS): []}
    for _ in range(30):
        factors, level = DraftFactors.new(), rng.choice(list(chosen))
        for _ in range(100):
            level = level if rng.random() < 0.8 else rng.choice(list(chosen))
            request, of_text = [Outlook(factors, level)], 0.9 if level else 0.05
            tree = controller.choose(1, request)
            hits = max(0.75, of_text) if tree == LARGE else of_text
            controller.observe_accept(tree, [accepted(hits, tree.num_steps, rng)], request)
            if tree != alone:  # the text tells
                controller.observe_accept(alone, [accepted(of_text, alone.num_steps, rng)], request)
            chosen[level].append(tree)
    assert min(each.count(tree) / len(each) for each, tree in zip(chosen.values(), (LARGE, alone), strict=True)) > 0.95
    assert controller.describe().accept_lengths[LARGE] > 3


def test_n_grams_alone_have_a_factor_of_their_own():
    alone, own = TreeShape(7, 4, 8, 0), new_request()
    controller = AdaptiveTrees((LARGE, alone, PLAIN), [alone])
    for _ in range(5):
        controller.observe_accept(alone, [1], [own._replace(level=len(LEVELS))])
    assert own.factors.of_text.value < 0.5 and own.factors.with_head.value == 1


def test_the_mean_text_is_that_of_the_last_cycles():
    controller = AdaptiveTrees((CHAIN, PLAIN))
    for level, cycles in ((0, 20_000), (len(LEVELS), 5000)):
        for _ in range(cycles):
            controller.choose(1, [Outlook(DraftFactors.new(), level)])
    assert controller.describe().accept_lengths[CHAIN] > 3.5, "3.7 is guessed at the last level, 2.5 at the first"


def test_levels_begin_where_they_say():
    assert [level_of(match) for match in (0, 1, 2, 3, 4, 7, 8, 15, 16, 4000)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_many_bad_requests_change_what_a_new_one_begins_with():
    controller = used_to(0.8, 1, rng := random.Random(0))
    for _ in range(40):
        serve(controller, [Text(0.05)], 60, rng)
    assert serve(controller, [Text(0.05)], 60, rng).count(PLAIN) >= 50


def test_a_late_outlier_changes_nothing():
    controller = steady({CHAIN: 2.0, PLAIN: 1.0}, tokens=9)
    for now in range(60):  # the first probe comes later
        assert controller.choose(1) == CHAIN
        controller.observe_time(CHAIN, 1, 6.0 if now % 5 == 0 else 2.0)


def test_a_new_batch_size_decides_at_once():
    controller = steady({CHAIN: 1.0, PLAIN: 1.0}, tokens=8)
    controller.observe_time(PLAIN, 8, 1.0)
    controller.observe_time(CHAIN, 8, 4.0)
    assert [controller.choose(bucket) for bucket in (1, 8, 8, 1, 8)] == [CHAIN, PLAIN, PLAIN, CHAIN, PLAIN]
    assert controller.describe().best == {1: CHAIN, 8: PLAIN}


def test_an_unknown_tree_is_tried_once_even_if_no_time_ever_arrives():
    controller = AdaptiveTrees((CHAIN, PLAIN))
    assert [controller.choose(4) for _ in range(300)] == [PLAIN] * PROBE_CYCLES + [CHAIN] * (300 - PROBE_CYCLES)


def test_a_text_that_begins_with_plain_decoding_tries_a_heads_tree_only_if_it_is_long():
    controller = AdaptiveTrees((PLAIN, CHAIN))
    assert [controller.choose(1) for _ in range(FIRST_TRY + 1)] == [PLAIN] * FIRST_TRY + [CHAIN]


def test_a_new_batch_size_ends_a_probe():
    controller = AdaptiveTrees((CHAIN, PLAIN))
    controller.observe_time(CHAIN, 1, 1.0)
    controller.observe_time(PLAIN, 1, 1.0)
    assert [controller.choose(bucket) for bucket in (4, 4, 1, 1)] == [PLAIN, PLAIN, CHAIN, CHAIN]


def test_describe_tells_what_is_believed():
    controller = steady({CHAIN: 2.0, PLAIN: 1.0}, tokens=9)
    controller.observe_accept(PLAIN, [1, 0, 1, 1], [new_request() for _ in range(4)])
    own = controller.describe()
    assert own.accept_lengths[PLAIN] == 1 and own.accept_lengths[CHAIN] == pytest.approx(2.25, abs=0.05)
    assert own.seconds == {(CHAIN, 1): 2.0, (PLAIN, 1): 1.0}


@pytest.mark.parametrize("trees", [(), (CHAIN,), (CHAIN, PLAIN, CHAIN)], ids=len)
def test_trees_are_checked(trees):
    with pytest.raises(ValueError, match="plain decoding"):
        AdaptiveTrees(trees)
