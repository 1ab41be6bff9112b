"""The engine's thread behind asyncio: nothing waits that should not, and nothing is left behind."""

import asyncio
import math
import threading
import time
import uuid
from collections.abc import AsyncIterator

import pytest

from jaxspec.engine.driver import MAX_FAILED_STEPS, EngineThread, Observer
from jaxspec.engine.generation import Generation
from jaxspec.engine.pages import IntegrityError
from jaxspec.engine.request import EngineClosed, EngineError, GenerationOutput, GenerationRequest, Update
from jaxspec.engine.scheduler import QueueFull
from jaxspec.engine.stats import EngineStats
from jaxspec.grammar import cache
from jaxspec.grammar.vocabulary import source_of
from jaxspec.sampling_params import SamplingParams
from tests.server.conftest import wait_until
from tests.server.fakes import TEXT, FakeEngine

PARAMS = SamplingParams(max_tokens=20)
SAID = TEXT[:18] + "x"
"""What requests get: 20 bytes, as the ö has two."""


@pytest.fixture
def fake():
    return FakeEngine()


@pytest.fixture
def engine(fake: FakeEngine):
    others = set(threading.enumerate())
    engine = EngineThread(fake)
    yield engine
    fake.allow(math.inf)
    engine.close()
    assert not fake.running
    assert not [thread for thread in set(threading.enumerate()) - others if thread.name == "engine"]


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def start(engine: EngineThread, *names: str) -> Generation:
    return await Generation.start(engine, [GenerationRequest((1,), PARAMS)] * len(names), names)


async def flush(engine: EngineThread) -> None:
    await asyncio.wrap_future(engine.call(lambda fake: fake.flush_cache()))


async def stream(engine: EngineThread, prompt: list[int], request_id: str | None = None) -> AsyncIterator[Update]:
    with await Generation.start(engine, [GenerationRequest(prompt, PARAMS)], [request_id or uuid.uuid4().hex]) as generation:
        async for update in generation:
            yield update


async def text_of(engine: EngineThread, prompt: list[int]) -> str:
    return "".join([update.text async for update in stream(engine, prompt)])


async def test_it_sleeps_without_work(engine: EngineThread, fake: FakeEngine):
    await text_of(engine, [1])
    steps = fake.steps
    before = time.thread_time_ns(), time.process_time_ns()
    time.sleep(0.3)
    own, process = (after - start for after, start in zip((time.thread_time_ns(), time.process_time_ns()), before, strict=True))
    assert fake.steps == steps
    assert process - own < 0.1e9  # a busy loop would take the whole 0.3 s


async def test_leaving_aborts_within_one_step(engine: EngineThread, fake: FakeEngine):
    fake.allow(1)
    updates = stream(engine, [1], "mine")
    await anext(updates)
    await updates.aclose()  # the engine stands in its second step
    fake.allow(math.inf)
    await until(lambda: fake.aborted)
    assert fake.aborted == ["mine"]
    assert fake.steps <= 2


async def test_cancelled_before_admission_it_is_never_admitted(engine: EngineThread, fake: FakeEngine):
    fake.allow(0)
    first = asyncio.ensure_future(text_of(engine, [1]))
    await until(lambda: fake.running == 1)
    second = asyncio.ensure_future(text_of(engine, [2]))  # waits for admission: the engine stands in a step
    await asyncio.sleep(0.02)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    fake.allow(math.inf)
    assert await first == SAID
    await until(lambda: not fake.running)
    assert len(fake.params) == 1 and not fake.aborted


