"""Many threads on one engine: no text is lost or mixed up, no thread starves, and nothing is left behind."""

import asyncio
import gc
import itertools
import math
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest

from jaxspec.engine.driver import EngineThread
from jaxspec.engine.generation import Generation
from jaxspec.engine.request import EngineClosed, EngineError, GenerationRequest, Update
from jaxspec.sampling_params import SamplingParams
from tests.server.conftest import wait_until
from tests.server.fakes import TEXT, FakeEngine
from tests.sets import variants


class OneThreadEngine(FakeEngine):
    """Fails if two threads are in it at once."""

    def __init__(self) -> None:
        super().__init__()
        self._inside = threading.Lock()

    def add(self, asked, request_id=None, **options):
        with self._alone():
            return super().add(asked, request_id, **options)

    def step(self) -> list[Update]:
        with self._alone():
            time.sleep(0.0005)  # lets other threads run, as waiting for a device does
            return super().step()

    def abort(self, request_id: str) -> Update | None:
        with self._alone():
            return super().abort(request_id)

    def _alone(self):
        assert self._inside.acquire(blocking=False), "two threads use the engine at once"
        self._inside.release()
        return self._inside


@pytest.fixture
def engine() -> OneThreadEngine:
    return OneThreadEngine()


@pytest.fixture
def thread(engine: OneThreadEngine):
    thread = EngineThread(engine, closed="it is closed")
    yield thread
    thread.close()
    assert not engine.has_work


def text(length: int) -> str:
    """Of so many bytes, without half a character."""
    return TEXT.encode()[:length].decode(errors="ignore")


class Stream:
    """The updates of requests for so many tokens, as a thread reads them."""

    def __init__(self, thread: EngineThread, *lengths: int):
        self._items: SimpleQueue[Update | EngineError] = SimpleQueue()
        asked = [GenerationRequest((1, 2), SamplingParams(max_tokens=length)) for length in lengths]
        self.ticket = thread.submit(asked, self._items.put)
        self.ticket.admitted.result(20)
        self.unfinished = len(lengths)

    def __iter__(self) -> Iterator[Update]:
        while self.unfinished:
            item = self._items.get(timeout=20)
            if isinstance(item, EngineError):
                raise item
            self.unfinished -= item.output is not None
            yield item

    def texts(self) -> list[str]:
        parts = dict.fromkeys(self.ticket.ids, "")
        for update in self:
            parts[update.request_id] += update.text
        return list(parts.values())


def test_calls_of_sixteen_threads_each_get_their_own_text(thread, engine):
    def work(number: int) -> None:
        for turn in range(10):
            lengths = [1 + (number * 7 + turn * 3 + each) % 30 for each in range(3)]
            assert Stream(thread, *lengths).texts() == [text(length) for length in lengths]

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))
    assert not engine.has_work


def test_event_loops_and_threads_share_it(thread, engine):
    async def loop() -> list[str]:
        async def one(length: int) -> str:
            request = GenerationRequest((1,), SamplingParams(max_tokens=length))
            with await Generation.start(thread, [request], [f"{threading.get_ident()}-{length}"]) as generation:
                return "".join([update.text async for update in generation])

        return await asyncio.gather(*map(one, range(1, 9)))

    with ThreadPoolExecutor(8) as pool:
        loops = [pool.submit(asyncio.run, loop()) for _ in range(2)]
        threads = [pool.submit(lambda: Stream(thread, 9, 12).texts()) for _ in range(6)]
        assert [each.result(20) for each in threads] == [[text(9), text(12)]] * 6
        assert [each.result(20) for each in loops] == [[text(length) for length in range(1, 9)]] * 2


async def test_an_event_loop_wakes_up_once_a_step_however_many_requests_run(thread, engine):
    loop, wakes = asyncio.get_running_loop(), []
    wake = loop.call_soon_threadsafe
    loop.call_soon_threadsafe = lambda function, *items: (wakes.append(function.__name__), wake(function, *items))  # type: ignore
    requests = [GenerationRequest((1,), SamplingParams(max_tokens=9))] * 20
    with await Generation.start(thread, requests, [str(number) for number in range(20)]) as generation:
        assert len([update async for update in generation]) == 20 * engine.steps
    assert wakes.count("_deliver_all") == engine.steps


def test_calls_of_one_thread_may_be_interleaved(thread):
    rounds = list(itertools.zip_longest(*(Stream(thread, length) for length in (9, 5))))
    assert rounds[0][1] is not None and rounds[-1][1] is None
    assert ["".join(update.text for update in parts if update) for parts in zip(*rounds, strict=True)] == [text(9), text(5)]


def test_aborting_ends_the_requests_of_that_ticket_only(thread, engine):
    engine.allow(1)
    left, kept = Stream(thread, 30, 30), Stream(thread, 8)
    thread.drop(left.ticket)
    engine.allow(math.inf)
    assert kept.texts() == [text(8)]
    assert sorted(engine.aborted) == sorted(left.ticket.ids)


def test_a_refused_request_leaves_nothing_queued_and_can_be_named(thread, engine):
    requests = [GenerationRequest((token,), SamplingParams()) for token in (1, 999, 2)]
    ticket = thread.submit(requests, print)
    with pytest.raises(ValueError, match="prompt holds token id 999"):
        ticket.admitted.result(20)
    assert not engine.has_work and engine.steps == 0
    assert engine.withdrawn == ticket.ids and len(ticket.ids) == 1 and not engine.aborted


