"""Sending requests at their times, whether or not the server keeps up, and watching whether this client does."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from .answers import Answer, Request
from .client import Client

WATCH_SECONDS = 0.02


@dataclass
class Run:
    """What one load brought. Seconds."""

    answers: list[Answer] = field(default_factory=list)
    """In the order of the requests."""
    worst_lateness: float = 0.0
    """Of a request, behind its schedule, because this client had no time for it."""
    worst_wait: float = 0.0
    """Of a request that was due, for others to end, because of max_concurrency. It is no part of any latency."""
    worst_pause: float = 0.0
    """For which this client looked at nothing that arrived: so much too long a time can be."""

    @property
    def duration(self) -> float:
        """From the first request to the last answer."""
        return max(answer.ended for answer in self.answers) - min(answer.sent for answer in self.answers)

    @property
    def peak_concurrency(self) -> int:
        """Most requests that were under way at once."""
        steps = sorted([(answer.ended, -1) for answer in self.answers] + [(answer.sent, 1) for answer in self.answers])
        most = now = 0
        for _, step in steps:
            now += step
            most = max(most, now)
        return most


async def run(
    client: Client,
    requests: Sequence[Request],
    times: Sequence[float],
    max_concurrency: int | None,
    on_answer: Callable[[Answer], None],
) -> Run:
    """Sends every request when it is due, seconds after the start; at most `max_concurrency` are under way."""
    outcome = Run()
    slots = asyncio.Semaphore(max_concurrency or len(requests))
    started = perf_counter()

    async def send(request: Request, due: float) -> Answer:
        await asyncio.sleep(started + due - perf_counter())
        woken = perf_counter()
        outcome.worst_lateness = max(outcome.worst_lateness, woken - started - due)
        async with slots:
            outcome.worst_wait = max(outcome.worst_wait, perf_counter() - woken)
            answer = await client.complete(request)
        on_answer(answer)
        return answer

    async with watching(outcome):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(send(request, due)) for request, due in zip(requests, times, strict=True)]
        outcome.answers = [task.result() for task in tasks]
    return outcome


@contextlib.asynccontextmanager
async def watching(outcome: Run) -> AsyncIterator[None]:
    """Notes for how long the event loop stands still at most."""

    async def watch() -> None:
        while True:
            before = perf_counter()
            await asyncio.sleep(WATCH_SECONDS)
            outcome.worst_pause = max(outcome.worst_pause, perf_counter() - before - WATCH_SECONDS)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
