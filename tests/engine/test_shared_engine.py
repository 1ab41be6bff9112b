"""Many threads on one engine: no text is lost or mixed up, no thread starves, and nothing is left behind."""

import gc
import itertools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxspec.engine.request import Update
from jaxspec.engine.shared_engine import CLOSED, Inbox, SharedEngine, Task, Turns
from jaxspec.sampling_params import SamplingParams
from tests.server.fakes import TEXT, FakeEngine


class OneThreadEngine(FakeEngine):
    """Fails if two threads are in it at once; names requests as the real engine does."""

    def __init__(self) -> None:
        super().__init__()
        self._names = (f"request-{number}" for number in itertools.count())
        self._inside = threading.Lock()

    def add(self, prompt, params, request_id=None, **options):
        with self._alone():
            return super().add(prompt, params, request_id or next(self._names), **options)

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
def shared(engine: OneThreadEngine) -> SharedEngine:
    return SharedEngine(engine)


def tasks(*lengths: int) -> list[Task]:
    return [Task([1, 2], SamplingParams(max_tokens=length)) for length in lengths]


def text(length: int) -> str:
    """Of so many bytes, without half a character."""
    return TEXT.encode()[:length].decode(errors="ignore")


def texts(shared: SharedEngine, inbox: Inbox) -> list[str]:
    parts = dict.fromkeys(inbox.request_ids, "")
    for update in shared.updates(inbox):
        parts[update.request_id] += update.text
    return list(parts.values())


def test_calls_of_many_threads_each_get_their_own_text(shared, engine):
    def work(number: int) -> None:
        for turn in range(20):
            lengths = [1 + (number * 7 + turn * 3 + each) % 30 for each in range(3)]
            assert texts(shared, shared.submit(tasks(*lengths))) == [text(length) for length in lengths]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert not engine.has_work and not shared._inboxes


def test_calls_of_one_thread_may_be_interleaved(shared, engine):
    streams = [shared.updates(shared.submit(tasks(length))) for length in (9, 5)]
    rounds = list(itertools.zip_longest(*streams))
    assert rounds[0][1] is not None and rounds[-1][1] is None
    assert ["".join(update.text for update in parts if update) for parts in zip(*rounds, strict=True)] == [text(9), text(5)]
    assert not engine.has_work


def test_a_call_that_waits_does_not_stop_the_others(shared):
    suspended = shared.updates(shared.submit(tasks(30)))
    next(suspended)
    assert texts(shared, shared.submit(tasks(12))) == [text(12)]
    assert "".join(update.text for update in suspended) == text(30)[1:]


def test_leaving_early_aborts_the_requests_of_that_call_only(shared, engine):
    left, kept = shared.submit(tasks(30, 30)), shared.submit(tasks(8))
    updates = shared.updates(left)
    next(updates)
    updates.close()
    assert sorted(engine.aborted) == sorted(left.request_ids)
    assert texts(shared, kept) == [text(8)] and not engine.has_work


def test_a_stream_that_is_collected_while_a_thread_has_the_turn_is_aborted_after_it(shared, engine):
    """A garbage collector may close it at any time, in any thread: it must not wait for the turn."""
    updates = shared.updates(shared.submit(tasks(30)))
    next(updates)
    with shared.turn():
        del updates
        gc.collect()
        assert engine.has_work
    assert not engine.has_work


def test_it_is_aborted_also_after_a_turn_that_fails(shared, engine):
    updates = shared.updates(shared.submit(tasks(30)))
    next(updates)
    with pytest.raises(ValueError), shared.turn():
        del updates
        gc.collect()
        raise ValueError
    assert not engine.has_work


def test_two_threads_may_close(shared):
    found: list[bool] = []
    with shared.turn():
        threads = [threading.Thread(target=lambda: found.append(shared.close())) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.05)  # both wait for the turn
    for thread in threads:
        thread.join()
    assert sorted(found) == [False, True]


def test_a_refused_task_leaves_nothing_queued_and_is_named(shared, engine):
    with pytest.raises(ValueError, match="prompt 1: prompt holds token id 999"):
        shared.submit([Task([1], SamplingParams()), Task([999], SamplingParams(), "prompt 1: ")])
    assert not engine.has_work and engine.aborted


def test_a_request_that_the_engine_loses_is_an_error(shared, engine):
    inbox = shared.submit(tasks(5))
    engine._requests.clear()
    with pytest.raises(RuntimeError, match="the engine lost 1 requests"):
        texts(shared, inbox)


def test_an_engine_that_crashes_tells_every_caller(shared, engine):
    engine.crash = MemoryError("no memory")
    for inbox in [shared.submit(tasks(5)), shared.submit(tasks(5))]:
        with pytest.raises(MemoryError):
            texts(shared, inbox)
    engine.crash = None
    assert texts(shared, shared.submit(tasks(5))) == [text(5)]


def test_after_closing_every_call_is_refused(shared, engine):
    waiting = shared.updates(shared.submit(tasks(30)))
    next(waiting)
    assert shared.close() and not shared.close()
    assert engine.aborted and not engine.has_work
    with pytest.raises(RuntimeError, match=CLOSED):
        shared.submit(tasks(1))
    with pytest.raises(RuntimeError, match=CLOSED):
        list(waiting)


def test_a_forked_process_is_told(shared, monkeypatch):
    with monkeypatch.context() as patch:  # forking for real makes JAX warn, as it has threads
        patch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(RuntimeError, match="can't be used in a forked one"):
            shared.submit(tasks(1))
    assert texts(shared, shared.submit(tasks(3))) == [text(3)]


def test_turns_come_in_the_order_in_which_they_were_asked_for():
    turns, order, threads = Turns(), [], []

    def work(number: int) -> None:
        with turns.turn():
            order.append(number)

    with turns.turn():
        for number in range(5):
            threads.append(threading.Thread(target=work, args=[number]))
            threads[-1].start()
            while len(turns._line) < number + 2:
                time.sleep(0.001)
        assert not turns.try_turn(lambda: order.append(-1))
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4]
    assert turns.try_turn(lambda: order.append(5)) and order[-1] == 5
