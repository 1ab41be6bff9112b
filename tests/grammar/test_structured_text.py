"""Text under a grammar and a tree is plain masked decoding's, token for token, and fits the grammar; and what wins between a
grammar and the other parameters. (One file, so that its engines share their programs.)"""

import json
import random
from contextlib import closing

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.programs import CycleProgram, ProposeProgram
from jaxspec.decoding.tree import Candidates, rank
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import GenerationRequest, Request
from jaxspec.grammar.matcher import GrammarError
from jaxspec.grammar.trees import best_nodes
from jaxspec.sampling_params import SamplingParams
from jaxspec.server.structured import Given
from jaxspec.server.tools import Function, ToolUse, constraint_for
from jaxspec.testing import tiny_engine, tiny_target
from jaxspec.text.answer_parser import THINK, Answer, AnswerFormat, AnswerParser, Thinking
from jaxspec.text.tool_formats import TOOL_FORMATS
from jaxspec.tree_shape import PLAIN, TreeShape
from tests.engine.served import Gate, served, updates_of
from tests.grammar.cases import TREES, Bench, engine, random_case
from tests.server.fakes import TAGS, byte_tokenizer, with_tags
from tests.sets import exhaustive

PROMPT = (3, 1, 4, 1, 5)
WORDS = {"regex": "[a-c]{2,4}"}


@pytest.mark.parametrize(("count", "trees"), [(200, TREES[:1]), exhaustive(400, TREES)])
def test_text_under_a_tree_is_that_of_plain_masked_decoding(count, trees):
    rng = random.Random(7)
    cases = [random_case(rng) for _ in range(count)]
    with closing(Bench(trees)) as bench:
        result = bench.check(cases)
    assert (result.wrong, result.unequal) == ([], [])
    assert result.ended >= count / 2 and result.preemptions and result.hits and result.forced, result


@pytest.fixture
def made() -> Engine:
    return engine(TREES[0])


def finish(made: Engine, *params: SamplingParams) -> list[Request]:
    """Requests with the same prompt, run to their ends."""
    return served(made, *(GenerationRequest(PROMPT, each) for each in params))


def sampled(seed: int, length: int = 24, **fields) -> SamplingParams:
    return SamplingParams(max_tokens=length, temperature=1.2, seed=seed, **fields)


def texts(made: Engine, **fields) -> list[str]:
    """Of eight seeds."""
    requests = finish(made, *(sampled(seed, **fields) for seed in range(8)))
    assert {request.finish_reason for request in requests} == {"stop"}
    return [request.result().text for request in requests]


@pytest.mark.exhaustive
@pytest.mark.parametrize("tree", [TREES[0], TREES[0].limited(1), TREES[0].limited(0)], ids=str)
def test_drafts_keep_their_sources_under_a_grammar(made, tree):
    """When the tree is ranked again, too. What is forced has none, unless somebody proposed it."""
    merged = engine(tree, ngram=True)
    asked = [sampled(seed, regex="(ab[0-9]){8}") for seed in range(8)]
    requests = finish(merged, *asked)
    assert [request.output for request in requests] == [request.output for request in finish(made, *asked)]
    stats = merged.stats()
    assert sum(stats.drafted_by_source.values()) == stats.draft_tokens
    assert sum(stats.accepted_by_source.values()) == stats.accepted_tokens
    assert stats.accepted_by_source["other"] and stats.accepted_by_source["ngram"] and stats.forced_tokens
    assert sum(sum(request.speculation.accepted_by_source.values()) for request in requests) == stats.accepted_tokens


def test_trees_tell_what_the_grammar_changed(made):
    """Of all requests together what the engine counts."""
    for seed in range(2):
        made.add(GenerationRequest(PROMPT, sampled(seed, regex="(ab[0-9]){8}"), wants_trees=True))
    prunings = [update.verification.tree.pruning for update in updates_of(made) if update.verification]
    stats = made.stats()
    assert sum(len(pruning.pruned) for pruning in prunings) == stats.pruned_tokens > 0
    assert sum(pruning.forced for pruning in prunings) == stats.forced_tokens > 0


def test_where_a_grammar_ends_the_text_ends(made):
    """Before min_tokens, and with ignore_eos; where it could go on, these go on."""
    assert {len(text) for text in texts(made, **WORDS, min_tokens=20)} == {4}
    assert {len(text) for text in texts(made, **WORDS, ignore_eos=True)} == {4}
    assert {len(text) for text in texts(made, **WORDS, stop_token_ids=[5])} > {4}, "nothing stops where the grammar may"


