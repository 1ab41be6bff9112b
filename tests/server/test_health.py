"""The probe: a working engine makes a token in time, even under load."""

import asyncio
import time
from collections.abc import Callable, Coroutine

import pytest

from jaxspec.engine.driver import EngineThread
from jaxspec.engine.generation import Generation
from jaxspec.engine.request import GenerationRequest
from jaxspec.sampling_params import SamplingParams
from jaxspec.server.errors import ApiError
from jaxspec.server.health import HealthProbe
from tests.server.fakes import FakeEngine, SlowEngine


class Standing(FakeEngine):
    """Steps, but makes nothing."""

    def step(self):
        time.sleep(0.02)
        return []


def run(fake: FakeEngine, work: Callable[[EngineThread], Coroutine]) -> float:
    """Seconds that it took."""
    engine, started = EngineThread(fake), time.monotonic()
    try:
        asyncio.run(work(engine))
        return time.monotonic() - started
    finally:
        engine.close()


def test_one_that_makes_none():
    fake = Standing()
    with pytest.raises(ApiError, match=r"within 0\.3 seconds") as error:
        run(fake, lambda engine: HealthProbe(engine, 0.3).check())
    assert error.value.status == 503
    assert not fake.running  # the probe's request is not left behind


@pytest.mark.parametrize("crash", [None, RuntimeError("x")])
def test_one_that_fails_is_known_at_once(crash: Exception | None):
    fake = FakeEngine()
    fake.failures, fake.crash = 1, crash
    started = time.monotonic()
    with pytest.raises(ApiError):
        run(fake, lambda engine: HealthProbe(engine, 10).check())
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("room", [1, 2])
def test_other_requests_tokens_count(room: int):
    """A full queue is not a failure, as long as it moves."""
    fake = SlowEngine()

    async def work(engine: EngineThread) -> None:
        with await Generation.start(engine, [GenerationRequest((1,), SamplingParams(max_tokens=500))], ["long"]):
            fake.room = room
            await HealthProbe(engine, 10).check()
            assert fake.running  # it did not wait until that one had ended

    assert run(fake, work) < 5


def test_a_full_queue_that_does_not_move():
    fake = Standing()

    async def work(engine: EngineThread) -> None:
        with await Generation.start(engine, [GenerationRequest((1,), SamplingParams(max_tokens=500))], ["long"]):
            fake.room = 1
            await HealthProbe(engine, 0.3).check()

    with pytest.raises(ApiError):
        run(fake, work)


def test_probes_share_one_request():
    fake = SlowEngine()

    async def work(engine: EngineThread) -> None:
        probe = HealthProbe(engine)
        cancelled = asyncio.ensure_future(probe.check())
        others = [asyncio.ensure_future(probe.check()) for _ in range(8)]
        await asyncio.sleep(0)
        cancelled.cancel()  # a client that hangs up does not end it for the others
        await asyncio.gather(*others)
        assert len(fake.params) == 1
        await probe.check()
        assert len(fake.params) == 2

    run(fake, work)
