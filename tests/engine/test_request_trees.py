"""Requests with a tree of their own, and what they can see of it: one batch holds several trees, and the tokens stay the same."""

import pytest

from jaxspec.engine.engine import Engine
from jaxspec.engine.request import GenerationRequest, Timing, Update
from jaxspec.engine.trees import MAX_LAG
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import engine_target, oracle_head, tiny_engine
from jaxspec.tree_shape import PLAIN, TreeShape
from tests.engine.served import served, updates_of
from tests.sets import exhaustive

WIDE, CHAIN = TreeShape(3, 2, 5), TreeShape(3, 1)
PROMPTS = [[3, 1, 4, 1, 5], list(range(20, 50)), [64, 2], [9, 9, 9]]
TREES = [None, PLAIN, CHAIN, PLAIN]
PARAMS = [SamplingParams(max_tokens=3 * MAX_LAG, temperature=temperature, seed=4) for temperature in (0.0, 0.8, 0.0, 1.2)]


def run(engine: Engine, trees, wants_trees: bool = False) -> tuple[list[list[int]], list, list[Update]]:
    requests = [
        engine.add(GenerationRequest(prompt, params, tree=tree, wants_trees=wants_trees))
        for prompt, params, tree in zip(PROMPTS, PARAMS, trees, strict=True)
    ]
    updates = updates_of(engine)
    return [request.output for request in requests], requests, updates


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return run(tiny_engine(PLAIN), [None] * 4)[0]


def engine_that_knows(text: list[int], **options) -> Engine:
    """Drafts are accepted in the first request, which says this; elsewhere by chance."""
    target = engine_target()
    head = oracle_head(target.config, [*PROMPTS[0], *text])
    return tiny_engine(WIDE, target=target, head=head, request_trees=(PLAIN, CHAIN), **options)


@pytest.mark.parametrize(("overlap", "adaptive"), [(True, True), (False, False), exhaustive(True, False), exhaustive(False, True)])
def test_each_request_has_its_own_tree_and_the_tokens_stay_the_same(expected, overlap, adaptive):
    engine = tiny_engine(WIDE, request_trees=(PLAIN, CHAIN), overlap=overlap, adaptive=adaptive)
    tokens, requests, _ = run(engine, TREES)
    assert tokens == expected
    for request, tree in zip(requests, TREES, strict=True):
        drafted = {(cycle.drafted, cycle.num_steps) for cycle in request.speculation.cycles}
        if tree is not None:
            assert drafted == {(tree.num_draft_tokens - 1, tree.num_steps)}
        elif not adaptive:
            assert drafted == {(WIDE.num_draft_tokens - 1, WIDE.num_steps)}
    assert run(engine, TREES[::-1])[0] == expected, "with the other trees, and pages of the first time in the cache"


@pytest.mark.variants
def test_pages_of_a_plain_request_are_as_good_as_any(expected):
    """The head has caught up with plain decoding when the pages are found again: the oracle head knows where it is."""
    target, text = engine_target(), expected[0]
    engine = tiny_engine(CHAIN, target=target, head=oracle_head(target.config, [*PROMPTS[0], *text]), request_trees=(PLAIN,))
    served(engine, GenerationRequest(PROMPTS[0], PARAMS[0], tree=PLAIN))
    params = SamplingParams(max_tokens=MAX_LAG, temperature=0)
    (again,) = served(engine, GenerationRequest([*PROMPTS[0], *text[: 2 * MAX_LAG]], params))
    assert again.cached_tokens > MAX_LAG and again.output == text[2 * MAX_LAG :]
    assert again.speculation.accept_length > 3


@pytest.mark.variants
@pytest.mark.parametrize("options", [{}, {"row_cost": 0.1, "ngram": True}])
def test_updates_show_the_trees(expected, options):
    engine = engine_that_knows(expected[0], **options)
    tokens, requests, updates = run(engine, TREES, wants_trees=True)
    assert tokens == expected
    for request, tree in zip(requests, TREES, strict=True):
        own = [update for update in updates if update.request_id == request.id and update.token_ids]
        assert own[0].verification is None and len(own[0].token_ids) == 1, "the prefill's"
        newest = own[0].token_ids[-1]
        for update, counts in zip(own[1:], request.speculation.cycles, strict=True):
            found = update.verification
            assert found is not None and found.shape == (tree or WIDE)
            assert (len(update.token_ids), found.accepted) == (counts.emitted, counts.accepted)
            if counts.drafted == 0:
                assert found.tree is None and found.accepted == 0 and (options or tree == PLAIN)
            else:
                assert found.tree is not None
                check_tree(found.tree, counts.drafted, newest, update.token_ids, found.accepted)
            newest = update.token_ids[-1]
    assert requests[0].speculation.accept_length > 3
    assert {cycle.drafted for cycle in requests[0].speculation.cycles} == ({3, 4} if options else {4})
    stats = engine.stats()
    assert stats.draft_tokens == sum(each.speculation.proposed_drafts for each in requests)
    assert not options or sum(stats.drafted_by_source.values()) == stats.draft_tokens


