"""Stops, budgets, aborts, admission, and what the compiled programs must not do."""

import logging
from dataclasses import replace

import jax
import pytest

from jaxspec.decoding.programs import AdmitProgram, CatchUpProgram, CycleProgram, MaskProgram, PrefillProgram
from jaxspec.engine import request as request_module
from jaxspec.engine.engine import Engine
from jaxspec.engine.pages import PageAllocator
from jaxspec.engine.request import GenerationOutput, GenerationRequest, Limits
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import engine_target, oracle_head, random_eagle, tiny_engine
from jaxspec.tree_shape import PLAIN, TreeShape
from tests.engine.served import Gate, outputs_of, served, updates_of
from tests.sets import exhaustive

PROMPT = [3, 1, 4, 1, 5]


def complete(engine: Engine, **params) -> GenerationOutput:
    (request,) = served(engine, GenerationRequest(PROMPT, SamplingParams(**{"temperature": 0.0, "max_tokens": 40, **params})))
    return request.result()


@pytest.fixture(scope="module")
def text() -> tuple[int, ...]:
    """The greedy continuation of PROMPT."""
    return complete(tiny_engine(PLAIN)).token_ids


@pytest.fixture(scope="module")
def fast(text) -> Engine:
    """An engine whose cycles emit five tokens at once: stops fall inside accepted runs."""
    target = engine_target()
    return tiny_engine(TreeShape(4, 1), target=target, head=oracle_head(target.config, [*PROMPT, *text]))


@pytest.mark.parametrize("at", [0, 1, 2, 3, 7, 12])
def test_stop_token_cuts_inside_an_accepted_run(fast, text, at):
    first = text.index(text[at])
    out = complete(fast, stop_token_ids=[text[at]])
    assert out.token_ids == text[: first + 1]
    assert (out.finish_reason, out.matched_stop) == ("stop", text[at])
    assert out.text == bytes(text[:first]).decode(errors="replace")


@pytest.mark.parametrize("at", [1, 2, 6, 9])
def test_stop_string_cuts_inside_an_accepted_run(fast, text, at):
    whole = bytes(text).decode(errors="replace")
    stop = whole[at : at + 2]
    out = complete(fast, stop=["never appears", stop], logprobs=0)
    assert [entry.token_id for entry in out.logprobs] == list(out.token_ids)
    assert out.text == whole[: whole.index(stop)]
    assert out.token_ids == text[: whole.index(stop) + len(stop)]  # one token is one character here
    assert (out.finish_reason, out.matched_stop) == ("stop", stop)
    assert sum(out.speculation.accept_lengths) == len(out.token_ids) - 1


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 6, 7])
def test_budget_is_exact(fast, text, max_tokens):
    out = complete(fast, max_tokens=max_tokens)
    assert out.token_ids == text[:max_tokens]
    assert (out.finish_reason, out.matched_stop) == ("length", None)


def test_end_of_sequence_token_and_ignore_eos(text):
    eos = text[6]
    engine = tiny_engine(TreeShape(3, 2, 5), target=engine_target(eos_token_ids=(eos,)))
    assert complete(engine).token_ids == text[: text.index(eos) + 1]
    assert complete(engine, ignore_eos=True).token_ids == text


def test_updates_add_up_to_the_output(fast):
    request = fast.add(GenerationRequest(PROMPT, SamplingParams(max_tokens=23, temperature=0, stop="no such text")))
    updates, out = updates_of(fast), request.result()
    assert "".join(update.text for update in updates) == out.text
    assert sum((update.token_ids for update in updates), ()) == out.token_ids
    assert [update.output is not None for update in updates] == [False] * (len(updates) - 1) + [True]


@pytest.mark.parametrize("steps_before", range(5))
def test_abort_at_any_moment_frees_everything_and_disturbs_no_other(text, steps_before):
    engine = tiny_engine(TreeShape(3, 2, 5), max_running_requests=2, prefill_chunk=2)
    kept = engine.add(GenerationRequest(PROMPT, SamplingParams(max_tokens=40, temperature=0)))
    aborted = [engine.add(GenerationRequest(PROMPT, SamplingParams(max_tokens=30, temperature=0))) for _ in range(3)]
    for _ in range(steps_before):
        engine.step()
    for request in aborted:
        assert engine.abort(request.id).output.finish_reason == "abort"
    assert engine.abort(aborted[0].id) is None
    assert outputs_of(engine)[kept.id].token_ids == text
    assert engine.stats().running == engine.stats().waiting == 0