def test_stop_tokens_and_strings_end_the_text_anywhere(made):
    (request,) = finish(made, sampled(1, regex="ab{9}", stop_token_ids=[ord("b")]))
    assert (request.finish_reason, request.matched_stop, request.result().text) == ("stop", ord("b"), "a")
    (request,) = finish(made, sampled(1, regex="ab{9}", stop="bb"))
    assert (request.finish_reason, request.matched_stop, request.result().text) == ("stop", "bb", "a")
    (request,) = finish(made, SamplingParams(max_tokens=3, regex="ab{9}"))
    assert (request.finish_reason, request.result().text) == ("length", "abb")


def test_bans_and_biases_choose_among_what_the_grammar_allows(made):
    assert set("".join(texts(made, **WORDS, bad_token_ids=[ord("b")]))) == {"a", "c"}
    assert set("".join(texts(made, **WORDS, logit_bias={ord("z"): 100, ord("c"): 100}))) == {"c"}
    assert set("".join(texts(made, **WORDS, top_k=1))) <= set("abc")


def test_a_grammar_and_bans_that_leave_nothing_end_the_request_alone(made):
    with pytest.raises(ValueError, match=r"^regex allows no text that the request's bad_token_ids"):
        made.add(GenerationRequest(PROMPT, sampled(1, **WORDS, allowed_token_ids=[ord("z")])))
    stuck, beside = finish(made, sampled(1, regex="aab|aac", bad_token_ids=[ord("b"), ord("c")]), sampled(2, **WORDS))
    assert (stuck.finish_reason, stuck.output) == ("error", [ord("a")] * 2) and stuck.error.startswith("bad_token_ids or allowed")
    assert beside.finish_reason == "stop"


@pytest.mark.parametrize("method", ["advance", "masks"])
def test_a_matcher_that_fails_ends_its_request_alone(made, method):
    def fail(*_):
        raise GrammarError("it is too complex")

    broken, beside = (made.add(GenerationRequest(PROMPT, sampled(seed, **WORDS))) for seed in (1, 2))
    setattr(broken.matcher, method, fail)
    while made.has_work:
        made.step()
    assert (broken.finish_reason, broken.error, beside.finish_reason) == ("error", "it is too complex", "stop")


def test_requests_without_a_grammar_keep_their_program_and_text(made):
    free = [sampled(seed) for seed in range(3)]
    alone = [request.output for request in finish(engine(TREES[0]), *free)]
    ran, run = [], made.runner.run
    made.runner.run = lambda program, *inputs: ran.append(type(program)) or run(program, *inputs)
    mixed = finish(made, *free, *(sampled(seed, **WORDS) for seed in range(3)))
    assert [request.output for request in mixed[:3]] == alone
    after = ran[::-1].index(ProposeProgram)
    assert {CycleProgram, ProposeProgram} < set(ran) and CycleProgram in ran[-after:], "one program when no grammar is left"
    stats = made.stats()
    assert stats.constrained_requests == 3 and stats.mask_seconds > 0 and stats.pruned_tokens > 0


@pytest.mark.parametrize("is_broken", [False, True])
def test_no_request_waits_for_the_halves_of_cycles(made, monkeypatch, is_broken):
    """Until they are compiled, one program per cycle emits one token; if they can't be, always."""
    programs, ran, run = made.runner.programs, [], made.runner.run
    gate = Gate(made, monkeypatch, ValueError("no such kernel") if is_broken else None)
    monkeypatch.setattr(made.runner, "run", lambda program, *inputs: ran.append(type(program)) or run(program, *inputs))
    made.warm_up(wait_for_all=False)
    asked = [sampled(seed, **WORDS) for seed in range(3)]
    before = [request.output for request in finish(made, *asked)]
    assert CycleProgram in ran and ProposeProgram not in ran
    stats = made.stats()
    assert stats.verify_count > 0 and (stats.draft_count, stats.draft_tokens, dict(stats.drafts_by_sampling)) == (0, 0, {})
    gate.open.set()
    programs.wait()
    ran.clear()
    assert [request.output for request in finish(made, *asked)] == before
    assert (CycleProgram in ran, ProposeProgram in ran) == (is_broken, not is_broken)
    assert before == [request.output for request in finish(engine(PLAIN), *asked)]
    programs.stop()


