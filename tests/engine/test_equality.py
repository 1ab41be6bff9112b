"""Speculation changes nothing but the speed: the same tokens with any tree, batch, page size, chunk size and loop."""

import pytest

from jaxspec.engine.engine import Engine
from jaxspec.engine.request import GenerationRequest
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import engine_target, oracle_head, random_eagle, random_head, random_mtp, tiny_config, tiny_engine
from jaxspec.tree_shape import PLAIN, TreeShape
from tests.engine.served import served
from tests.sets import exhaustive, variants

PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7, 8, 9], list(range(40, 77)), [100, 3, 100, 3], [7] * 16, [64, 2]]


def run(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[tuple[int, ...]]:
    """Every prompt's tokens, in order."""
    asked = (GenerationRequest(prompt, each) for prompt, each in zip(prompts, params, strict=True))
    return [tuple(request.output) for request in served(engine, *asked)]


def mixed_params(count: int) -> list[SamplingParams]:
    """Greedy and sampled requests of different lengths."""
    return [SamplingParams(max_tokens=9 + 5 * i, temperature=(0.0, 0.8, 1.3)[i % 3], seed=i) for i in range(count)]


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    """Plain decoding, one request at a time, one chunk per prompt, the plain loop: the simplest there is."""
    engine = tiny_engine(PLAIN, max_running_requests=1, prefill_chunk=64, page_size=64, overlap=False)
    return [run(engine, [prompt], [params])[0] for prompt, params in zip(PROMPTS, mixed_params(len(PROMPTS)), strict=True)]


def test_texts_are_worth_comparing(expected):
    assert all(len(set(tokens)) > len(tokens) // 3 for tokens in expected), "the tiny target repeats itself: nothing is tested"
    assert [len(tokens) for tokens in expected] == [params.max_tokens for params in mixed_params(len(PROMPTS))]


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (PLAIN, {"overlap": False}),
        exhaustive(PLAIN, {"every_size": True}),
        exhaustive(TreeShape(5, 4, 8), {"every_size": True}),
        variants(TreeShape(1, 3, 4), {"prefill_chunk": 3, "page_size": 7}),
        exhaustive(TreeShape(3, 2, 5), {"draft_window_size": 6, "draft_sink_size": 3, "prefix_cache": False, "matmul": "skinny"}),
        exhaustive(TreeShape(1, 4, 5), {"max_running_requests": 4, "overlap": False, "every_size": True}),
        exhaustive(TreeShape(3, 2, 5), {"draft_window_size": 9}),
        (TreeShape(3, 3, 8), {"row_cost": 0.01}),
        exhaustive(TreeShape(5, 3, 8, 3), {"row_cost": 0.01, "ngram": True, "every_size": True}),
    ],
)
def test_tokens_do_not_depend_on_how_they_are_made(expected, spec, options):
    assert run(tiny_engine(spec, **options), PROMPTS, mixed_params(len(PROMPTS))) == expected


TINY = tiny_config(num_layers=2)
"""Of `engine_target`."""
HEADS = {
    "EAGLE": lambda: random_eagle(TINY),
    "EAGLE, two layers, no bias": lambda: random_eagle(TINY, fc_bias=False, num_layers=2),
    "EAGLE-3, narrower than its target": lambda: random_head(TINY, layer={"hidden_size": 16, "num_heads": 2, "num_kv_heads": 1}),
    "EAGLE-3, the target's lm_head": lambda: random_head(TINY, draft_vocab_size=None),
    "EAGLE-3, all switches": lambda: random_head(TINY, fc_norm=True, norm_before_residual=True, norm_output=True, fc_bias=True),
    "EAGLE-3, two layers": lambda: random_head(TINY, captured_layers=(0, 1), layer={"num_layers": 2, "qk_norm": True}),
    "MTP": lambda: random_mtp(TINY),
}


@pytest.mark.parametrize(
    ("name", "spec"),
    [exhaustive("MTP", TreeShape(3, 1, 4)), ("MTP", TreeShape(1, 1, 2)), *(exhaustive(name, TreeShape(2, 2, 4)) for name in HEADS)],
)
def test_tokens_do_not_depend_on_the_head(expected, name, spec):
    engine = tiny_engine(spec, head=HEADS[name](), max_running_requests=1, page_size=64)  # few programs to compile
    assert run(engine, PROMPTS, mixed_params(len(PROMPTS))) == expected


