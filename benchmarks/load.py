"""Keeping an engine busy and looking at the clock: a workload with so many requests in flight, several ways to run it side by side,
and a long prompt in between."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.engines import BenchmarkError
from jaxspec import SamplingParams, SpecConfig
from jaxspec.commands.workbench import mean
from jaxspec.engine.engine import Engine
from jaxspec.engine.stats import EngineStats


@dataclass
class Load:
    """A workload, run once with a number of requests in flight at any time."""

    seconds: float = 0.0
    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By number of the prompt."""
    first_token: dict[int, float] = field(default_factory=dict)
    """Seconds from the moment it was sent, by number of the prompt."""
    updates: dict[int, list[float]] = field(default_factory=dict)
    """When its updates came, by number of the prompt."""
    accept_lengths: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Of every verification, by number of the prompt."""
    host_ms: float = 0.0
    """The host's share of a cycle, in milliseconds."""
    launch_ms: float = 0.0
    """What handing a cycle's programs to the device took, in milliseconds."""
    wait_ms: float = 0.0
    """For how long the host waited for the device, in milliseconds per cycle."""
    cycles: int = 0
    """Cycles, one per batch."""

    @property
    def verifications(self) -> list[int]:
        """Tokens of every verification of every request."""
        return [length for each in self.accept_lengths.values() for length in each]

    @property
    def accept_length(self) -> float:
        """Mean tokens per verification, bonus included."""
        return mean(self.verifications)

    def count_equal(self, other: "Load") -> int:
        """Prompts whose tokens are the same in both."""
        return sum(self.tokens[number] == tokens for number, tokens in other.tokens.items())

    @property
    def decode_tokens_per_second(self) -> float:
        """Of one request, without its prefill: what one user sees."""
        seconds = sum(updates[-1] - updates[0] for updates in self.updates.values())
        return sum(len(tokens) - 1 for tokens in self.tokens.values()) / seconds

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens.values())) / self.seconds


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    concurrency: int,
    tree: SpecConfig | None = None,
) -> Load:
    """Keeps `concurrency` requests in the engine until every prompt is done. `tree`: of their cycles (Engine.add)."""
    load, before, started = Load(), engine.stats(), time.perf_counter()
    waiting = list(reversed(range(len(prompts))))
    numbers: dict[str, int] = {}
    sent: dict[int, float] = {}
    while waiting or engine.has_work:
        while waiting and len(numbers) < concurrency:
            number = waiting.pop()
            numbers[engine.add(prompts[number], params[number], tree=tree).id] = number
            sent[number] = time.perf_counter()
        for update in engine.step():
            now, number = time.perf_counter(), numbers[update.request_id]
            load.first_token.setdefault(number, now - sent[number])
            load.updates.setdefault(number, []).append(now)
            if update.output:
                if update.output.error:
                    raise BenchmarkError(update.output.error)
                load.tokens[number] = update.output.token_ids
                load.accept_lengths[number] = update.output.speculation.accept_lengths
                del numbers[update.request_id]
    load.seconds = time.perf_counter() - started
    load.host_ms, load.launch_ms, load.wait_ms = per_cycle(before, after := engine.stats())
    load.cycles = after.cycles - before.cycles
    return load


def per_cycle(before: EngineStats, after: EngineStats) -> tuple[float, float, float]:
    """Milliseconds per cycle that the host took, that launching took, and that waiting for the device took."""
    cycles = max(1, after.cycles - before.cycles)
    host, launching = after.host_seconds - before.host_seconds, after.launching_seconds - before.launching_seconds
    waiting = after.waiting_seconds - before.waiting_seconds
    return 1e3 * host / cycles, 1e3 * launching / cycles, 1e3 * waiting / cycles


def interrupt(engine: Engine, stream: Sequence[int], long: Sequence[int], short: Sequence[int]) -> dict[str, float]:
    """Seconds: first tokens of the long and the short prompt, and the running stream's usual and longest gap between updates."""
    alone = time_to_first(engine, short)
    running = engine.add(stream, SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True))
    for _ in range(10):
        engine.step()
    gaps, last = [], time.perf_counter()
    few = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    sent = {engine.add(long, few).id: "long", engine.add(short, few).id: "short"}
    started, first = last, dict[str, float]()
    while len(first) < 2:
        for update in engine.step():
            now = time.perf_counter()
            if update.request_id == running.id:
                gaps.append(now - last)
                last = now
            else:
                first.setdefault(sent[update.request_id], now - started)
    engine.abort(running.id)
    while engine.has_work:
        engine.step()
    return {
        "short_alone_ms": alone, "short_ms": first["short"], "long_ms": first["long"], "longest_gap_ms": max(gaps, default=0.0),
    }  # fmt: skip


def time_to_first(engine: Engine, prompt: Sequence[int]) -> float:
    """Seconds to the first token of a prompt that has the engine for itself."""
    started = time.perf_counter()
    request = engine.add(prompt, SamplingParams(max_tokens=1, temperature=0.0))
    while not request.output:
        engine.step()
    seconds = time.perf_counter() - started
    while engine.has_work:
        engine.step()
    return seconds


# Comparing


def parts_of(requests: int, batch: int) -> list[range]:
    """Numbers of requests that run in one go, part after part: one request at batch 1, else two for every row.

    In: 3, 1  Out: 0..0, 1..1, 2..2    In: 9, 4  Out: 0..7, 8..15 (there are whole parts only, and two at least)
    """
    size = 1 if batch == 1 else 2 * batch
    return [range(first, first + size) for first in range(0, max(requests, size + 1), size)]


def side_by_side[Way](
    ways: Sequence[Way], parts: Sequence[range], run_part: Callable[[Way, range], Load], number: int
) -> list[Load]:
    """Every way over all parts: part by part, in turned order every other time, so that a machine that changes its speed does it
    to all alike. `number` is that of the round. One load per way."""
    loads: list[list[Load]] = [[] for _ in ways]
    for index, part in enumerate(parts):
        order = range(len(ways)) if (index + number) % 2 == 0 else reversed(range(len(ways)))
        for way in order:
            loads[way].append(run_part(ways[way], part))
    return [merged(each) for each in loads]


def merged(loads: Sequence[Load]) -> Load:
    """Loads that ran one after the other as one: requests are numbered on, times per cycle are means."""
    whole, first = Load(), 0
    for load in loads:
        whole.seconds += load.seconds
        for name in ("tokens", "first_token", "updates", "accept_lengths"):
            vars(whole)[name].update({first + number: value for number, value in vars(load)[name].items()})
        for name in ("host_ms", "launch_ms", "wait_ms"):
            vars(whole)[name] += vars(load)[name] * load.cycles
        whole.cycles += load.cycles
        first += len(load.tokens)
    for name in ("host_ms", "launch_ms", "wait_ms"):
        vars(whole)[name] /= max(1, whole.cycles)
    return whole
