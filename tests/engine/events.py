"""Random events that happen to engines: no page is lost, and every request ends once. python -m tests.engine.events --count 100000.

An engine lives for some hundreds of events, drawn with its storage, source of drafts, batch, pages and loop as in sources.py.
Requests come, with grammars, tools, penalties and deadlines; some are wrong and refused. They are aborted, waiting or running;
prefix caches are cleared, devices fail, and clients disconnect or fail on what they are given. After each event the pages are
counted; in the end some of the texts are compared with plain decoding. A life adds a line to events.jsonl; lives that are there are
not lived again.
"""

import argparse
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxspec.engine.driver import EngineThread, Ticket
from jaxspec.engine.engine import Engine
from jaxspec.engine.program_cache import enable_compilation_cache
from jaxspec.engine.request import EngineError, GenerationRequest, Request, Update
from jaxspec.engine.scheduler import QueueFull
from jaxspec.sampling_params import SamplingParams
from jaxspec.tree_shape import TreeShape
from tests.engine.records import record, recorded
from tests.engine.sources import SOURCES, TOKENS, Case, Setting, engine_of, random_case, random_prompt, run

RECORD = Path(__file__).with_name("events.jsonl")
LIFE = 1000
"""Events of an engine."""
FAILING = ("read", *(f"launch_{each}" for each in ["cycle", "prefill", "admission", "proposal", "catch_up", "lend", "mask"]))
"""Methods of a runner that may fail."""
REFUSED: tuple[dict[str, Any], ...] = (
    {"regex": "(("},
    {"grammar": "root ::= nowhere"},
    {"json_schema": {"not": {}}},
    {"structural_tag": {"format": {"type": "tag"}}},
    {"bad_token_ids": (10**6,)},
    {"max_tokens": 10**4},
)
"""Parameters of requests that can't be served."""


class Boom(RuntimeError):
    """What a device, or a client's function, may raise."""