@pytest.mark.parametrize(
    ("spec", "full", "row_cost"),
    [(TreeShape(4, 1), 5, 0.5), exhaustive(TreeShape(4, 1), 5, 0), exhaustive(TreeShape(3, 2, 7), 4, 0)],
)
def test_a_perfect_head_is_fully_accepted(spec, full, row_cost):
    prompt, length = [3, 1, 4, 1, 5], 3 + 8 * full
    target = engine_target()
    params = [SamplingParams(max_tokens=length, temperature=0)]
    (plain,) = run(tiny_engine(PLAIN, target=target), [prompt], params)
    engine = tiny_engine(spec, target=target, head=oracle_head(target.config, [*prompt, *plain]), row_cost=row_cost)
    (request,) = served(engine, GenerationRequest(prompt, params[0]))
    assert tuple(request.output) == plain
    assert request.speculation.accept_lengths == (full,) * 8 + (2,)  # the budget cuts the last cycle
    found = request.speculation
    assert (found.verify_count, found.accepted_drafts, found.accept_length) == (9, 8 * (full - 1) + 2, (8 * full + 2) / 9)


def test_a_random_head_is_hardly_accepted():
    engine = tiny_engine(TreeShape(3, 2, 5))
    (request,) = served(engine, GenerationRequest([1, 2, 3], SamplingParams(max_tokens=60, temperature=0)))
    assert sum(request.speculation.accept_lengths) == 59  # the first token comes from the prefill
    assert request.result().speculation.accept_length < 1.5


def test_drafts_that_are_not_worth_their_rows_are_not_verified():
    engine = tiny_engine(TreeShape(3, 2, 5), row_cost=0.9)
    (request,) = served(engine, GenerationRequest([1, 2, 3], SamplingParams(max_tokens=20, temperature=0)))
    assert request.speculation.accept_lengths == (1,) * 19 and request.speculation.proposed_drafts == 0
    assert request.speculation.tree_accept_length == 1 and engine.stats().draft_count == 19


@pytest.mark.variants
@pytest.mark.parametrize("options", [{}, exhaustive({"draft_window_size": 6, "draft_sink_size": 3, "matmul": "skinny"})])
def test_texts_longer_than_the_head_was_made_for(options):
    """Heads say 2048 positions where their target has 128 thousand: past that they go on, and the text is the target's."""
    head, target = random_head(TINY, layer={"max_position_embeddings": 16}), engine_target()
    prompts = [list(range(100)) * 2, [5, 6, 7], [*range(128), *range(127)]]
    params = [SamplingParams(max_tokens=tokens, temperature=0.0) for tokens in (56, 200, 1)]
    assert head.config.layer.max_position_embeddings == 16
    lengths = [len(prompt) + each.max_tokens for prompt, each in zip(prompts, params, strict=True)]
    assert lengths == [256, 203, 256], "the whole context"
    expected = run(tiny_engine(PLAIN, target=target), prompts, params)
    assert run(tiny_engine(TreeShape(3, 2, 5), target=target, head=head, **options), prompts, params) == expected


@pytest.mark.exhaustive
def test_lossy_thresholds_accept_more_and_change_the_text():
    params = [SamplingParams(max_tokens=60, temperature=1.5, seed=seed) for seed in range(3)]
    prompts = [[1, 2, 3]] * 3
    exact, lossless, lossy = (
        tiny_engine(TreeShape(3, 4, 12), accept_threshold_single=single, accept_threshold_acc=acc)
        for single, acc in ((1.0, 1.0), (1.0, 0.999999), (0.01, 0.1))
    )
    assert run(exact, prompts, params) == run(tiny_engine(PLAIN), prompts, params)
    run(lossless, prompts, params)
    leaning = run(lossy, prompts, params)
    before, after = (engine.stats().verified_tokens / engine.stats().verify_count for engine in (lossless, lossy))
    assert after > 1.2 * before and leaning != run(exact, prompts, params)
    greedy = [SamplingParams(max_tokens=60, temperature=0)] * 3
    assert run(lossy, prompts, greedy) == run(exact, prompts, greedy), "thresholds are about sampling"
