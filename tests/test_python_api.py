"""The Python API on a tiny model: what people who come from vLLM and SGLang write works, or says what to write instead."""

import asyncio
import gc
import os
import signal
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

import jaxspec
from jaxspec import LLM, AsyncLLM, SamplingParams, TreeShape
from jaxspec.decoding.programs import Program
from jaxspec.engine.programs import Programs
from jaxspec.engine.request import EngineError, Update
from jaxspec.grammar import cache
from jaxspec.testing import engine_target, largest_sizes_only, random_eagle, tiny_target, write_head, write_target
from tests.server.conftest import wait_until
from tests.server.fakes import CHAT_TEMPLATE, byte_tokenizer
from tests.sets import exhaustive, variants

GREEDY = SamplingParams(max_tokens=6, temperature=0)
HELLO = [{"role": "user", "content": "Hello"}]
OPTIONS = {"page_size": 4, "max_running_requests": 2, "prefill_chunk": 16}
"""Those of `tiny_engine`: engines of other files have the same programs."""


def few_programs[Kind: LLM | AsyncLLM](llm: Kind) -> Kind:
    """With programs of the largest sizes only."""
    largest_sizes_only(llm.engine if isinstance(llm, LLM) else llm._thread._work._engine)
    return llm


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[str, str]:
    """A tiny model that knows bytes and a chat template, and its head."""
    directory, target = tmp_path_factory.mktemp("api"), engine_target(vocab_size=256)
    model = write_target(directory / "target", target)
    byte_tokenizer(CHAT_TEMPLATE).save_pretrained(model)
    return str(model), str(write_head(directory / "head", random_eagle(target.config)))


@pytest.fixture(scope="module")
def llm(files):
    with LLM(*files, "2/2/4", **OPTIONS) as llm:
        yield few_programs(llm)


def tokens(outputs) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


def test_the_package_lists_what_it_offers():
    names: dict = {}
    exec("from jaxspec import *", names)
    for name in ("LLM", "AsyncLLM", "SamplingParams", "TreeShape", "EngineConfig", "GenerationOutput", "Update"):
        assert name in dir(jaxspec) and name in jaxspec.__all__ and name in names
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        jaxspec.LMM  # noqa: B018


def test_generate_takes_sampling_params_by_keyword_and_as_a_mapping(llm):
    expected = tokens(llm.generate("ab", GREEDY))
    assert tokens(llm.generate("ab", sampling_params=GREEDY)) == expected
    assert tokens(llm.generate("ab", {"max_tokens": 6, "temperature": 0})) == expected
    assert tokens(llm.generate(["ab", "ab"], [GREEDY, {"max_tokens": 6, "temperature": 0}])) == expected * 2
    assert tokens([update.output for update in llm.stream("ab", sampling_params=GREEDY) if update.output]) == expected


@pytest.mark.parametrize("spec", ["2/2/4", (2, 2, 4), {"num_steps": 2, "topk": 2, "num_draft_tokens": 4}])
def test_a_tree_may_be_written_in_any_way(files, llm, spec):
    with LLM(*files, spec, dtype=jnp.float32, **OPTIONS) as other:
        assert other.engine.tree == llm.engine.tree == TreeShape(2, 2, 4)


def test_each_call_may_choose_its_tree(files, llm):
    async def cycles_with_a_tree(other: AsyncLLM, tree: str | None) -> list[int]:
        calls = other.generate("ab", GREEDY, tree=tree), other.chat(HELLO, GREEDY, tree=tree)
        return [len(update.output.speculation.with_tree) for call in calls async for update in call if update.output]

    async def work() -> None:
        async with few_programs(AsyncLLM(*files, "2/2/4", request_trees=["plain"], **OPTIONS)) as other:
            assert all(await cycles_with_a_tree(other, None)) and not any(await cycles_with_a_tree(other, "plain"))

    for own, further in (("2/2/4", "plain"), ("plain", "2/2/4")):
        with few_programs(LLM(*files, own, request_trees=[further], **OPTIONS)) as other:
            for call, prompt in ((other.generate, "ab"), (other.chat, HELLO)):
                [first], [second] = call(prompt, GREEDY), call(prompt, GREEDY, tree=further)
                assert first.token_ids == second.token_ids
                assert [bool(each.speculation.with_tree) for each in (first, second)] == [own != "plain", own == "plain"]
            [*_, last] = other.stream("ab", GREEDY, tree="0")
            assert not last.output.speculation.with_tree
            with pytest.raises(ValueError, match=r"tree 3/1/4 is not among those of this engine: (2/2/4, plain|plain, 2/2/4)"):
                other.generate("ab", tree=(3, 1, 4))
    asyncio.run(work())