def test_a_full_pool_preempts_the_newest_and_changes_nothing(monkeypatch):
    """Three requests of 47 pages each share 64: the newest gives way, comes back and says what it would have said alone.

    The engine hands out 64 of more pages, so that both engines have the same programs.
    """
    params = SamplingParams(max_tokens=180, temperature=0.9, seed=3, ignore_eos=True)
    alone = tiny_engine(TreeShape(3, 2, 5), page_size=4)
    asked = [GenerationRequest(prompt, params) for prompt in (PROMPT, PROMPT[::-1], PROMPT[1:])]
    expected = served(alone, *asked)
    assert alone.stats().preemptions == 0
    monkeypatch.setattr("jaxspec.engine.engine.PageAllocator", lambda _, page_size: PageAllocator(64, page_size))
    engine = tiny_engine(TreeShape(3, 2, 5), page_size=4, prefix_cache=False)
    assert engine.stats().total_pages == 64
    requests = served(engine, *asked)
    assert [request.output for request in requests] == [request.output for request in expected]
    assert engine.stats().preemptions > 0 and requests[0].result().finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt is empty"),
        ([1, 128], {}, "token id 128"),
        ([-1, 2], {}, "token id -1"),
        ([1] * 200, {"max_tokens": 57}, "context length of 256"),
        ([1], {"stop_token_ids": [128]}, "stop_token_ids holds token id 128"),
        ([1], {"bad_token_ids": [200]}, "bad_token_ids holds token id 200"),
        ([1], {"allowed_token_ids": [1, 128]}, "allowed_token_ids holds token id 128"),
        ([1], {"logit_bias": {130: 1.0}}, "logit_bias holds token id 130"),
        ([1], {"bad_token_ids": list(range(128))}, "bad_token_ids bans every token"),
        ([1], {"bad_token_ids": [3, 4], "allowed_token_ids": [4, 3]}, "bad_token_ids bans every token"),
        ([1], {"n": 2}, "n is 2"),
    ],
)
def test_what_cannot_be_served_is_refused_with_a_reason(fast, prompt, params, message):
    with pytest.raises(ValueError, match=message):
        fast.add(GenerationRequest(prompt, SamplingParams(**params)))
    assert not fast.has_work


def test_the_lists_of_a_request_are_checked_once_for_all_its_copies(monkeypatch):
    built = []
    monkeypatch.setattr(request_module, "set", lambda ids: built.append(ids) or set(ids), raising=False)
    limits = Limits(128, 256, 16, (), True, ())
    for params in SamplingParams(n=5, allowed_token_ids=[1, 2, 3, 126]).copies():
        limits.check(GenerationRequest(PROMPT, params))
    assert built.count((1, 2, 3, 126)) == 1


def test_too_many_stop_tokens_are_refused_at_admission():
    engine = tiny_engine(PLAIN, target=engine_target(eos_token_ids=(1, 2, 3, 4, 5)))
    with pytest.raises(ValueError, match="end-of-sequence tokens are 17; at most 16 fit"):
        engine.add(GenerationRequest(PROMPT, SamplingParams(stop_token_ids=list(range(20, 32)))))
    engine.add(GenerationRequest(PROMPT, SamplingParams(stop_token_ids=list(range(20, 32)), ignore_eos=True)))


@pytest.mark.variants
def test_nothing_compiles_after_warm_up(caplog):
    small = {"target": engine_target(num_layers=1), "context_length": 64, "prefill_chunk": 2}
    engine = tiny_engine(TreeShape(1, 2, 2), max_running_requests=2, **small, every_size=True)
    engine.warm_up()
    with jax.no_tracing():
        params = [SamplingParams(max_tokens=12, temperature=temperature) for temperature in (0.0, 0.7)]
        served(engine, *(GenerationRequest(prompt, each) for each in params for prompt in (PROMPT, PROMPT * 5)))
    engine.runner.table = replace(engine.runner.table, batches=(5,))
    with caplog.at_level(logging.CRITICAL, "jaxspec"):
        assert "was not compiled ahead" in complete(engine).error


