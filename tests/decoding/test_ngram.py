"""N-gram drafts: the search and the scores beside plain Python, the learnt rates, and texts that are those of plain decoding."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import EngineConfig
from jaxspec.decoding.cycle import propose
from jaxspec.decoding.drafter import RATE_MEMORY, RATE_PRIOR
from jaxspec.decoding.ngram import LONGER, FirstGuess, NgramDrafter, Rates, candidates, continued, find
from jaxspec.decoding.state import Batch, Sequences, Sizes, gather
from jaxspec.decoding.tree import rank
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import GenerationRequest, Request
from jaxspec.engine.speculation import DraftedTree
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import engine_target, largest_sizes_only, tiny_engine
from jaxspec.tree_shape import PLAIN, TreeShape
from tests.engine.served import served, updates_of
from tests.sets import exhaustive

TARGET = engine_target()
PROMPTS = [(3, 1, 4, 1, 5), tuple(range(20, 50)), (7, 8, 9) * 6]
KINDS = [
    {"temperature": 0},
    {"temperature": 0, "allowed_token_ids": [7, 8, 9]},
    {"temperature": 0.8, "seed": 3, "allowed_token_ids": [7, 8, 9, 10]},
    {"temperature": 0.9, "top_p": 0.8, "presence_penalty": 0.7, "seed": 4},
]


def places_of(text: list[int], root: int, longest: int, count: int) -> list[tuple[int, int]]:
    """`find`, one position at a time."""
    found = []
    for last in range(root):
        match = 0
        while match < min(longest, last + 1) and text[last - match] == text[root - match]:
            match += 1
        found.append((match, last))
    return [(last, match) for match, last in sorted(found, reverse=True)[:count]]


@pytest.mark.parametrize("seed", range(20))
def test_the_search_finds_what_a_loop_finds(seed):
    """Also where the text has just begun, and in rows that end at different places."""
    rng = np.random.default_rng(seed)
    text, roots = rng.integers(0, 3, (4, 60)), rng.integers(0, 59, 4)
    longest, count = int(rng.integers(1, 9)), 6
    places = find(jnp.asarray(text, jnp.int32), jnp.asarray(roots, jnp.int32), longest, count)
    for row, root in enumerate(roots.tolist()):
        expected = [each for each in places_of(text[row].tolist(), root, longest, count) if each[1]]
        matches = [match for match in places.match[row].tolist() if match]
        assert list(zip(places.last[row].tolist(), matches, strict=False)) == expected


def test_the_docstrings_examples():
    places = find(jnp.array([[1, 2, 3, 9, 2, 3, 5, 2, 3, 0]]), jnp.array([8]), 3, 2)
    assert places.last.tolist() == [[5, 2]] and places.match.tolist() == [[2, 2]]
    assert continued(jnp.array([[7, 8, 9, 7, 0]]), jnp.array([3]), jnp.array([[0]]), 5).tolist() == [[[8, 9, 7, 8, 9]]]


def test_positions_of_long_contexts_are_exact():
    """Match length and position are one float32."""
    text = np.arange(2**17, dtype=np.int32)[None] % 1000
    root = np.array([2**17 - 1])
    places = find(jnp.asarray(text), jnp.asarray(root), 64, 3)
    assert places.last.tolist() == [[2**17 - 1001, 2**17 - 2001, 2**17 - 3001]] and places.match.tolist() == [[64, 64, 64]]


@pytest.mark.parametrize("seed", range(10))
def test_scores_are_rates_times_shares(seed):
    """Every continuation once, with the score that its definition gives; and the best of them always make a tree."""
    rng = np.random.default_rng(seed)
    steps, count, longest = 4, 6, 5
    continuations = rng.integers(0, 2, (1, count, steps))
    match = np.sort(rng.integers(0, longest + 1, (1, count)))[:, ::-1]
    seen = rng.uniform(1, 9, longest + 1).astype(np.float32)
    rates = Rates(jnp.asarray(seen * rng.uniform(0.1, 1, longest + 1).astype(np.float32)), jnp.asarray(seen))
    found = candidates(jnp.asarray(continuations, jnp.int32), jnp.asarray(match.copy(), jnp.int32), rates)
    rate, lengths = np.log(np.asarray(rates.chosen) / seen), match[0].tolist()
    places = [place for place in range(count) if lengths[place]]
    weights = {place: LONGER ** (lengths[place] - lengths[0]) for place in places}
    expected: dict[tuple[int, ...], float] = {}
    for place in places:
        score = 0.0
        for depth in range(steps):
            prefix = tuple(continuations[0, place, : depth + 1].tolist())
            context = min(each for each in places if tuple(continuations[0, each, :depth].tolist()) == prefix[:-1])
            score += rate[min(longest, lengths[context] + depth)]
            alike = sum(weights[each] for each in places if tuple(continuations[0, each, : depth + 1].tolist()) == prefix)
            expected[prefix] = score + math.log(alike / max(sum(weights.values()), 1))
    texts: list[tuple[int, ...]] = []
    scores: dict[tuple[int, ...], float] = {}
    for token, score, parent in zip(*(np.asarray(part)[0].tolist() for part in found[:3]), strict=True):
        texts.append((*(texts[parent] if parent >= 0 else ()), token))
        if score > -np.inf:
            assert texts[-1] not in scores, "once"
            scores[texts[-1]] = score
            assert parent < 0 or score <= scores[texts[parent]] + 1e-6
    assert scores == pytest.approx(expected, abs=1e-5)
    tree = rank(jnp.array([9]), found, TreeShape(steps, 4, 8))
    assert all(0 <= parent < node for node, parent in enumerate(tree.parents[0].tolist()) if node), "parents come first"


def test_rates_follow_what_the_target_chose():
    """Two matches of three tokens, one of which it chose; one of a sequence that has ended does not count, nor does no match."""
    drafter = NgramDrafter(longest=4)
    sequences = Sequences.of(*(jnp.ones(4, jnp.int32),) * 3, jnp.array([False, False, True, False]))
    engine = tiny_engine(PLAIN, target=TARGET)
    state = engine.runner.state._replace(draft=drafter.empty(Sizes(4, 1, 4, 16, 1, jnp.float32)))
    batch = Batch(jnp.arange(4), jnp.zeros((4, 1), jnp.int32), sequences, state.packed_settings[:1])
    memo = FirstGuess(jnp.array([5, 6, 7, 8]), jnp.array([3, 3, 3, 0]))
    before = state.draft
    after = drafter.learn(state, batch, memo, jnp.array([5, 9, 7, 8]))
    expected_seen, expected_chosen = np.full(5, RATE_PRIOR), np.asarray(before.rates.chosen).copy()
    expected_seen[3] = RATE_PRIOR * RATE_MEMORY**2 + 2
    expected_chosen[3] = expected_chosen[3] * RATE_MEMORY**2 + 1
    assert after.rates.seen.tolist() == pytest.approx(expected_seen.tolist(), rel=1e-6)
    assert after.rates.chosen.tolist() == pytest.approx(expected_chosen.tolist(), rel=1e-6)
    assert drafter.learn(state, batch, None, jnp.array([5, 9, 7, 8])) is before, "plain cycles propose nothing"


def asked(**fields) -> list[GenerationRequest]:
    params = [SamplingParams(max_tokens=40, **kind) for kind in KINDS]
    return [GenerationRequest(prompt, each, **fields) for prompt in PROMPTS for each in params]


def run(engine: Engine) -> list[tuple[list[int], float]]:
    return [(request.output, request.speculation.accept_length) for request in served(engine, *asked())]


@pytest.mark.parametrize(
    ("tree", "drafter", "options"),
    [
        (TreeShape(5, 4, 8), NgramDrafter(), {}),
        exhaustive(TreeShape(6, 1), NgramDrafter(2, 3), {"request_trees": (PLAIN,)}),
        exhaustive(TreeShape(5, 4, 16), NgramDrafter(3, 64), {"overlap": False}),
    ],
)
def test_the_text_is_that_of_plain_decoding(tree, drafter, options):
    """Alone and merged with a head, with few pages, so that requests are preempted, and once more with pages in the cache."""
    small = {"num_pages": 24, "context_length": 80}
    expected = [tokens for tokens, _ in run(tiny_engine(PLAIN, target=TARGET, **small))]
    engine = tiny_engine(tree, target=TARGET, head=drafter, **small, **options)
    first = run(engine)
    assert [tokens for tokens, _ in first] == expected
    assert [tokens for tokens, _ in run(engine)] == expected
    assert engine.stats().preemptions
    of_few_tokens = [length for (_, length), kind in zip(first, KINDS * len(PROMPTS), strict=True) if kind == KINDS[1]]
    if not engine.config.adaptive:  # one that is may decode plainly
        assert max(of_few_tokens) > 1.5, "text of three tokens repeats"


def test_a_context_may_be_shorter_than_the_number_of_continuations():
    engines = (tiny_engine(tree, target=TARGET, head=NgramDrafter(), context_length=12) for tree in (TreeShape(5, 4, 8), PLAIN))
    asked = GenerationRequest((7, 8, 7), SamplingParams(max_tokens=9, temperature=0))
    found, expected = (served(engine, asked) for engine in engines)
    assert found[0].output == expected[0].output and len(found[0].output) == 9


@pytest.mark.variants
def test_the_text_is_that_of_plain_decoding_where_a_head_drafts_fewer_levels():
    """Requests with both trees share a batch, and one of them is refused its head at all."""
    trees = (TreeShape(7, 4, 8, 3), TreeShape(3, 2, 4, 0))
    expected = [tokens for tokens, _ in run(tiny_engine(PLAIN, target=TARGET))]
    engine = tiny_engine(trees[0], target=TARGET, ngram=True, request_trees=trees[1:], max_running_requests=4)
    requests = served(engine, *(replace(each, tree=trees[number % 2]) for number, each in enumerate(asked())))
    assert [request.output for request in requests] == expected
    sources = [Counter(request.speculation.accepted_by_source) for request in requests]
    deep, without_head = sum(sources[::2], Counter()), sum(sources[1::2], Counter())
    assert set(without_head) == {"ngram"} and deep["ngram"] and deep["head"] + deep["head+ngram"]


def products(engine: Engine, tree: TreeShape) -> int:
    """Matrix products of drafting."""
    runner = engine.runner
    models, rows, pages = runner.merge(runner.params), jnp.arange(2), jnp.zeros((2, 4), jnp.int32)
    draft = jax.make_jaxpr(lambda state: propose(models, state, gather(state, rows, pages), tree).tree.tokens)
    return str(draft(runner.state)).count("dot_general")


@pytest.mark.variants
def test_a_head_computes_only_its_levels():
    """As many products as if it drafted alone a tree of so many; none where it has no level. Deeper n-grams cost none."""
    both, alone = tiny_engine(TreeShape(3, 4, 8), target=TARGET, ngram=True), tiny_engine(TreeShape(3, 4, 8), target=TARGET)
    assert products(both, TreeShape(7, 4, 8, 3)) == products(alone, TreeShape(3, 4, 8)) > 0
    assert products(both, TreeShape(7, 4, 8, 1)) == products(alone, TreeShape(1, 4, 5)) > 0
    assert products(both, TreeShape(3, 2, 4, 0)) == 0 < products(both, TreeShape(3, 2, 4))


@pytest.mark.parametrize(
    ("drafter", "options"), [(None, {}), (NgramDrafter(), {}), (None, {"request_trees": (TreeShape(3, 2, 4, 0),)})]
)
def test_trees_that_limit_a_head_need_n_grams_beside_it(drafter, options):
    tree = TreeShape(3, 2, 4) if options else TreeShape(7, 4, 8, 3)
    with pytest.raises(ValueError, match=r"the fourth number of (7/4/8/3|3/2/4/0) .* give a draft head and ngram=True"):
        tiny_engine(tree, target=TARGET, head=drafter, **options)


def check_sources(text: list[int], tree: DraftedTree) -> None:
    """What n-grams proposed after the root followed it before. `text`: up to the root."""
    pairs = set(itertools.pairwise(text))
    assert len(tree.sources) == len(tree.tokens) - 1
    for token, parent, source in zip(tree.tokens[1:], tree.parents[1:], tree.sources, strict=True):
        if parent == 0 and source.endswith("ngram"):
            assert (text[-1], token) in pairs


@pytest.mark.variants
@pytest.mark.parametrize("options", [{}, exhaustive({"adaptive": True}), exhaustive({"overlap": False})])
def test_the_source_of_every_draft_is_told(options):
    """In trees, answers and metrics, which agree. A random head drafts more, and n-grams get more of what repeats accepted."""
    engine = tiny_engine(TreeShape(2, 2, 5), target=TARGET, ngram=True, **options)
    names = {"other", "head", "ngram", "head+ngram"}
    assert engine.stats().accepted_by_source == engine.stats().drafted_by_source == dict.fromkeys(names, 0)
    requests = [engine.add(each) for each in asked(wants_trees=True)]
    texts = {request.id: list(request.prompt) for request in requests}
    drafted, accepted = Counter[str](), Counter[str]()
    for update in updates_of(engine):
        text, verification = texts[update.request_id], update.verification
        if verification is not None and (tree := verification.tree) is not None:
            check_sources(text, tree)
            drafted.update(tree.sources)
            accepted.update(tree.sources[node - 1] for node in tree.accepted[1 : verification.accepted + 1])
        text += update.token_ids
    stats = engine.stats()
    assert {name: count for name, count in stats.drafted_by_source.items() if count} == drafted
    assert {name: count for name, count in stats.accepted_by_source.items() if count} == accepted
    assert drafted.total() == stats.draft_tokens and accepted.total() == stats.accepted_tokens
    for request in requests:
        assert sum(request.speculation.accepted_by_source.values()) == request.speculation.accepted_drafts
    by_source = [Counter(request.speculation.accepted_by_source) for request in requests]
    assert sum(by_source, Counter()) == accepted
    of_few_tokens = sum(by_source[1 :: len(KINDS)], Counter())
    if not engine.config.adaptive:  # one that is may decode plainly
        assert drafted["head"] > drafted["ngram"] and of_few_tokens["ngram"] > of_few_tokens["head"]


def ask(engine: Engine, prompt: tuple[int, ...], **fields) -> Request:
    (request,) = served(engine, GenerationRequest(prompt, SamplingParams(max_tokens=40, temperature=0.9, seed=5), **fields))
    return request


@pytest.mark.variants
@pytest.mark.parametrize("options", [{}, exhaustive({"overlap": False}), exhaustive({"prefix_cache": False, "prefill_chunk": 4})])
def test_a_text_may_continue_as_that_of_another_request(options):
    """Its own text never changes; it is drafted from another's only of the same salt, of none that began before a flush, and where
    it shows its trees of none."""
    prompt, config = PROMPTS[0], {"max_running_requests": 2, "prefill_chunk": 16, "page_size": 4, "num_pages": 64, **options}
    plain = ask(tiny_engine(PLAIN, target=TARGET), prompt).output
    engine = Engine(TARGET, None, None, TreeShape(5, 4, 8), EngineConfig(ngram=True, ngram_share=1, **config))
    largest_sizes_only(engine)
    first = ask(engine, prompt)
    again, salted, shown = ask(engine, prompt), ask(engine, prompt, cache_salt="a"), ask(engine, prompt, wants_trees=True)
    of_the_same_salt = ask(engine, prompt, cache_salt="a")
    begun = engine.add(first.asked)
    while not begun.generated:
        engine.step()
    engine.flush_cache()
    updates_of(engine)
    after_flush = ask(engine, prompt)
    requests = [first, again, salted, shown, of_the_same_salt, after_flush, begun]
    assert [request.output for request in requests] == [plain] * len(requests)
    lengths = [request.speculation.accept_length for request in requests]
    assert min(lengths[1], lengths[4]) > 2 > max(lengths[0], lengths[2], lengths[3], lengths[5]), lengths
    assert engine.stats().lent_texts >= 1


def test_the_engines_options_choose_the_drafter():
    engine = Engine(TARGET, None, None, TreeShape(3, 1), EngineConfig(ngram=True, ngram_max_match=5, num_pages=64))
    assert engine.runner.merge.drafter == NgramDrafter(1, 5)
    with pytest.raises(ValueError, match=r"ngram_min_match \(9\) must be at most ngram_max_match"):
        EngineConfig(ngram=True, ngram_min_match=9, ngram_max_match=5)
    with pytest.raises(ValueError, match="at most 64, got 65"):
        EngineConfig(ngram_max_match=65)
    assert EngineConfig(adaptive=True).head_options == ("adaptive",) and not EngineConfig(adaptive=True, ngram=True).head_options