async def test_a_grammar_compiles_once_for_all_and_who_leaves_gives_up_a_place(engine, fake, monkeypatch):
    monkeypatch.setattr(cache, "MOST_WAITING", 3)
    gate = threading.Event()
    fake.grammars._thread.submit(gate.wait)

    def ask(number: int) -> asyncio.Task[Generation]:
        request = GenerationRequest((1,), SamplingParams(max_tokens=20, regex=f"a{{{number}}}"))
        return asyncio.ensure_future(Generation.start(engine, [request], [uuid.uuid4().hex]))

    waiting = [ask(number) for number in (1, 1, 1, 1, 2, 3)]
    await asyncio.sleep(0.02)
    for left in (waiting[0], *waiting[4:]):
        left.cancel()
    with pytest.raises(QueueFull, match="3 grammars wait"):
        await ask(4)
    gate.set()
    for kept in waiting[1:4]:
        (await kept).abort()
    await until(lambda: fake.grammars.kept_bytes and not fake.grammars._coming)
    (await ask(4)).abort()
    assert [task.cancelled() for task in waiting] == [True, False, False, False, True, True]
    del fake.grammars._source
    monkeypatch.setattr(cache, "source_of", lambda *model: time.sleep(0.2) or source_of(*model))
    left = [ask(5), ask(6)]  # the second waits for the first, which loads the vocabulary
    await asyncio.sleep(0.02)
    await asyncio.to_thread(engine.close)
    for each in (*left, ask(7)):
        with pytest.raises(EngineClosed):
            await each
    assert fake.grammars._process is None, "none is started after closing"


async def test_while_its_grammar_compiles_a_request_can_end_and_its_time_runs(engine: EngineThread, fake: FakeEngine):
    gate = threading.Event()
    fake.grammars._thread.submit(gate.wait)
    params, names = SamplingParams(max_tokens=20, regex="b+"), ["one", "two", "three"]
    starting = [asyncio.ensure_future(Generation.start(engine, [GenerationRequest((1,), params)], [name])) for name in names]
    await asyncio.sleep(0.05)
    assert await asyncio.wrap_future(engine.abort(["two", "four"])) == 1
    gate.set()
    generations = dict(zip(names, [await each for each in starting], strict=True))
    assert await asyncio.wrap_future(engine.abort(["two"])) == 0
    assert min(fake.waited) >= 0.05
    ends = {name: [update async for update in each][-1].output for name, each in generations.items()}
    assert [output and output.finish_reason for output in ends.values()] == ["length", "abort", "length"]


def test_an_event_loop_that_went_away_is_forgotten(engine: EngineThread, fake: FakeEngine):
    async def leave():
        fake.allow(0)
        await start(engine, "left")

    asyncio.run(leave())
    fake.allow(math.inf)
    wait_until(lambda: not fake.running)
    assert fake.aborted == ["left"]
    asyncio.run(text_of(engine, [1]))


async def test_a_request_that_fails_ends_the_others_of_its_generation_only(engine: EngineThread, fake: FakeEngine):
    fake.allow(0)
    first = await start(engine, "a", "b")
    second = asyncio.ensure_future(text_of(engine, [1]))
    await asyncio.sleep(0.02)
    fake.ends_with = "error"
    fake.allow(1)
    with pytest.raises(EngineError):
        async for _ in first:
            pass
    fake.allow(math.inf)
    assert await second == SAID
    await until(lambda: not fake.running)
    assert fake.aborted == ["b"]


async def test_failing_again_and_again_is_unhealthy_until_a_step_works(engine: EngineThread, fake: FakeEngine):
    fake.failures = MAX_FAILED_STEPS
    for _ in range(MAX_FAILED_STEPS):
        assert engine.is_healthy
        with pytest.raises(EngineError):
            await text_of(engine, [1])
    assert not engine.is_healthy
    await text_of(engine, [1])
    assert engine.is_healthy