@pytest.mark.exhaustive
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_small_programs_that_come_later_change_no_text(monkeypatch, temperature):
    """Before they are there, while a request runs, and afterwards. With plain decoding by request, whose head catches up."""
    prompts = [PROMPT, PROMPT * 5, PROMPT[::-1]]

    def run(engine: Engine, change=None) -> list[list[int]]:
        requests = []
        for index, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=40, temperature=temperature, seed=index)
            requests.append(engine.add(GenerationRequest(prompt, params, tree=PLAIN if index == 1 else None)))
        while change and requests[0].generated < 10:
            engine.step()
        if change:
            change()
        updates_of(engine)
        assert not any(request.error for request in requests)
        return [request.output for request in requests]

    def start() -> Engine:
        small = engine_target(num_layers=2)  # nine programs are to be compiled
        sizes = {"max_running_requests": 2, "context_length": 128, "prefill_chunk": 8, "page_size": 4, "every_size": True}
        head = random_eagle(small.config)
        engine = tiny_engine(TreeShape(2, 2, 4), target=small, head=head, request_trees=(PLAIN,), **sizes)
        engine.runner.table = replace(engine.runner.table, chunks=(4, 8))
        return engine

    complete = start()
    complete.warm_up()
    expected = run(complete)

    engine, used = start(), set()
    gate, programs, launch = Gate(engine, monkeypatch), engine.runner.programs, engine.runner.run

    def noted(program, *arguments):
        used.add(program)
        return launch(program, *arguments)

    monkeypatch.setattr(engine.runner, "run", noted)
    engine.warm_up(wait_for_all=False)
    assert run(engine) == expected and used <= set(engine.runner.table.first())
    assert programs.count.ready == len(engine.runner.table.first()) == 4 and programs.ready.batches == (2,)
    assert programs.count.total > 5 and programs.is_compiling and programs.ready.trees == (TreeShape(2, 2, 4),)

    def switch() -> None:
        gate.open.set()
        programs.wait()

    assert run(engine, switch) == expected
    programs.wait()
    assert programs.count.ready == programs.count.total > 5
    used.clear()
    assert run(engine) == expected and not used <= set(engine.runner.table.first())
    assert engine.runner.programs.ready.trees == engine.trees.all


@pytest.mark.variants
@pytest.mark.parametrize(("kv_cache_dtype", "num_pages"), [("auto", 4096), exhaustive("fp8_e4m3", 4 * 4096)])
def test_programs_update_the_caches_in_place(kv_cache_dtype, num_pages):
    """Donated caches alias the results, and no program holds a copy of one among its temporaries."""
    options = {"request_trees": (PLAIN,), "num_pages": num_pages, "kv_cache_dtype": kv_cache_dtype}
    tree = TreeShape(1, 2, 2)
    runner = tiny_engine(tree, target=engine_target(num_layers=1), **options).runner
    one_array = jax.tree.leaves(runner.state.cache)[0].nbytes
    programs = runner.table.largest_of_all()
    assert {type(program) for program in programs} == {AdmitProgram, CatchUpProgram, CycleProgram, MaskProgram, PrefillProgram}
    assert {program.tree for program in programs if isinstance(program, CycleProgram)} == {PLAIN, tree}
    for program in programs:
        memory = runner.programs._compile(program).memory_analysis()
        assert memory.alias_size_in_bytes >= runner.cache_bytes, str(program)
        assert memory.temp_size_in_bytes < one_array, str(program)


def test_seeds():
    engine = tiny_engine(TreeShape(3, 2, 5))
    sampled = {"temperature": 1.0, "max_tokens": 20}
    assert complete(engine, **sampled, seed=1).token_ids == complete(engine, **sampled, seed=1).token_ids
    big = [complete(engine, **sampled, seed=seed).token_ids for seed in (1, 2, 2**32 + 1, 2**63, -1)]
    assert len(set(big)) == 5
    drawn = [complete(engine, **sampled).token_ids for _ in range(3)]
    assert len(set(drawn)) == 3


def test_refused_requests_do_not_change_the_seeds_of_later_ones():
    engines = [tiny_engine(PLAIN, random_seed=4) for _ in range(2)]
    asked, seeds = GenerationRequest(b"abc", SamplingParams(max_tokens=2)), list[list[int]]()
    for engine, is_disturbed in zip(engines, (False, True), strict=True):
        seeds.append([engine.add(asked).seed])
        if is_disturbed:
            engine.withdraw(engine.add(asked).id)
            with pytest.raises(ValueError, match="token id 999"):
                engine.add(GenerationRequest((999,), SamplingParams()))
        seeds[-1].append(engine.add(asked).seed)
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 2


def test_seeds_that_an_engine_draws_come_from_its_random_seed():
    """Without one it draws that too, and says which: servers side by side, or restarted, must not repeat each other's samples."""
    own = tiny_engine(TreeShape(3, 2, 5), random_seed=None)
    seeds = (4, 4, 5, None, own.config.random_seed)
    engines = [own, *(tiny_engine(TreeShape(3, 2, 5), random_seed=seed) for seed in seeds)]
    mine, first, again, other, unseeded, same = (complete(each, temperature=1.0, max_tokens=20).token_ids for each in engines)
    assert first == again and mine == same and len({mine, first, other, unseeded}) == 4