class Life:
    """One engine, and what happens to it."""

    def __init__(self, seed: int, number: int, source: str | None = None):
        self.rng = random.Random(f"events {seed} {number}")
        setting = Setting.random(self.rng, source or list(SOURCES)[number % len(SOURCES)], placement="one device")
        self.setting = replace(setting, options={**setting.options, "max_waiting_requests": self.rng.choice([None, 3])})
        self.engine = engine_of(self.setting)
        self.common = [self.rng.choice(TOKENS) for _ in range(40)]
        self.requests: dict[str, tuple[Case, Request]] = {}
        self.ended, self.counts = Counter[str](), Counter[str]()

    def happen(self) -> None:
        """One event."""
        events: tuple[Callable[[], None], ...] = (self.step, self.add, self.add_wrong, self.abort, self.flush, self.fail)
        event = self.rng.choices(events, [62, 20, 4, 10, 3, 1])[0]
        event()
        self.counts[event.__name__] += 1
        self.check()

    def step(self) -> None:
        for update in self.engine.step():
            self.ended[update.request_id] += update.output is not None

    def add(self) -> None:
        case = random_case(self.rng, random_prompt(self.rng, self.common), None)
        timeout = self.rng.choice([None] * 9 + [1e-6])
        try:
            request = self.engine.add(replace(case.asked, timeout=timeout))
        except QueueFull:
            self.counts["queue full"] += 1
        else:
            self.requests[request.id] = case, request

    def add_wrong(self) -> None:
        wrong = self.rng.choice(REFUSED)
        asked = GenerationRequest((1, 2), SamplingParams(**{"max_tokens": 4, **wrong}))
        if self.rng.random() < 0.2:
            asked = replace(asked, params=SamplingParams(), tree=TreeShape(6, 1, 7))
        try:
            self.engine.add(asked)
        except ValueError:
            return
        raise AssertionError(f"{asked} was not refused")

    def abort(self) -> None:
        """Of a request that may wait, run, or have ended; or of none."""
        request_id = self.rng.choice([*self.requests, "nobody"])
        update = self.engine.abort(request_id)
        self.ended[request_id] += update is not None

    def flush(self) -> None:
        self.engine.flush_cache()

    def fail(self) -> None:
        """The next call of a method fails after it has consumed the state."""
        runner, name = self.engine.runner, self.rng.choice(FAILING)
        original = getattr(runner, name)

        def failing(*_arguments: Any) -> None:
            setattr(runner, name, original)
            for array in runner.state.sequences:
                array.delete()
            raise Boom(name)

        if name not in vars(runner):
            setattr(runner, name, failing)

    def check(self) -> None:
        """No page is lost, no request is forgotten, and none has ended twice."""
        scheduler = self.engine.scheduler
        self.engine.prefix_cache.check([request.held for request in scheduler.admitted])
        unfinished = {request.id for request in scheduler.unfinished}
        for name, (_, request) in list(self.requests.items()):
            assert (name in unfinished) == (request.finish_reason is None), name
        assert not [name for name, times in self.ended.items() if times > 1 and name != "nobody"]

    def end(self) -> None:
        """Everything that is left ends, and has told so; then all pages are free."""
        for name in FAILING:
            vars(self.engine.runner).pop(name, None)
        for _ in range(20_000):
            if not self.engine.has_work:
                break
            self.step()
            self.check()
        assert not self.engine.has_work, "the engine does not come to an end"
        assert {name: self.ended[name] for name in self.requests} == dict.fromkeys(self.requests, 1)
        self.engine.flush_cache()
        assert self.engine.pages.free == self.engine.pages.num_pages
        for _, request in self.requests.values():
            assert request.finish_reason is not None
            self.counts[f"ended: {request.finish_reason}"] += 1
        self.compare()

    def compare(self) -> None:
        """Requests that went to their end said what they say alone, whatever happened around them."""
        complete = [(case, each) for case, each in self.requests.values() if each.finish_reason in ("stop", "length")]
        chosen = self.rng.sample(complete, min(12, len(complete)))
        plain = self.setting.plain_engine()
        for (case, request), served in zip(chosen, run(plain, [case._replace(at_once=1) for case, _ in chosen]), strict=True):
            output = request.result()
            assert served.said[:5] == (output.token_ids, output.text, output.finish_reason, output.matched_stop, output.error), case
            self.counts["compared"] += 1

    def be_served(self, clients: int) -> None:
        """The same engine in a thread of its own, with clients that listen, disconnect or fail on what they are given."""
        thread, tickets, listening = EngineThread(self.engine), list[Ticket](), list[Listener]()
        for _ in range(clients):
            case = random_case(self.rng, random_prompt(self.rng, self.common), None)
            listener = Listener(self.rng.choice([None, None, None, self.rng.randint(0, 3)]))
            ticket = thread.submit([case.asked], listener)
            try:
                ticket.admitted.result(60)
            except QueueFull:
                continue
            tickets.append(ticket)
            listening.append(listener)
            if self.rng.random() < 0.1:
                thread.call(Engine.flush_cache)
            if self.rng.random() < 0.3:
                place = self.rng.randrange(len(tickets))
                thread.drop(tickets[place])
                listening[place].has_left = True
        for listener in listening:
            assert listener.has_left or listener.fails_after is not None or listener.over.wait(300), "a request without its end"
        assert thread.is_healthy
        thread.call(lambda engine: engine.prefix_cache.check([each.held for each in engine.scheduler.admitted])).result(60)
        thread.close()
        assert not self.engine.has_work and self.engine.prefix_cache.held_pages == 0
        self.counts["clients"] += len(tickets)
        self.counts["deliveries"] += sum(each.taken for each in listening)
        self.counts["disconnects"] += sum(each.has_left for each in listening)
        self.counts["failing clients"] += sum(each.has_failed for each in listening)


class Listener:
    """What a client does with what it is given."""

    def __init__(self, fails_after: int | None):
        self.fails_after, self.taken, self.has_left, self.has_failed, self.over = fails_after, 0, False, False, threading.Event()

    def __call__(self, item: Update | EngineError) -> None:
        assert not self.over.is_set(), "something after the end"
        self.taken += 1
        if self.fails_after is not None and self.taken > self.fails_after:
            self.has_failed = True
            raise Boom("a client")
        if isinstance(item, EngineError) or item.output is not None:
            self.over.set()


def live(number: int, seed: int, events: int, source: str | None = None) -> Life:
    """A whole life."""
    life = Life(seed, number, source)
    for _ in range(events):
        life.happen()
    life.end()
    life.be_served(events // 20)
    return life


def recorded_life(number: int, seed: int) -> dict[str, Any]:
    """Lives, says what has happened, and records it."""
    started = time.perf_counter()
    life = live(number, seed, LIFE)
    seconds = round(time.perf_counter() - started)
    print(f"{number}: {seconds} s, {dict(life.counts)}, {life.setting}", flush=True)
    setting = repr(life.setting)
    return record(RECORD, seed=seed, life=number, events=LIFE, setting=setting, seconds=seconds, counts=life.counts)


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.engine.events", description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.disable(logging.ERROR)  # devices and clients fail on purpose
    enable_compilation_cache()
    before = {line["life"]: line for line in recorded(RECORD) if line["seed"] == options.seed}
    counts = Counter[str]()
    for number in range(-(-options.count // LIFE)):
        line = before.get(number) or recorded_life(number, options.seed)
        counts += Counter(line["counts"]) + Counter(events=line["events"], engines=1)
    print(f"{dict(counts)}: no page was lost, and every request has ended once")


if __name__ == "__main__":
    main()
