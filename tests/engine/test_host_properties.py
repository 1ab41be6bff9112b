"""Random lives of many requests against a simulated device that remembers which tokens every slot of its cache stands for."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from jaxspec.engine.pages import HeldPages, PageAllocator, PrefixCache
from jaxspec.engine.request import GenerationRequest, Request, Status
from jaxspec.engine.scheduler import PrefillChunk, QueueFull, Scheduler, StepPlan
from jaxspec.sampling_params import SamplingParams
from jaxspec.text.detokenizer import Detokenizer
from tests.sets import exhaustive

TREE = "tree"
LONGEST_PROMPT, LONGEST = 32, 64
"""Tokens of the longest request, without and with its output."""


def fingerprints(tokens: list[int]) -> list[int]:
    """Of every prefix: what a slot of the cache depends on."""
    values, value = [], 17
    for token in tokens:
        value = (value * 1_000_003 + token + 1) % (2**61 - 1)
        values.append(value)
    return values


def next_token(tokens: list[int]) -> int:
    return fingerprints(tokens)[-1] // 7 % 3


def device_stops(tokens: list[int]) -> bool:
    """As after a stop token, which the device knows."""
    return fingerprints(tokens)[-1] % 97 == 0


def host_stops(tokens: list[int]) -> bool:
    """As after a stop string: the device goes on until the host has read it."""
    return fingerprints(tokens)[-1] % 89 == 0


def uninterrupted(request: Request) -> list[int]:
    tokens = list(request.prompt)
    while True:
        tokens.append(next_token(tokens))
        if len(tokens) == request.most_tokens or device_stops(tokens) or host_stops(tokens):
            return tokens


class Row:
    """What the device knows of a sequence."""

    def __init__(self, request: Request):
        self.request, self.tokens, self.is_done, self.prefilled = request, list(request.tokens), False, 0

    def emit(self, most: int) -> list[int]:
        """1 to `most` tokens; none once the sequence is done."""
        new: list[int] = []
        wanted = 1 + fingerprints(self.tokens)[-1] // 1000 % most
        while len(new) < wanted and not self.is_done:
            self.tokens.append(next_token(self.tokens))
            new.append(self.tokens[-1])
            self.is_done = len(self.tokens) == self.request.most_tokens or device_stops(self.tokens)
        return new


class RecordingCache(PrefixCache):
    """Lists in `events`, in order, who got which own pages and who published which."""

    def __init__(self, pages: PageAllocator, enabled: bool):
        super().__init__(pages, enabled)
        self.events: list[tuple[str, HeldPages, list[int]]] = []

    def grow(self, held: HeldPages, slots: int) -> bool:
        before, free, available = list(held.pages), self.pages.free, self.available
        grown = super().grow(held, slots)
        assert held.pages[: len(before)] == before and (grown or (len(held.pages), self.available) == (len(before), available))
        assert self.pages.free == (max(0, free - len(held.pages) + len(before)) if grown else free), "evicted in vain"
        self.events.append(("grow", held, held.pages[len(before) :]))
        return grown

    def publish(self, held: HeldPages, tokens: list[int], committed: int) -> None:
        super().publish(held, tokens, committed)
        self.events.append(("publish", held, [node.page for node in held.nodes]))


class Lives(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        extra=st.integers(0, 6),
        chunk=st.sampled_from([1, 3, 16, 40, 64]),
        rows=st.integers(1, 6),
        tokens_per_cycle=st.integers(1, 5),
        enabled=st.sampled_from([True, True, True, False]),
        most_waiting=st.sampled_from([None, 3]),
        cycle_first=st.booleans(),
    )
    def begin(self, page_size, extra, chunk, rows, tokens_per_cycle, enabled, most_waiting, cycle_first):
        self.pages = PageAllocator(-(-LONGEST * (8 + extra) // 8 // page_size), page_size)  # 1 to 1.75 of the largest request
        self.cache = RecordingCache(self.pages, enabled)
        self.scheduler = Scheduler(self.cache, rows, chunk, most_waiting)
        self.page_size, self.chunk, self.tokens_per_cycle, self.cycle_first = page_size, chunk, tokens_per_cycle, cycle_first
        self.most_waiting, self.most_rows, self.number = most_waiting, rows, 0
        self.unfinished: list[Request] = []
        self.ended: list[Request] = []
        self.were_admitted: set[Request] = set()
        self.rows: dict[int, Row] = {}
        self.unread: list[list[tuple[Request, int, list[int]]]] = []  # per step: request, tokens at most, tokens
        self.content: list[int | None] = [None] * (self.pages.num_pages * page_size)
        self.owner: dict[int, HeldPages | str] = {}  # the last one of each page
        self.flushed_pages: set[int] = set()  # not given to anyone since

    # What users and the engine do at any moment

    @rule(
        common=st.integers(0, 24),
        letter=st.integers(0, 1),
        own=st.lists(st.integers(0, 2), min_size=1, max_size=8),
        max_tokens=st.integers(1, 32),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        copies=st.integers(1, 4),
    )
    def add(self, common, letter, own, max_tokens, priority, prompt_logprobs, copies):
        for _ in range(copies):
            self.add_request([letter] * common + own, max_tokens, priority, prompt_logprobs)

    @precondition(lambda self: self.ended)
    @rule(own=st.lists(st.integers(0, 2), min_size=1, max_size=8), max_tokens=st.integers(1, 32))
    def go_on_with_a_conversation(self, own, max_tokens):
        """At once, before its pages are evicted."""
        prompt = [*self.ended[-1].tokens, *own][:LONGEST_PROMPT]
        self.add_request(prompt, max_tokens, priority=max((request.asked.priority for request in self.unfinished), default=0) + 1)

    def add_request(self, prompt: list[int], max_tokens: int, priority: int = 0, prompt_logprobs: int | None = None):
        self.number += 1
        params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
        asked = GenerationRequest(prompt, params, priority)
        request = Request(str(self.number), asked, 0, (), Detokenizer(None), arrival=self.number)
        queued = sum(each not in self.were_admitted for each in self.scheduler.waiting)
        free_rows = self.most_rows - len(self.scheduler.admitted)
        if self.most_waiting is not None and queued - free_rows >= self.most_waiting:
            with pytest.raises(QueueFull, match="wait already and max_waiting_requests is 3: try again later"):
                self.scheduler.add(request)
        else:
            self.scheduler.add(request)
            self.unfinished.append(request)

    @precondition(lambda self: self.unfinished)
    @rule(choice=st.integers(0, 1000))
    def abort(self, choice):
        self.end(self.unfinished[choice % len(self.unfinished)])

    @precondition(lambda self: self.scheduler.admitted)
    @rule(choice=st.integers(0, 1000))
    def preempt(self, choice):
        self.scheduler.preempt(self.scheduler.admitted[choice % len(self.scheduler.admitted)])

    @rule()
    def flush(self):
        self.cache.flush()
        self.flushed_pages = set(range(self.pages.num_pages))

    @rule()
    def lose_device_state(self):
        self.scheduler.lose_device_state()
        assert not self.scheduler.admitted
        self.flushed_pages = set(range(self.pages.num_pages))
        self.content = [None] * len(self.content)
        self.unread.clear()
        for request in self.unfinished:
            request.in_flight = request.in_flight_tokens = 0

    @rule(steps=st.integers(1, 6))
    def run(self, steps):
        for _ in range(steps):
            self.step()

    @rule()
    def read_all(self):
        while self.unread:
            self.read(self.unread.pop(0))

    # One step of the engine

    def step(self):
        waiting, admitted = list(self.scheduler.waiting), list(self.scheduler.admitted)
        self.cache.events.clear()
        plan = self.scheduler.plan(self.tokens_per_cycle)
        self.check_plan(plan, waiting, [request for request in admitted if request.status is Status.WAITING])
        self.were_admitted |= set(plan.newly_admitted)
        self.unread.append([])
        self.launch(plan)
        if len(self.unread) > 1:
            self.read(self.unread.pop(0))

    def check_plan(self, plan: StepPlan, waiting: list[Request], preempted: list[Request]):
        steps = [step.request for step in plan.prefills]
        assert len(set(steps)) == len(steps) and set(plan.newly_admitted) <= set(steps)
        assert not set(steps) & set(plan.cycle) and not (preempted and plan.newly_admitted)
        assert sum(step.size for step in plan.prefills) <= self.chunk and all(step.size > 0 for step in plan.prefills)
        for step in plan.prefills:
            assert step.is_last or step.size >= min(16, max(1, self.chunk // 2)), "a chunk too small to be worth it"
        assert plan.newly_admitted == waiting[: len(plan.newly_admitted)], "someone was overtaken"
        assert all(request.in_flight == 0 and request.row >= 0 for request in plan.newly_admitted)
        for request in preempted:
            assert request not in plan.cycle
            assert all(importance(other) < importance(request) for other in self.scheduler.admitted)

    def launch(self, plan: StepPlan):
        """Launches everything at the moment of the plan when the scheduler handed out its pages."""
        steps, cycle_is_launched = list(plan.prefills), False
        prefilling = [step.request.held for step in plan.prefills]
        for kind, held, pages in self.cache.events:
            if self.cycle_first and not cycle_is_launched and held in prefilling:
                self.launch_cycle(plan.cycle)
                cycle_is_launched = True
            if kind == "grow":
                self.flushed_pages -= set(pages)
                self.owner |= dict.fromkeys(pages, held)
            else:
                if held in prefilling:
                    step = steps.pop(0)
                    self.launch_prefill(step, held, is_first=step.request in plan.newly_admitted)
                self.owner |= dict.fromkeys(pages, TREE)
        assert not steps
        if not cycle_is_launched:
            self.launch_cycle(plan.cycle)

    def launch_prefill(self, step: PrefillChunk, held: HeldPages, is_first: bool):
        request, end = step.request, step.first_slot + step.size
        assert request.held is held
        if is_first:
            self.rows[request.row] = Row(request)
            assert not self.flushed_pages & set(step.pages[: step.cached // self.page_size]), "found what was flushed"
        row = self.rows[request.row]
        assert row.request is request
        if step.cached == step.first_slot:
            assert step.first_slot == row.prefilled, "the feature before this chunk is not known"
        else:
            assert step.cached == step.first_slot + 1 and step.cached % self.page_size == 0
            assert request.params.prompt_logprobs is None
        self.expect(step.pages, row.tokens[: step.cached])
        self.write(held, step.pages, row.tokens[:end], step.cached)
        row.prefilled = end
        assert step.is_last == (end == len(row.tokens))
        if step.is_last:
            self.emit(request, row, 1)

    def launch_cycle(self, requests: list[Request]):
        for request in requests:
            row, pages = self.rows[request.row], request.held.pages
            assert row.request is request and row.prefilled <= len(row.tokens) - 1
            slots = min(len(request.tokens) + request.in_flight_tokens + self.tokens_per_cycle, request.most_tokens)
            assert self.pages.pages_for(slots) <= len(pages) <= self.pages.pages_for(request.most_tokens), "pages for this cycle"
            assert len(request.tokens) + request.in_flight < request.most_tokens, "a cycle that can't emit"
            root = len(row.tokens) - 1
            self.expect(pages, row.tokens[:root])
            self.emit(request, row, self.tokens_per_cycle)
            self.write(request.held, pages, row.tokens[:-1], root)

    def emit(self, request: Request, row: Row, most: int):
        request.in_flight += 1
        request.in_flight_tokens += most
        self.unread[-1].append((request, most, row.emit(most)))

    def slot(self, pages: list[int], index: int) -> int:
        return pages[index // self.page_size] * self.page_size + index % self.page_size

    def expect(self, pages: list[int], tokens: list[int]):
        found = [self.content[self.slot(pages, index)] for index in range(len(tokens))]
        assert found == fingerprints(tokens), "reads slots that are not its own prefix"

    def write(self, held: HeldPages, pages: list[int], tokens: list[int], first: int):
        for index, value in list(enumerate(fingerprints(tokens)))[first:]:
            assert self.owner[pages[index // self.page_size]] is held, "writes to a page that is not its own"
            self.content[self.slot(pages, index)] = value

    def read(self, results: list[tuple[Request, int, list[int]]]):
        for request, most, new in results:
            request.in_flight -= 1
            request.in_flight_tokens -= most
            for token in new:
                if request.status is not Status.FINISHED:
                    request.tokens.append(token)
                    tokens = request.tokens
                    if len(tokens) == request.most_tokens or device_stops(tokens) or host_stops(tokens):
                        assert tokens == uninterrupted(request)
                        self.end(request)

    def end(self, request: Request):
        self.scheduler.finish(request)
        self.unfinished.remove(request)
        self.ended.append(request)
        assert request.status is Status.FINISHED and not request.held.pages and self.scheduler.find(request.id) is None

    # What always holds

    @invariant()
    def everything_is_accounted_for(self):
        waiting, admitted = self.scheduler.waiting, self.scheduler.admitted
        self.cache.check([request.held for request in admitted])
        assert set(waiting) | set(admitted) == set(self.unfinished) and len(waiting) + len(admitted) == len(self.unfinished)
        assert waiting == sorted(waiting, key=importance) and admitted == sorted(admitted, key=importance)
        assert all(request.status is Status.WAITING and not request.held.pages for request in waiting)
        rows = {request.row for request in admitted}
        assert len(rows) == len(admitted) and rows <= set(range(self.most_rows))
        counts = self.scheduler.counts
        assert counts.prefix_hit_tokens <= counts.prefix_queried_tokens
        assert self.cache.held_pages == len({page for request in admitted for page in request.held.pages})

    def teardown(self):
        most = 50 + 20 * sum(request.most_tokens for request in self.unfinished)
        for _ in range(most):
            if not self.unfinished:
                break
            self.step()
            self.everything_is_accounted_for()
        assert not self.unfinished, f"not done after {most} steps"
        self.cache.check([])
        self.cache.flush()
        assert self.pages.free == self.pages.num_pages


def importance(request: Request) -> tuple[int, int]:
    return -request.asked.priority, request.arrival


@pytest.mark.parametrize("examples", [60, exhaustive(600)])
def test_requests_survive_everything(examples):
    chosen = settings(max_examples=examples, stateful_step_count=50, deadline=None, derandomize=True)
    run_state_machine_as_test(Lives, settings=chosen)