@pytest.mark.parametrize("error", [IntegrityError("secret: page 3 is lost"), RuntimeError("secret"), AssertionError()])
async def test_an_exception_out_of_the_engine_ends_everything(error: Exception, caplog: pytest.LogCaptureFixture):
    """Not a single step more, and nobody waits for ever."""
    fake = FakeEngine()
    engine = EngineThread(fake)
    fake.allow(1)
    first = asyncio.ensure_future(text_of(engine, [1]))
    await until(lambda: fake.steps == 1)
    second = asyncio.ensure_future(text_of(engine, [1]))  # not admitted yet
    await asyncio.sleep(0.02)
    fake.crash = error
    fake.allow(math.inf)
    with pytest.raises(EngineError, match="failed while it worked") as failure:
        await first
    assert not isinstance(failure.value, EngineClosed) and "secret" not in str(failure.value)
    with pytest.raises(EngineClosed, match="restart the server"):
        await second
    fake.crash = None
    with pytest.raises(EngineClosed, match="restart the server"):
        await text_of(engine, [1])
    with pytest.raises(EngineClosed):
        await flush(engine)
    assert not engine.is_healthy
    assert fake.steps == 2
    assert fake.aborted == []  # a broken engine is not touched
    engine.close()
    assert "state is corrupt" in caplog.text and type(error).__name__ in caplog.text


async def test_an_engine_that_breaks_at_a_command_strands_nobody():
    class Breaking(FakeEngine):
        def flush_cache(self):
            raise IntegrityError("secret")

    engine = EngineThread(Breaking())
    with pytest.raises(EngineClosed, match="restart the server"):
        await flush(engine)
    engine.close()


async def test_flushing_the_cache(engine: EngineThread, fake: FakeEngine):
    await flush(engine)  # without work
    fake.allow(0)
    running = asyncio.ensure_future(text_of(engine, [1]))
    await until(lambda: fake.running == 1)
    flushing = asyncio.ensure_future(flush(engine))
    await asyncio.sleep(0.02)
    assert (fake.flushes, flushing.done()) == (1, False)  # between two steps only
    fake.allow(math.inf)
    await flushing
    assert fake.flushes == 2
    assert await running == SAID


async def test_a_start_that_is_cancelled_harms_no_owner_of_its_ids(engine: EngineThread, fake: FakeEngine):
    """The refusal and the cancellation may cross: what was never admitted must not be aborted."""
    fake.allow(1)
    first = await start(engine, "same")
    await until(lambda: fake.steps == 1)
    second = asyncio.ensure_future(start(engine, "same"))
    await asyncio.sleep(0.02)  # it waits for admission: the engine stands in a step, or was about to, and has refused it
    second.cancel()
    with pytest.raises((asyncio.CancelledError, ValueError)):
        await second
    fake.allow(math.inf)
    assert "".join([update.text async for update in first]) == SAID
    assert fake.aborted == []


class Watching(Observer):
    """An observer that remembers."""

    def __init__(self) -> None:
        self.steps: list[tuple[EngineStats, bool]] = []
        self.outputs: list[GenerationOutput] = []

    def after_step(self, stats: EngineStats, idle: bool) -> None:
        self.steps.append((stats, idle))

    def finished(self, output: GenerationOutput) -> None:
        self.outputs.append(output)


async def test_observers_see_every_step_every_end_and_when_work_runs_out(fake: FakeEngine):
    watching = Watching()
    engine = EngineThread(fake, [Watching(), watching])
    await text_of(engine, [1])
    engine.close()
    assert len(watching.steps) == fake.steps
    assert [idle for _, idle in watching.steps] == [False] * (len(watching.steps) - 1) + [True]
    assert watching.steps[-1][0].generated_tokens == 20 and engine.stats == watching.steps[-1][0]
    assert [output.finish_reason for output in watching.outputs] == ["length"]


async def test_observers_see_what_clients_leave(fake: FakeEngine):
    watching = Watching()
    engine = EngineThread(fake, [watching])
    fake.allow(3)
    updates = stream(engine, [1])
    await anext(updates)
    await updates.aclose()
    fake.allow(math.inf)
    engine.close()
    assert [output.finish_reason for output in watching.outputs] == ["abort"]


async def test_an_observer_that_fails_does_not_strand_anybody(fake: FakeEngine, caplog: pytest.LogCaptureFixture):
    class Failing(Watching):
        def after_step(self, stats: EngineStats, idle: bool) -> None:
            raise RuntimeError("observer")

    engine = EngineThread(fake, [Failing()])
    with pytest.raises(EngineError):
        await text_of(engine, [1])
    assert not engine.is_healthy
    assert "observer" in caplog.text
    engine.close()
