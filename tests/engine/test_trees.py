"""Trees change between cycles without a trace in the output: same tokens, and a head that misses nothing."""

import gc
import random
import weakref
from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest

from jaxspec.config import EngineConfig
from jaxspec.decoding.drafter import DraftTraits
from jaxspec.engine.adaptive import OWN_PRIOR
from jaxspec.engine.engine import Engine
from jaxspec.engine.pages import HeldPages
from jaxspec.engine.request import GenerationRequest, Request
from jaxspec.engine.trees import MAX_LAG, TreeChoice, adaptive_trees
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import engine_target, oracle_head, tiny_engine
from jaxspec.text.detokenizer import Detokenizer
from jaxspec.tree_shape import PLAIN, TreeShape
from tests.engine.served import served
from tests.sets import exhaustive

CHAIN = TreeShape(3, 1, 4)
ADAPTIVE, OF_HEAD = EngineConfig(adaptive=True), DraftTraits(max_topk=8, lags=True)
PROMPTS = [[3, 1, 4, 1, 5], list(range(20, 50)), [64, 2]]
PARAMS = [SamplingParams(max_tokens=60, temperature=temperature, seed=4) for temperature in (0.0, 0.8, 1.2)]


def run(engine: Engine) -> list[list[int]]:
    asked = (GenerationRequest(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True))
    return [request.output for request in served(engine, *asked)]


def choose_by(engine: Engine, monkeypatch: pytest.MonkeyPatch, choices) -> list[TreeShape]:
    """Makes the engine take these trees in turn; returns the list of those taken, which grows."""
    taken: list[TreeShape] = []

    def choose(_requests: list[Request], _batches: Sequence[int], _ready: Collection[TreeShape]) -> TreeShape:
        taken.append(next(choices))
        return taken[-1]

    monkeypatch.setattr(engine.trees, "choose", choose)
    return taken


@pytest.mark.variants
@pytest.mark.parametrize("overlap", [exhaustive(True), False])
def test_any_order_of_trees_gives_the_same_tokens(monkeypatch, overlap):
    expected = run(tiny_engine(PLAIN))
    engine, rng = tiny_engine(TreeShape(3, 2, 5), adaptive=True, overlap=overlap), random.Random(0)
    assert engine.trees.all == (TreeShape(3, 2, 5), CHAIN, PLAIN)
    stretches = ([tree] * rng.randrange(1, 25) for tree in iter(lambda: rng.choice(engine.trees.all), None))
    taken = choose_by(engine, monkeypatch, (tree for stretch in stretches for tree in stretch))
    assert run(engine) == expected
    assert run(engine) == expected, "with the pages of the first time in the cache"
    assert len(set(taken)) == 3


@pytest.mark.variants
@pytest.mark.parametrize("plain_cycles", [1, MAX_LAG - 1, MAX_LAG, MAX_LAG + 1, 3 * MAX_LAG + 5])
def test_the_head_catches_up_after_plain_cycles(monkeypatch, plain_cycles):
    """Of the head's cache tests/decoding has the rest: an oracle attends to nothing, but it knows where it is."""
    target, prompt = engine_target(), PROMPTS[0]
    params = SamplingParams(max_tokens=80, temperature=0)
    (text,) = served(tiny_engine(PLAIN, target=target), GenerationRequest(prompt, params))
    head = oracle_head(target.config, [*prompt, *text.output])
    engine = tiny_engine(CHAIN, target=target, head=head, adaptive=True)
    choose_by(engine, monkeypatch, iter([PLAIN] * plain_cycles + [CHAIN] * 100))
    (request,) = served(engine, GenerationRequest(prompt, params))
    assert request.output == text.output
    lengths = list(request.speculation.accept_lengths)
    after = lengths[plain_cycles:]
    assert lengths[:plain_cycles] == [1] * plain_cycles and after[:-1] == [4] * (len(after) - 1)


@pytest.mark.exhaustive
def test_an_adaptive_engine_measures_at_its_start():
    engine = tiny_engine(TreeShape(3, 2, 5), adaptive=True, context_length=64, prefill_chunk=8, max_running_requests=1)
    engine.warm_up()
    believed = engine.stats().adaptive
    assert {tree for tree, _ in believed.seconds} == set(engine.trees.all) and set(believed.best) == {1}


def test_only_undisturbed_cycles_are_timed():
    now = [0.0]
    trees = TreeChoice(replace(ADAPTIVE, request_trees=(TreeShape(2, 1),)), TreeShape(3, 1), OF_HEAD, lambda: now[0])
    tree = trees.all[0]

    def request(own: TreeShape | None = None, lag: int = 0) -> Request:
        return Request("a", GenerationRequest((1,), SamplingParams()), 0, (), Detokenizer(None), tree=own, held=HeldPages(lag=lag))

    def cycle(seconds: float, *, catch_up: bool = False, prefill: bool = False) -> None:
        (planned,) = trees.plan([request(lag=int(catch_up))], [1], trees.all, prefills=prefill)
        assert planned.tree == tree and len(planned.behind) == catch_up
        now[0] += seconds
        trees.was_read([2])

    def times() -> list[float]:
        return [seconds for (which, _), seconds in trees.describe().seconds.items() if which == tree]

    trees.choose = lambda _requests, _batches, _ready: tree
    cycle(9.0)  # nothing before it: how long it took can't be told
    assert times() == []
    cycle(7.0, catch_up=True)
    assert times() == []
    cycle(1.0, prefill=True)
    assert times() == [1.0]
    cycle(0.5)  # after a prefill: its own time is unknown (a shorter one, as the lower of two times counts)
    assert times() == [1.0]
    cycle(1.0)
    assert trees.plan([], [1], trees.all, prefills=False) == []
    cycle(30.0)  # idle before
    assert len(trees.plan([request(), request(TreeShape(2, 1))], [1, 2], trees.all, prefills=False)) == 2
    now[0] += 7.0
    trees.was_read([2])
    now[0] += 7.0
    trees.was_read([1])
    cycle(1.0)
    assert times() == [1.0]