def test_a_call_runs_between_two_steps_and_its_error_is_the_callers_alone(thread, engine):
    stream = Stream(thread, 30)
    assert thread.call(lambda owned: owned.running).result(20) <= 1
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda _owned: 1 / 0).result(20)
    assert stream.texts() == [text(30)]


def test_a_request_that_the_engine_loses_is_an_error(thread, engine):
    engine.allow(1)
    stream = Stream(thread, 5)
    wait_until(lambda: engine.steps == 1)
    thread.call(lambda owned: owned._requests.clear())
    engine.allow(math.inf)
    with pytest.raises(EngineError) as raised:
        stream.texts()
    assert "the engine lost 1 requests" in str(raised.value.__cause__)


@pytest.mark.parametrize("crash", [None, MemoryError()])
def test_a_reader_that_fails_ends_its_own_requests_only(thread, engine, caplog, crash):
    """While others are served, and when the thread ends."""
    taken: SimpleQueue[Update | EngineError] = SimpleQueue()

    def fail(_item):
        raise ZeroDivisionError

    posted, engine.crash = threading.Event(), crash
    thread.call(lambda _owned: posted.wait(20))
    asked = GenerationRequest((1,), SamplingParams(max_tokens=30))
    failing, _ = (thread.submit([asked], deliver) for deliver in (fail, taken.put))
    posted.set()
    items = [taken.get(timeout=20)]
    while crash is None and items[-1].output is None:
        items.append(taken.get(timeout=20))
    if crash:
        thread.close()  # it may tell the other reader first
    assert isinstance(items[-1], EngineError) if crash else "".join(each.text for each in items) == text(30)
    assert engine.aborted == ([] if crash else failing.ids) and "the reader of a request has failed" in caplog.text
    engine._requests.clear()


def test_after_closing_every_call_is_refused(engine):
    thread = EngineThread(engine, closed="it is closed")
    engine.allow(1)
    stream = Stream(thread, 30)
    threads = [threading.Thread(target=thread.close) for _ in range(2)]
    for each in threads:
        each.start()
    time.sleep(0.02)
    engine.allow(math.inf)
    for each in threads:
        each.join(20)
    thread.close()
    assert engine.aborted and not engine.has_work and not thread.stats.running
    with pytest.raises(EngineClosed, match="it is closed"):
        list(stream)
    for call in (lambda: Stream(thread, 1), thread.check_open, thread.abort, lambda: thread.call(print)):
        with pytest.raises(EngineClosed, match="it is closed"):
            call()
    thread.drop(stream.ticket)


def test_a_call_that_comes_while_it_closes_is_answered(engine):
    """Nobody waits for ever, whoever is first."""
    for _ in range(30):
        thread = EngineThread(OneThreadEngine())
        closing = threading.Thread(target=thread.stop)
        closing.start()
        try:
            asked = [thread.call(lambda owned: owned.steps) for _ in range(20)]
        except EngineClosed:
            asked = []
        for each in asked:
            assert isinstance(each.exception(20), EngineClosed | None)
        closing.join()
        thread.close()


def test_it_ends_when_nobody_refers_to_it_any_more(engine):
    thread = EngineThread(engine)
    engine.allow(3)
    stream = Stream(thread, 30)
    runs, forgotten = thread._thread, weakref.ref(engine)
    next(iter(stream))
    engine.allow(math.inf)
    del thread
    gc.collect()
    assert not runs.is_alive() and engine.aborted and forgotten() is engine


def test_it_may_be_collected_in_its_own_thread(engine):
    thread = EngineThread(engine)
    runs = thread._thread
    kept = [thread]
    del thread
    kept[0].call(lambda _owned: kept.clear()).result(20)
    wait_until(lambda: gc.collect() >= 0 and not runs.is_alive())


def test_a_forked_process_is_told(thread, monkeypatch):
    stream = Stream(thread, 3)
    with monkeypatch.context() as patch:  # forking for real makes JAX warn, as it has threads
        patch.setattr(os, "getpid", lambda: -1)
        for call in (lambda: Stream(thread, 1), thread.close, thread.check_open):
            with pytest.raises(RuntimeError, match="can't be used in a forked one"):
                call()
        thread.drop(stream.ticket)  # nor does a stream that is collected there harm the parent's
    assert stream.texts() == [text(3)]


@pytest.mark.parametrize("ending", ["", variants("del thread"), variants("raise SystemExit(3)")])
def test_python_exits_after_its_thread(ending):
    """Also in the middle of a step: Python crashes if it exits while a thread is inside XLA."""
    program = f"""
import time
from tests.server.fakes import FakeEngine
from jaxspec.engine.driver import EngineThread
from jaxspec.engine.request import GenerationRequest
from jaxspec.sampling_params import SamplingParams

class Slow(FakeEngine):
    def step(self):
        time.sleep(0.3)
        print("stepped", flush=True)
        return super().step()

thread = EngineThread(Slow())
thread.submit([GenerationRequest((1,), SamplingParams(max_tokens=90))], lambda item: None).admitted.result()
time.sleep(0.1)
{ending}
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "stepped\n" and "rror" not in ended.stderr and ended.returncode == (3 if "Exit" in ending else 0)