def test_chat_answers_one_conversation_or_many(llm):
    prompt = llm.tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, tokenize=False)
    expected = tokens(llm.generate(prompt, GREEDY))
    assert tokens(llm.chat(HELLO, GREEDY)) == expected
    outputs = llm.chat([HELLO, HELLO], sampling_params={"max_tokens": 6, "temperature": 0})
    assert tokens(outputs) == expected * 2 and [output.prompt_index for output in outputs] == [0, 1]


@pytest.mark.parametrize(
    ("messages", "options", "error"),
    [
        (["Hello"], None, "a conversation must be a list of messages with role and content, got 'Hello'"),
        (None, None, "a conversation must be a list of messages with role and content, got None"),
        (HELLO[0], None, "a conversation must be a list of messages with role and content, got {'role'"),
        (b"", None, "a conversation must be a list of messages with role and content, got b''"),
        ([{"role": "user", "content": b"x"}], None, "messages: they, or the tools, hold what JSON can't: Object of type bytes"),
        ([{"role": "tool", "content": "x"}], None, "no tools here"),
        (HELLO, {"enable_thinking": True}, "enable_thinking"),
    ],
)
def test_a_conversation_that_cannot_be_rendered_is_refused(llm, messages, options, error):
    with pytest.raises(ValueError, match=error):
        llm.chat(messages, GREEDY, chat_template_kwargs=options)


def test_a_model_without_a_chat_template_says_so(tmp_path):
    with LLM(write_target(tmp_path, tiny_target()), **OPTIONS) as llm, pytest.raises(ValueError, match="no chat template"):
        llm.chat(HELLO)


def test_streams_of_several_prompts_are_told_apart(llm):
    sampled = SamplingParams(max_tokens=5, seed=3, n=2)
    outputs = llm.generate(["ab", "cd"], sampled)
    places = [(output.prompt_index, output.index) for output in outputs]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
    streamed: dict[tuple[int, int], tuple[int, ...]] = dict.fromkeys(places, ())
    for update in llm.stream(["ab", "cd"], sampled):
        streamed[update.prompt_index, update.index] += update.token_ids
        assert update.output is None or (update.output.prompt_index, update.output.index) == (update.prompt_index, update.index)
    assert list(streamed.values()) == tokens(outputs)


def test_half_a_surrogate_pair_is_refused_in_words(llm):
    with pytest.raises(ValueError, match="valid Unicode, but its character 1 is half of a surrogate pair"):
        llm.generate("a\ud800")


@pytest.mark.parametrize("rounds", [5, exhaustive(100)])
def test_threads_get_the_texts_that_they_would_get_alone(llm, rounds):
    """A later call joins the running batch; the guard that this replaces lost outputs and mixed texts up."""
    prompts = [f"prompt {number}" for number in range(8)]
    params = [SamplingParams(max_tokens=4, temperature=0.9, seed=number) for number in range(8)]
    alone = [tokens(llm.generate(prompt, each)) for prompt, each in zip(prompts, params, strict=True)]
    ready = threading.Barrier(8)

    def work(number: int) -> None:
        ready.wait()
        for _ in range(rounds):
            assert tokens(llm.generate(prompts[number], params[number])) == alone[number]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    wait_until(lambda: not llm.engine.has_work and llm.stats().used_pages == 0)


def test_progress_is_shown_on_a_terminal_unless_told_otherwise(files, monkeypatch, capsys):
    with LLM(files[0], **OPTIONS) as quiet:
        few_programs(quiet).generate("ab", {"max_tokens": 1})
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with LLM(files[0], **OPTIONS) as shown, LLM(files[0], progress=False, **OPTIONS) as quiet:
        capsys.readouterr()
        few_programs(quiet).generate("ab", {"max_tokens": 1})
        assert capsys.readouterr().err == ""
        few_programs(shown).generate(["ab", "cd"], {"max_tokens": 1})
    assert "generating" in (err := capsys.readouterr().err) and "2/2" in err


