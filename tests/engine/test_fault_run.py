"""Three hundred requests at once, with everything that can happen to them, on a quarter of the cache they would like to have."""

import asyncio
import logging
import random
from collections import Counter
from dataclasses import dataclass

import pytest

from jaxspec.engine.driver import EngineThread
from jaxspec.engine.engine import Engine
from jaxspec.engine.generation import Generation
from jaxspec.engine.request import EngineError, GenerationRequest, Update
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import tiny_engine
from jaxspec.tree_shape import TreeShape
from tests.engine.served import served, updates_of
from tests.sets import exhaustive

RUNNING, PAGE = 6, 4
LONGEST = 120
"""Prompt and output of the longest request."""
PAGES = RUNNING * LONGEST // PAGE // 4


@dataclass(frozen=True)
class Client:
    """One request, and how its client behaves."""

    prompt: list[int]
    params: SamplingParams
    behaviour: str
    """"patient", "leaves" (hangs up after some updates), "is cancelled" (its task is), or "times out"."""
    after: int
    """Updates until it leaves."""
    delay: float


def clients(count: int, seed: int) -> list[Client]:
    rng = random.Random(seed)
    shared = [[rng.randrange(128) for _ in range(60)] for _ in range(4)]
    kinds = [{"temperature": 0.0}] * 4 + [
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 0.0, "frequency_penalty": 1.0},
        {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 2},
        {"temperature": 0.0, "stop_token_ids": list(range(0, 128, 12))},
        {"temperature": 0.7, "prompt_logprobs": 1},
    ]
    found = []
    for index in range(count):
        prompt = rng.choice(shared)[: rng.randrange(0, 60)] + [rng.randrange(128) for _ in range(rng.randrange(1, 20))]
        budget = rng.randrange(1, 1 + min(40, LONGEST - len(prompt)))
        params = SamplingParams(max_tokens=budget, seed=index, **rng.choice(kinds))
        behaviour = rng.choices(["patient", "leaves", "is cancelled", "times out"], [7, 1, 1, 1])[0]
        found.append(Client(prompt, params, behaviour, rng.randrange(0, 5), rng.random() * 0.5))
    return found


async def serve(engine: EngineThread, client: Client, index: int) -> list[Update]:
    """What the client gets until it ends or leaves."""
    await asyncio.sleep(client.delay)
    timeout = 0.05 if client.behaviour == "times out" else None
    updates: list[Update] = []
    request = GenerationRequest(tuple(client.prompt), client.params, timeout=timeout)
    with await Generation.start(engine, [request], [f"client-{index}"]) as generation:
        async for update in generation:
            updates.append(update)
            if client.behaviour == "leaves" and len(updates) > client.after:
                break
    return updates


async def run_all(engine: EngineThread, everyone: list[Client]) -> list[list[Update] | BaseException]:
    tasks = [asyncio.create_task(serve(engine, client, index)) for index, client in enumerate(everyone)]
    for task, client in zip(tasks, everyone, strict=True):
        if client.behaviour == "is cancelled":
            asyncio.get_running_loop().call_later(client.delay + client.after * 0.02, task.cancel)
    return await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    ("count", "overlap", "failures"),
    [(100, True, 2), exhaustive(300, True, 0), exhaustive(300, True, 2), exhaustive(300, False, 0)],
)
def test_every_request_ends_once_and_says_what_it_would_have_said_alone(monkeypatch, caplog, count, overlap, failures):
    caplog.set_level(logging.CRITICAL, "jaxspec")
    everyone = clients(count, seed=failures + overlap)
    engine = tiny_engine(
        TreeShape(3, 2, 5), max_running_requests=RUNNING, num_pages=PAGES, page_size=PAGE, context_length=LONGEST, overlap=overlap
    )
    finished = count_endings(engine, monkeypatch)
    break_sometimes(engine, monkeypatch, failures)
    server = EngineThread(engine)
    try:
        results = asyncio.run(run_all(server, everyone))
        assert server.is_healthy
    finally:
        server.close()
    updates_of(engine)  # what was launched for those who left last
    assert set(finished.values()) == {1} and len(finished) >= count * 0.9, "some end before they are admitted; none ends twice"
    stats = engine.stats()
    assert stats.preemptions > 0 and stats.prefix_hit_tokens > 0 and (stats.running, stats.waiting) == (0, 0)

    alone = tiny_engine(TreeShape(num_steps=0), page_size=PAGE)
    compared = Counter()
    for client, result in zip(everyone, results, strict=True):
        (solo,) = served(alone, GenerationRequest(client.prompt, client.params))
        compared[check(client, result, tuple(solo.output))] += 1
    assert compared["complete"] > count * 0.6 and compared["partial"] > count * 0.03, compared
    assert (compared["error"] > 0) == (failures > 0), compared


def check(client: Client, result: list[Update] | BaseException, expected: tuple[int, ...]) -> str:
    """How the request ended, after comparing what it said with what it says alone."""
    if isinstance(result, EngineError):
        return "error"
    if isinstance(result, asyncio.CancelledError):
        assert client.behaviour == "is cancelled"
        return "cancelled"
    assert not isinstance(result, BaseException), result
    tokens = sum((update.token_ids for update in result), ())
    ends = [update.output for update in result if update.output]
    assert len(ends) <= 1 and expected[: len(tokens)] == tokens
    if not ends or ends[0].finish_reason == "timeout":
        assert client.behaviour in ("leaves", "times out")
        return "partial"
    assert tokens == ends[0].token_ids == expected
    if client.params.logprobs is not None:
        assert [entry.token_id for entry in ends[0].logprobs] == list(expected)
    if client.params.prompt_logprobs is not None:
        assert [entry.token_id for entry in ends[0].prompt_logprobs[1:]] == client.prompt[1:]
    return "complete"


def count_endings(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Counter:
    """How often each request left the scheduler."""
    finished, original = Counter(), engine.scheduler.finish

    def finish(request):
        finished[request.id] += 1
        original(request)

    monkeypatch.setattr(engine.scheduler, "finish", finish)
    return finished


def break_sometimes(engine: Engine, monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    """Makes the device fail a few times, far enough apart to recover."""
    original, calls = engine.runner.launch_cycle, iter(range(10**6))

    def launch_cycle(requests, spec):
        if next(calls) in [60 * (1 + number) for number in range(failures)]:
            raise RuntimeError("the device has failed")
        return original(requests, spec)

    monkeypatch.setattr(engine.runner, "launch_cycle", launch_cycle)