def test_what_a_request_accepted_goes_with_it():
    """Each request keeps its own factor, of the cycle that was read; nothing else remembers a request that has ended."""
    trees = TreeChoice(ADAPTIVE, TreeShape(3, 1), OF_HEAD)
    good, bad = (Request(name, GenerationRequest((1,), SamplingParams()), 0, (), Detokenizer(None)) for name in "ab")
    trees.choose = lambda _requests, _batches, _ready: CHAIN
    for _ in range(20):
        trees.plan([good, bad], [2], trees.all, prefills=False)
        trees.plan([bad], [2], trees.all, prefills=False)
        trees.was_read([4, 1])
        trees.was_read([1])
    with_head = [request.draft_factors.with_head for request in (good, bad)]
    assert with_head[1].value < 0.5 < 1 < with_head[0].value
    assert OWN_PRIOR < with_head[0].weight < with_head[1].weight
    ended = [weakref.ref(good), weakref.ref(bad)]
    del good, bad
    gc.collect()
    assert [each() for each in ended] == [None, None]


def test_heads_catch_up_before_a_tree_and_when_there_is_no_room_for_more_lag():
    trees = TreeChoice(ADAPTIVE, TreeShape(3, 1), OF_HEAD)
    request = Request("a", GenerationRequest((1,), SamplingParams()), 0, (), Detokenizer(None))

    def behind(tree: TreeShape) -> list[Request]:
        trees.choose = lambda _requests, _batches, _ready: tree
        (planned,) = trees.plan([request], [1], trees.all, prefills=False)
        return planned.behind

    assert behind(TreeShape(3, 1)) == [] and request.held.lag == 0
    for lag in range(1, MAX_LAG + 1):
        assert behind(PLAIN) == [] and request.held.lag == lag
    assert behind(PLAIN) == [request] and request.held.lag == 1
    assert behind(TreeShape(3, 1)) == [request] and request.held.lag == 0
    TreeChoice(EngineConfig(), PLAIN, DraftTraits()).plan([request], [1], [PLAIN], prefills=False)
    assert request.held.lag == 0


def test_a_tree_that_is_not_ready_is_replaced_by_the_choice_of_the_engine():
    chain = TreeShape(2, 1)
    trees = TreeChoice(EngineConfig(request_trees=(chain,)), TreeShape(3, 1), OF_HEAD)
    first, second = (
        Request(name, GenerationRequest((1,), SamplingParams()), 0, (), Detokenizer(None), tree=tree)
        for name, tree in (("a", chain), ("b", None))
    )
    (together,) = trees.plan([first, second], [1, 2], [TreeShape(3, 1)], prefills=False)
    assert together.tree == TreeShape(3, 1) and together.requests == [first, second]
    apart = trees.plan([first, second], [1, 2], trees.all, prefills=False)
    assert {cycle.tree: cycle.requests for cycle in apart} == {TreeShape(3, 1): [second], chain: [first]}


def test_trees_of_an_adaptive_engine():
    assert adaptive_trees(TreeShape(5, 4, 8)) == (TreeShape(5, 4, 8), TreeShape(3, 1, 4), PLAIN)
    assert adaptive_trees(TreeShape(3, 1, 4)) == (TreeShape(3, 1, 4), PLAIN)
    assert adaptive_trees(TreeShape(1, 1, 2)) == (TreeShape(1, 1, 2), PLAIN)
    assert adaptive_trees(PLAIN) == (PLAIN, TreeShape(3, 1, 4))
    others = (TreeShape(2, 1, 3), TreeShape(5, 4, 8), TreeShape(2, 2, 4))
    assert adaptive_trees(TreeShape(5, 4, 8), others) == (TreeShape(5, 4, 8), TreeShape(2, 1, 3), TreeShape(2, 2, 4), PLAIN)
    merged = {"5/4/8": "5/4/8 7/4/8/5 7/4/8/0 3/1/4 0", "9/2/9": "9/2/9 9/2/9/0 3/1/4 0", "2/1/3": "2/1/3 7/4/8/2 7/4/8/0 0"}
    merged |= {"7/4/8/3": "7/4/8/3 7/4/8/0 3/1/4 0", "7/4/8/0": "7/4/8/0 3/1/4 0"}
    for tree, expected in merged.items():
        assert adaptive_trees(TreeShape.of(tree), limits_head=True) == tuple(map(TreeShape.of, expected.split()))
    assert adaptive_trees(TreeShape(5, 4, 8), others, limits_head=True) == adaptive_trees(TreeShape(5, 4, 8), others)
    assert TreeChoice(EngineConfig(), TreeShape(5, 4, 8), OF_HEAD).all == (TreeShape(5, 4, 8),)
    assert TreeChoice(ADAPTIVE, TreeShape(5, 4, 8), OF_HEAD).most_emitted == 6