def test_statistics_and_compiling_ahead(files):
    with LLM(files[0], **OPTIONS) as llm:
        few_programs(llm)
        assert llm.stats().generated_tokens == 0 and llm.warm_up() > 0
        llm.generate("ab", GREEDY)
        assert llm.stats().generated_tokens == 6


@pytest.mark.parametrize("wait_for_all", [True, False])
def test_after_the_warm_up_no_request_compiles(files, monkeypatch, wait_for_all):
    """Of whatever kind, however many at once. In the background more may compile; requests don't wait for it."""
    sampled = {"max_tokens": 4, "temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.5, "logprobs": 1, "seed": 1}
    compiling: list[str] = []

    async def complete(llm: AsyncLLM, length: int, params) -> str:
        return [update async for update in llm.generate([7] * length, params)][-1].output.finish_reason

    async def work() -> None:
        async with few_programs(AsyncLLM(*files, "2/2/4", **OPTIONS)) as llm:
            assert await llm.warm_up(wait_for_all=wait_for_all) > 0
            compile_one = Programs._compile

            def noted(programs, program):
                compiling.append(threading.current_thread().name)
                return compile_one(programs, program)

            monkeypatch.setattr(Programs, "_compile", noted)
            ends = await asyncio.gather(*(complete(llm, length, params) for length in (1, 5, 40) for params in (GREEDY, sampled)))
            assert ends == ["length"] * 6
            assert await complete(llm, 3, GREEDY) == "length" and llm.stats().generated_tokens == 3 * 6 + 3 * 4 + 6

    asyncio.run(work())
    assert not [name for name in compiling if name != "compiler"]
    cold = few_programs(AsyncLLM(*files, "2/2/4", **OPTIONS))
    asyncio.run(complete(cold, 1, GREEDY))
    cold.close()
    assert "engine" in compiling  # so this test would have seen it


def test_after_closing_every_call_is_refused(files):
    with LLM(files[0], **OPTIONS) as llm:
        waiting = few_programs(llm).stream("ab", GREEDY)
        next(waiting)
    llm.close()
    for call in (lambda: llm.generate("ab"), lambda: llm.chat(HELLO), lambda: next(waiting), llm.stats, llm.warm_up):
        with pytest.raises(RuntimeError, match="this LLM is closed: create a new one"):
            call()


@pytest.mark.parametrize("ending", [LLM.close, AsyncLLM.close, variants(None)])
def test_the_memory_is_free_after_the_end(files, ending):
    """Also if programs still compile in the background. None: nothing refers to the LLM any more."""
    llm = few_programs((AsyncLLM if ending is AsyncLLM.close else LLM)(*files, "2/2/4", **OPTIONS))
    runner = llm._thread._work._engine.runner
    runner.programs.start_compiler()
    weights = [weakref.ref(array) for array in jax.tree.leaves(runner.params)]
    if ending is None:
        del llm
    else:
        ending(llm)
    assert weights and runner.programs._stopping
    del runner
    wait_until(lambda: gc.collect() >= 0 and all(array() is None for array in weights))


def test_a_call_that_is_refused_is_counted_nowhere(llm, monkeypatch):
    monkeypatch.setattr(cache, "MOST_WAITING", 1)
    before = llm.stats()
    with pytest.raises(ValueError, match="token id 999"):
        llm.generate([[1, 2], [999]], [SamplingParams(regex="a{3}"), SamplingParams(regex="a{4}")])
    after = llm.stats()
    assert (after.prompt_tokens, after.constrained_requests, after.finished) == (
        before.prompt_tokens, before.constrained_requests, before.finished
    )  # fmt: skip


def test_a_stream_that_is_left_or_collected_ends(llm):
    """Also by a garbage collector, which must not wait."""
    left = llm.stream("ab", SamplingParams(max_tokens=200, ignore_eos=True))
    next(left)
    del left
    gc.collect()
    wait_until(lambda: not llm.engine.has_work)
    assert llm.stats().finished["abort"] >= 1


@pytest.fixture
def interruptible():
    """Python's own handler, which shells take away from programs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_the_call_and_no_other(llm):
    """Whenever it comes while the main thread waits."""
    expected = tokens(llm.generate("ab", GREEDY))
    endless = SamplingParams(max_tokens=240, ignore_eos=True)
    for delay in (0.0, 0.01, 0.1):
        timer = threading.Timer(delay, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT])
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            while True:
                llm.generate("ab", endless)
        timer.join()
        wait_until(lambda: not llm.engine.has_work)
        assert tokens(llm.generate("ab", GREEDY)) == expected


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("kind", "ending"), [(LLM, KeyboardInterrupt), (AsyncLLM, KeyboardInterrupt), (LLM, EngineError)])
def test_ctrl_c_and_closing_end_a_warm_up(files, monkeypatch, kind, ending):
    compiling, started = list[Program](), threading.Event()

    def compile_slowly(_programs: Programs, program: Program) -> None:
        compiling.append(program)
        started.set()
        time.sleep(0.2)

    def end() -> None:
        started.wait(20)
        llm.close() if ending is EngineError else signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    monkeypatch.setattr(Programs, "_compile", compile_slowly)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # else all may compile at once
    llm, other = kind(files[0], **OPTIONS), threading.Thread(target=end)
    other.start()
    with pytest.raises(ending):
        asyncio.run(llm.warm_up()) if kind is AsyncLLM else llm.warm_up()
    other.join()
    llm.close()
    assert len(compiling) <= 3, "it closes without compiling the rest"


def test_an_llm_that_is_collected_ends_its_thread_and_its_requests(files):
    llm = few_programs(LLM(*files, "2/2/4", **OPTIONS))
    runs, engine = llm._thread._thread, weakref.ref(llm.engine)
    stream = llm.stream("ab", SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    del llm
    assert runs.is_alive()
    del stream
    wait_until(lambda: gc.collect() >= 0 and not runs.is_alive() and engine() is None)


def test_coroutines_share_one_engine(files, llm):
    expected = tokens(llm.generate(["ab", "cd"], GREEDY)), tokens(llm.chat(HELLO, GREEDY))

    async def text(stream) -> tuple[int, ...]:
        return tuple([token async for update in stream for token in update.token_ids])

    async def last(stream) -> Update:
        return [update async for update in stream][-1]

    async def work() -> None:
        async with few_programs(AsyncLLM(*files, "2/2/4", **OPTIONS)) as other:
            both = await asyncio.gather(*(text(other.generate(prompt, GREEDY)) for prompt in ("ab", "cd")))
            assert (both, [await text(other.chat(HELLO, {"max_tokens": 6, "temperature": 0}))]) == expected
            indices = {update.index async for update in other.generate("ab", SamplingParams(max_tokens=2, n=3), "mine")}
            assert indices == {0, 1, 2} and not await other.abort("mine")
            with pytest.raises(ValueError, match="prompt is empty"):
                await anext(other.generate([]))
            endless = other.generate("ab", SamplingParams(max_tokens=200, ignore_eos=True), "mine")
            await anext(endless)
            for completions in (1, 2):
                with pytest.raises(ValueError, match="request_id 'mine' is in use by an unfinished request"):
                    await anext(other.generate("cd", SamplingParams(n=completions), "mine"))
            assert await other.abort("mine")
            assert [update async for update in endless][-1].output.finish_reason == "abort"
            assert other.stats().running == 0
            gate = threading.Event()
            other._thread._grammars._thread.submit(gate.wait)
            long = SamplingParams(max_tokens=200, regex="[a-z]{200}")
            for call, prompt, seconds in ((other.generate, "ab", 0.1), (other.generate, "ab", 0.0), (other.chat, HELLO, 0.0)):
                early = asyncio.ensure_future(last(call(prompt, long, "early")))
                await asyncio.sleep(seconds)  # 0: its prompt is not encoded yet
                assert await other.abort("early")
                gate.set()
                assert (await early).output.finish_reason == "abort"
            with pytest.raises(ValueError, match="timeout must be a number of seconds, got '5'"):
                await anext(other.generate("ab", timeout="5"))
        other.close()
        with pytest.raises(EngineError, match="this LLM is closed: create a new one"):
            await anext(other.generate("ab"))

    asyncio.run(work())
