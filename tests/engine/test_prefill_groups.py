"""Chunks of several prompts in one program: which ones go together, and that the text is what one by one gives."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.config import EngineConfig
from jaxspec.engine.engine import Engine
from jaxspec.engine.pages import PageAllocator, PrefixCache
from jaxspec.engine.prefill_groups import grouped
from jaxspec.engine.program_table import ProgramTable
from jaxspec.engine.request import GenerationOutput, GenerationRequest, Request, TokenLogprob
from jaxspec.engine.scheduler import PrefillChunk, Scheduler
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import tiny_engine, tiny_target
from jaxspec.text.detokenizer import Detokenizer
from jaxspec.tree_shape import PLAIN, TreeShape
from tests.engine.served import outputs_of, served
from tests.sets import exhaustive

PAGE = 4
TABLE = ProgramTable.of(EngineConfig(max_running_requests=8, prefill_chunk=256), 64, (PLAIN,), (PLAIN,), catches_up=False)
TARGET = tiny_target(num_layers=1)


def chunk_of(size: int, pages: list[int], *, first: int = 0, is_last: bool = True, scores: bool = False) -> PrefillChunk:
    asked = GenerationRequest(tuple(range(first + size)), SamplingParams(max_tokens=8, prompt_logprobs=0 if scores else None))
    return PrefillChunk(Request("", asked, 0, (), Detokenizer(None)), first, size, first, is_last, pages)


def sizes(groups: list[list[PrefillChunk]]) -> list[list[int]]:
    return [[chunk.size for chunk in group] for group in groups]


def pages_from(first: int) -> list[int]:
    return list(range(first, first + 20))


def test_chunks_of_one_width_run_together_as_many_as_fit():
    chunks = [chunk_of(size, pages_from(100 * place)) for place, size in enumerate([10, 50, 12, 60, 40, 33, 20, 200])]
    assert sizes(grouped(chunks, TABLE, PAGE)) == [[10, 12], [50, 60, 40, 33], [20], [200]]


def test_a_chunk_runs_after_the_one_whose_pages_it_reads_and_so_does_what_follows_it():
    first = chunk_of(16, pages_from(0))
    reader = chunk_of(10, [0, 1, *pages_from(100)], first=8)  # begins with two pages that the first writes
    assert sizes(grouped([first, reader, chunk_of(9, pages_from(200))], TABLE, PAGE)) == [[16, 9], [10]]
    next_reader = chunk_of(11, [0, *pages_from(300)], first=4)
    assert sizes(grouped([first, reader, next_reader], TABLE, PAGE)) == [[16], [10, 11]]


def test_a_page_that_changed_hands_in_the_same_plan_has_one_writer_per_program():
    assert sizes(grouped([chunk_of(8, [1, 2, 3]), chunk_of(7, [4, 2, 5])], TABLE, PAGE)) == [[8], [7]]
    unused = [chunk_of(7, [1, 2, 3]), chunk_of(6, [4, 5, 3])]  # both end before their third page
    assert sizes(grouped(unused, TABLE, PAGE)) == [[7, 6]]


def test_prompts_with_log_probabilities_run_alone_and_last_chunks_come_first():
    chunks = [
        chunk_of(16, pages_from(0), is_last=False),
        chunk_of(15, pages_from(100), scores=True),
        chunk_of(14, pages_from(200)),
        chunk_of(13, pages_from(300), scores=True),
    ]
    assert sizes(grouped(chunks, TABLE, PAGE)) == [[14, 16], [15], [13]]


@given(
    prompts=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 20), st.integers(1, 30)), min_size=1, max_size=12),
    scored=st.integers(0, 12),
    chunk=st.sampled_from([16, 64, 256]),
)
def test_the_scheduler_s_chunks_never_meet_in_a_program_if_one_writes_what_another_touches(prompts, scored, chunk):
    scheduler = Scheduler(PrefixCache(PageAllocator(60, PAGE)), 8, chunk)
    table = ProgramTable.of(EngineConfig(max_running_requests=8, prefill_chunk=chunk), 64, (PLAIN,), (PLAIN,), catches_up=False)
    for number, (letter, common, own) in enumerate(prompts):
        params = SamplingParams(max_tokens=4, prompt_logprobs=0 if number == scored else None)
        asked = GenerationRequest(tuple([letter] * common + [2 + number % 3] * own), params)
        scheduler.add(Request(str(number), asked, 0, (), Detokenizer(None), arrival=number))
    for _ in range(4):
        chunks = scheduler.plan(2).prefills
        groups = grouped(chunks, table, PAGE)
        order = [each for group in groups for each in group]
        assert sorted(map(id, order)) == sorted(map(id, chunks))
        launched = {id(each): number for number, group in enumerate(groups) for each in group}
        for index, later in enumerate(chunks):
            for earlier in chunks[:index]:
                written, touched = (used(earlier, at) for at in (earlier.cached, 0))
                if written & used(later, 0) or touched & used(later, later.cached):
                    assert launched[id(earlier)] < launched[id(later)]
        for request in scheduler.unfinished[:1]:
            scheduler.finish(request)


def used(chunk: PrefillChunk, first: int) -> set[int]:
    """The pages of its slots from `first` on, and of the one after them, where a head's cache holds the emitted token."""
    return {chunk.pages[slot // PAGE] for slot in range(first, chunk.first_slot + chunk.size + chunk.is_last)}


# Whole engines

COMMON = [7, 3, 9, 1]
PROMPTS = [[*COMMON, 5], [1, 2, 3], [*COMMON, 6], [100, 3, 2, 4], list(range(40, 77)), [64, 2], [*COMMON, 5, 6, 7, 8, 9], [8]]
KINDS = [
    {"temperature": 0},
    {"temperature": 0.9, "top_p": 0.8, "presence_penalty": 0.7, "logprobs": 2},
    {"temperature": 1.2, "repetition_penalty": 1.3, "allowed_token_ids": [5, 17, 33, 64, 100, 127]},
    {"temperature": 0.6, "min_p": 0.1},
    {"temperature": 0.7, "prompt_logprobs": 1},
]


def engine_of(tree: TreeShape, *, together: bool = True, **options) -> Engine:
    """Few sizes, so that few programs are compiled; engines that differ in `together` share them. Pages are scarce."""
    options = {"max_running_requests": 4, "prefill_chunk": 32, "num_pages": 14} | options
    engine = tiny_engine(tree, target=TARGET, every_size=True, **options)
    table = engine.runner.table
    engine.runner.table = replace(table, batches=table.batches[-1:], chunks=(8, 32), prompts=(4 if together else 1, 1))
    return engine


def run(engine: Engine, at_once: bool = True) -> list[GenerationOutput]:
    """All prompts together, or one after the other."""
    params = [SamplingParams(max_tokens=10, seed=number, **KINDS[number % len(KINDS)]) for number in range(len(PROMPTS))]
    asked = [GenerationRequest(prompt, each) for prompt, each in zip(PROMPTS, params, strict=True)]
    requests = served(engine, *asked) if at_once else [request for each in asked for request in served(engine, each)]
    return [request.result() for request in requests]


@pytest.mark.variants
@pytest.mark.parametrize("tree", [PLAIN, exhaustive(TreeShape(2, 2, 4))], ids=str)
def test_together_they_say_what_each_says_alone(tree):
    """Under prefix hits within a step, chunked prompts, penalties, log probabilities, and preemption for want of pages."""
    expected = run(engine_of(tree, together=False, overlap=False), at_once=False)
    for overlap in (True, False):
        engine = engine_of(tree, overlap=overlap)
        batches = batches_of(engine)
        outputs = run(engine)
        assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
        for output, wanted in zip(outputs, expected, strict=True):
            for entries, known in ((output.logprobs, wanted.logprobs), (output.prompt_logprobs, wanted.prompt_logprobs)):
                assert values_of(entries) == pytest.approx(values_of(known), abs=1e-4)
        assert max(batches) > 2 and min(batches) == 1 and engine.stats().preemptions


def values_of(entries: Sequence[TokenLogprob | None] | None) -> list[float]:
    return [each.logprob for each in entries or () if each]


def batches_of(engine: Engine) -> list[int]:
    """The chunks of each prefill that it launches from now on."""
    batches, launch = list[int](), engine.runner.launch_prefill

    def launching(chunks):
        batches.append(len(chunks))
        return launch(chunks)

    engine.runner.launch_prefill = launching
    return batches


@pytest.mark.variants
@pytest.mark.parametrize("overlap", [True, False])
def test_a_batch_that_fails_ends_its_own_requests_and_no_others(monkeypatch, overlap):
    """Its first tokens can't be read."""
    engine = engine_of(PLAIN, overlap=overlap)
    params = SamplingParams(max_tokens=30, temperature=0)
    running = engine.add(GenerationRequest([9, 9], params), "running")
    while running.generated < 3:
        engine.step()
    launch, read, broken = engine.runner.launch_prefill, engine.runner.read, []

    def launching(chunks):
        launched = launch(chunks)
        if len(chunks) > 1:
            broken.append(launched.report)
        return launched

    def reading(launched):
        if any(launched.report is each for each in broken):
            raise RuntimeError("no result")
        return read(launched)

    monkeypatch.setattr(engine.runner, "launch_prefill", launching)
    monkeypatch.setattr(engine.runner, "read", reading)
    names = {engine.add(GenerationRequest(prompt, params)).id for prompt in ([1, 2, 3], [4, 5, 6], [7, 8, 9])}
    outputs = outputs_of(engine)
    assert broken and {name for name, output in outputs.items() if output.finish_reason == "error"} == names
    assert outputs["running"].finish_reason == "length"
    monkeypatch.undo()
    (again,) = served(engine, GenerationRequest([9, 9], params))
    assert again.result().token_ids == outputs["running"].token_ids and again.error is None


def test_a_batch_with_unfinished_prompts_reports_them_as_unreported():
    engine = engine_of(PLAIN)
    requests = [engine.add(GenerationRequest([length] * length, SamplingParams(max_tokens=2))) for length in (7, 8, 20)]
    plan = engine.scheduler.plan(1)
    chunks = [chunk._replace(size=min(8, chunk.size)) for chunk in plan.prefills]
    assert [chunk.is_last for chunk in chunks] == [True, True, False]
    (program,), _ = engine._launch(plan._replace(prefills=chunks[::-1]))
    assert program.requests == requests[1::-1] and program.unreported == requests[2:] and program.most_emitted == 1
    assert [request.in_flight for request in requests] == [1, 1, 0] and not engine.recovery.unreported


@pytest.mark.variants
def test_while_its_program_is_not_there_prompts_run_one_by_one():
    engine = engine_of(PLAIN)
    programs, table = engine.runner.programs, engine.runner.table
    programs.compile_all(table.first())
    programs.seal()
    batches = batches_of(engine)
    served(engine, *(GenerationRequest(prompt, SamplingParams(max_tokens=2)) for prompt in PROMPTS[:3]))
    assert batches == [1, 1, 1] and engine.stats().finished["length"] == 3


@pytest.mark.variants
def test_half_of_the_tokens_may_not_be_padding_on_a_cpu():
    engine = engine_of(PLAIN)
    chunks = [chunk_of(3, pages_from(100 * place)) for place in range(4)]
    assert sizes(engine.runner.prefill_groups(chunks)) == [[3] * 4]
    assert sizes(engine.runner.prefill_groups(chunks[:3])) == [[3] * 3]
    assert sizes(engine.runner.prefill_groups(chunks[:2])) == [[3], [3]]
    engine.runner.table = replace(engine.runner.table, prompts=(1,) * len(engine.runner.table.prompts))
    assert sizes(engine.runner.prefill_groups(chunks)) == [[3]] * 4