def check_tree(tree, drafted: int, newest: int, emitted, accepted: int) -> None:
    """The root is the token before; parents come first; the accepted path goes down and holds what was emitted."""
    assert len(tree.tokens) == len(tree.parents) == drafted + 1 and len(tree.sources) in (0, drafted)
    assert tree.tokens[0] == newest and tree.parents[0] == -1
    assert all(0 <= parent < node for node, parent in enumerate(tree.parents) if node)
    assert tree.accepted[0] == 0
    assert [tree.parents[node] for node in tree.accepted[1:]] == list(tree.accepted[:-1])
    drafts = [tree.tokens[node] for node in tree.accepted[1:]]
    assert drafts[:accepted] == list(emitted[:accepted])


@pytest.mark.variants
def test_statistics_add_up(expected):
    engine = engine_that_knows(expected[0])
    _, requests, updates = run(engine, TREES)
    assert {update.verification.tree for update in updates if update.verification} == {None}, "no request asked for trees"
    stats, cycles = engine.stats(), [cycle for request in requests for cycle in request.speculation.cycles]
    drafting = [cycle for cycle in cycles if cycle.drafted]
    assert stats.verify_count == len(cycles) and stats.draft_count == len(drafting) < len(cycles)
    assert stats.draft_tokens == sum(cycle.drafted for cycle in drafting)
    assert stats.accepted_tokens == sum(cycle.accepted for cycle in drafting) == sum(stats.accepted_per_position) > 0
    assert stats.accepted_per_position == tuple(sum(each.accepted > place for each in drafting) for place in range(CHAIN.num_steps))
    assert sum(stats.drafts_by_sampling.values()) == stats.draft_count
    assert sum(stats.accepted_by_sampling.values()) == stats.accepted_tokens
    assert stats.generated_tokens == sum(len(request.output) for request in requests)
    assert stats.prompt_tokens == sum(map(len, PROMPTS)) and stats.finished == {"length": 4}


@pytest.mark.variants
def test_times_are_measured_from_the_arrival():
    now = [100.0]
    engine = tiny_engine(PLAIN, clock=lambda: now[0], overlap=False, max_running_requests=1)
    first, second = (engine.add(GenerationRequest([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))) for _ in range(2))
    while engine.has_work:
        now[0] += 1.0
        engine.step()
    # The prefill's token comes with the first step, then one per step; the second request takes the row in step 4.
    assert first.timing == Timing(1.0, 1.0, 3.0)
    assert second.timing == Timing(4.0, 4.0, 6.0)
    waiting = engine.add(GenerationRequest([1, 2, 3], SamplingParams()))
    now[0] += 5.0
    assert engine.abort(waiting.id).output.timing == Timing(5.0, None, 5.0)


@pytest.mark.variants
def test_unknown_trees_are_refused():
    engine = tiny_engine(WIDE, request_trees=(PLAIN,))
    with pytest.raises(ValueError, match=r"^tree 3/1/4 is not among those of this engine: 3/2/5, plain"):
        engine.add(GenerationRequest([1], SamplingParams(), tree=CHAIN))
    assert not engine.has_work
    with pytest.raises(ValueError, match="request_trees holds 3/1/4, but there is no draft head"):
        tiny_engine(PLAIN, head=None, request_trees=(PLAIN, CHAIN))
    with pytest.raises(ValueError, match="topk=65 is more than the 64 tokens"):
        tiny_engine(WIDE, request_trees=(TreeShape(1, 65, 2),))
    with pytest.raises(ValueError, match="a draft tree is num_steps/topk/num_draft_tokens"):
        tiny_engine(WIDE, request_trees=("3/1",))