def test_a_lossy_engine_waits_for_them(monkeypatch):
    """Under thresholds a text depends on the tree."""
    own = TreeShape(1, 1, 2)
    lossy = engine(TREES[0], accept_threshold_acc=0.5, request_trees=(own,))
    gate = Gate(lossy, monkeypatch)
    lossy.warm_up()
    held = [lossy.add(GenerationRequest(PROMPT, sampled(1, **WORDS), tree=tree)) for tree in (None, own)]
    needed = [lossy.runner.program_to_wait_for(each) for each in held]
    assert [isinstance(each, ProposeProgram) and each.tree for each in needed] == [TREES[0], own]
    free = lossy.add(GenerationRequest(PROMPT, sampled(2)))
    while free.finish_reason is None:
        lossy.step()
    assert lossy.scheduler.held_back == held
    gate.open.set()
    while lossy.has_work:
        lossy.step()
    assert [each.finish_reason for each in held] == ["stop", "stop"]
    lossy.runner.programs.stop()


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}
F = Function(name="f", parameters=SCHEMA, strict=True)


@pytest.mark.parametrize(
    ("form", "must_call", "given", "thinking", "used"),
    [
        ("hermes", True, None, Thinking.NONE, TAGS[:2]),
        ("qwen3_coder", True, None, Thinking.OPEN, (*TAGS[:2], TAGS[3])),
        ("hermes", False, None, Thinking.POSSIBLE, TAGS[:2]),
        (None, False, Given("response_format", "json_schema", SCHEMA), Thinking.OPEN, TAGS[3:]),
    ],
    ids=["required", "required behind thinking", "auto and strict", "a schema behind thinking"],
)
def test_tags_with_tokens_of_their_own_mark_calls_and_thinking(form, must_call, given, thinking, used):
    """And the text is the same under any tree."""
    tokenizer = with_tags(byte_tokenizer(), "<|im_end|>")
    ids, end = dict(zip(TAGS, tokenizer.convert_tokens_to_ids(list(TAGS)), strict=True)), len(tokenizer) - 1
    target = tiny_target(num_layers=1, vocab_size=len(tokenizer), eos_token_ids=(end,))
    use = None if form is None else ToolUse(TOOL_FORMATS[form], [], [F], must_call, only_one=True)
    tag = constraint_for(use, given, THINK, thinking).value
    bias = dict.fromkeys((*ids.values(), end), 8.0)  # else a random model would hardly end what may be any text
    asked = [GenerationRequest(PROMPT, sampled(seed, structural_tag=tag, logit_bias=bias, length=150)) for seed in range(6)]
    outputs = []
    for tree in (TREES[0], PLAIN):
        made = tiny_engine(tree, target=target, tokenizer=tokenizer, max_running_requests=8)
        requests = [made.add(each) for each in asked]
        streams = dict.fromkeys((request.id for request in requests), "")
        for update in updates_of(made):
            streams[update.request_id] += update.text
        assert list(streams.values()) == [request.result().text for request in requests]
        assert {request.finish_reason for request in requests} == {"stop"}
        outputs.append([request.output for request in requests])
    assert outputs[0] == outputs[1] and {ids[name] for name in used} <= {token for output in outputs[0] for token in output}
    answer_format = AnswerFormat(THINK, thinking, tool_parser=use and use.format.read, tools=use.schemas if use else {})
    answers = [Answer.of(AnswerParser(answer_format).add(text, is_last=True)) for text in streams.values()]
    found = [answer.content if given else call.arguments for answer in answers for call in answer.calls or [None] * bool(given)]
    assert found and all(json.loads(each)["a"] in (1, 22) for each in found)
    assert all(answer.calls for answer in answers if must_call)


def test_trees_are_ranked_as_on_the_device():
    rng = np.random.default_rng(0)
    for _ in range(20):
        parents = np.array([-1, -1, -1, *(rng.integers(0, 3, 4)), *(rng.integers(3, 7, 4))])
        scores = -rng.integers(0, 4, 11).astype(np.float32)
        for node, parent in enumerate(parents):
            scores[node] += scores[parent] if parent >= 0 else 0
        scores[rng.integers(3, 11)] = -np.inf if rng.random() < 0.3 else scores[3]
        of_parents = [scores[parent] if parent >= 0 else np.inf for parent in parents]
        scores = np.minimum(scores, of_parents)
        tokens = rng.integers(0, 9, 11)
        tree = rank(jnp.array([5]), Candidates(*(jnp.asarray(each)[None] for each in (tokens, scores, parents))), TREES[0])
        own = best_nodes(5, tokens, parents, scores, TREES[0].num_draft_tokens)
        assert [each.tolist() for each in own[:2]] == [tree.tokens[0].tolist(), tree.parents[0].tolist()]
