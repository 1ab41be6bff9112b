"""Scheduling: which requests run in the next step. Plain Python, no JAX.

Requests are served in order of importance: larger priority first, then order of arrival. A waiting request is admitted when a
row of the device state and the pages of its prompt are free; pages for its output are added cycle by cycle. When the pages run
out, the least important admitted request is preempted: it gives up its row and pages and waits again, with its output so far as
part of its prompt. So the most important request always advances, and every request ends.

Pages change hands on the host the moment a plan is made. That is safe because the device runs programs in the order of their
launch: programs of the old holder end before the new holder's first program starts.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jaxspec.engine.pages import HeldPages, PrefixCache
from jaxspec.engine.request import Request, Status
from jaxspec.engine.stats import EngineStats

SMALLEST_CHUNK = 16
"""The smallest chunk, in tokens: below it, a program's fixed cost dominates."""


class QueueFull(RuntimeError):
    """Too many requests are waiting; try again later."""


class PrefillChunk(NamedTuple):
    """A prefill of tokens first_slot .. first_slot + size - 1 of request.tokens."""

    request: Request
    first_slot: int
    size: int
    cached: int
    """Slots below this one hold committed keys already and are not written. It is first_slot, or first_slot + 1 after a hit in the
    prefix cache: the last cached token is computed again, only for its feature."""
    is_last: bool
    pages: list[int]
    """The page table of this chunk. request.held may differ: the chunk's pages are published before it is launched, and where
    another request published the same tokens first, `held` has that request's page, which must not be written."""


class StepPlan(NamedTuple):
    """The launches of one engine step: cycles of these requests (one cycle per tree), then the prefills in this order."""

    newly_admitted: list[Request]
    """Their rows are set up before their first chunk."""
    prefills: list[PrefillChunk]
    cycle: list[Request]


class Scheduler:
    """Holds every unfinished request."""

    def __init__(
        self,
        cache: PrefixCache,
        max_running_requests: int,
        prefill_chunk: int,
        max_waiting_requests: int | None = None,
        counts: EngineStats | None = None,
    ):
        """`prefill_chunk`: prompt tokens that one plan computes at most. `counts`: where to count preemptions and prefix hits."""
        self.cache, self.prefill_chunk, self.max_waiting_requests = cache, prefill_chunk, max_waiting_requests
        self.counts = counts or EngineStats()
        self.waiting: list[Request] = []
        """Most important first, like `admitted`."""
        self.admitted: list[Request] = []
        self.held_back: list[Request] = []
        """Requests that are not in the line yet: a program that they need is being compiled."""
        self._unfinished: dict[str, Request] = {}
        self._new: set[Request] = set()
        """Requests in `waiting` that were never admitted."""
        self.deadlines: list[Request] = []
        """Requests that have one, the next to expire first."""
        self._free_rows = list(range(max_running_requests - 1, -1, -1))
        self._smallest_chunk = max(1, min(SMALLEST_CHUNK, prefill_chunk // 2))

    @property
    def has_work(self) -> bool:
        return bool(self._unfinished)

    def add(self, request: Request, *, hold_back: bool = False) -> None:
        """Queues a new request or, to `hold_back`, keeps it until `join_line`.

        Raises:
            QueueFull: max_waiting_requests new ones wait already, not counting those that the next plan finds free rows for.
            ValueError: it needs more pages than the cache has.
        """
        queued = len(self._new) - len(self._free_rows)
        if self.max_waiting_requests is not None and queued >= self.max_waiting_requests:
            raise QueueFull(
                f"{queued} requests wait already and max_waiting_requests is {self.max_waiting_requests}: try again later"
            )
        if request.most_tokens > self.cache.capacity:
            raise ValueError(
                f"prompt and max_tokens are {request.most_tokens} tokens together, more than the {self.cache.capacity} that the "
                "cache holds: lower max_tokens or raise num_pages"
            )
        self._unfinished[request.id] = request
        self._new.add(request)
        if hold_back:
            self.held_back.append(request)
        else:
            insort(self.waiting, request, key=_place_in_line)
        if request.deadline < math.inf:
            insort(self.deadlines, request, key=_deadline)

    def join_line(self, request: Request) -> None:
        """Puts a request that was held back into the line, at the place of its arrival."""
        self.held_back.remove(request)
        insort(self.waiting, request, key=_place_in_line)

    @property
    def unfinished(self) -> list[Request]:
        return list(self._unfinished.values())

    def find(self, request_id: str) -> Request | None:
        """The unfinished request with this id."""
        return self._unfinished.get(request_id)

    def expired(self, now: float) -> list[Request]:
        """Unfinished requests whose deadline is not after `now` (seconds, on the clock of Request.deadline)."""
        count = 0
        while count < len(self.deadlines) and self.deadlines[count].deadline <= now:
            count += 1
        return self.deadlines[:count]

    # One plan

    def plan(self, tokens_per_cycle: int) -> StepPlan:
        """The next launches; a cycle emits up to `tokens_per_cycle` tokens per request. Requests whose last chunk is among the
        prefills join the next plan's cycle."""
        cycle, preempted = self._plan_cycle(tokens_per_cycle)
        admitted: list[Request] = []
        prefills: list[PrefillChunk] = []
        if self.waiting or len(cycle) < len(self.admitted):
            prefills = self._plan_prefills(self._prefill_line(admitted, tokens_per_cycle, may_admit=not preempted))
        self.counts.preemptions += len(preempted)
        return StepPlan(admitted, prefills, cycle)

    def _plan_cycle(self, tokens_per_cycle: int) -> tuple[list[Request], list[Request]]:
        """The running requests that still get the pages of one more cycle, and those preempted for them."""
        cycle: list[Request] = []
        preempted: list[Request] = []
        page_size = self.cache.pages.page_size
        for request in self.admitted[:]:
            if request.status is not Status.RUNNING or len(request.tokens) + request.in_flight >= request.most_tokens:
                continue  # launched programs may use up its budget: each emits a token at least
            slots = min(len(request.tokens) + request.in_flight_tokens + tokens_per_cycle, request.most_tokens)
            while slots > len(request.held.pages) * page_size and not self.cache.grow(request.held, slots):
                preempted.append(self.admitted[-1])  # those that already have pages for this cycle are more important
                self.preempt(self.admitted[-1])
                if request is preempted[-1]:
                    break
            if request.status is Status.RUNNING:
                cycle.append(request)
        return cycle, preempted

    def _plan_prefills(self, line: Iterator[Request]) -> list[PrefillChunk]:
        """Divides prefill_chunk tokens among the requests of the line. Each takes what its prompt needs, but at most half of the
        rest while another request follows, so that short prompts need not wait for the end of a long one. A chunk is planned only
        while at least the smallest chunk is left, and a half never leaves less: log2(prefill_chunk / smallest) + 1 requests can
        share a step.

        Asking the line for the next request may admit it, so nothing is asked for before there is room.

        In:  prefill_chunk 512, prompts of 1000, 20 and 1000 tokens
        Out: chunks of 256, 20 and 236
        """
        chunks: list[PrefillChunk] = []
        left, request = self.prefill_chunk, next(line, None)
        while request is not None:
            following, half = None, -(-left // 2)
            if left >= 2 * self._smallest_chunk and len(request.tokens) - request.prefilled > half:
                following = next(line, None)
            chunks.append(self._chunk(request, half if following else left))
            left -= chunks[-1].size
            request = following or (next(line, None) if left >= self._smallest_chunk else None)
        return chunks

    def _prefill_line(self, admitted: list[Request], tokens_per_cycle: int, may_admit: bool) -> Iterator[Request]:
        """Prefilling requests, and waiting ones as they are admitted, most important first. Waiting requests don't overtake each
        other: the first that can't be admitted ends admission."""
        for request in [each for each in self.admitted if each.status is Status.PREFILLING]:
            while may_admit and self.waiting and _place_in_line(self.waiting[0]) < _place_in_line(request):
                may_admit = self._admit(admitted, tokens_per_cycle)
                if may_admit:
                    yield admitted[-1]
            yield request
        while may_admit and self.waiting and self._admit(admitted, tokens_per_cycle):
            yield admitted[-1]

    def _admit(self, admitted: list[Request], tokens_per_cycle: int) -> bool:
        """Gives the first waiting request a row and the pages of its tokens and first cycle, and adds it to `admitted`. False if
        it must wait longer: for a row, for results that were not read yet, or for pages. Enough pages must remain for two cycles
        of every other request, or the next cycle might already preempt one."""
        request = self.waiting[0]
        if not self._free_rows or request.in_flight > 0:
            return False
        salt, scores = request.asked.cache_salt, request.asked.params.prompt_logprobs is not None
        held = HeldPages(salt=salt) if scores else self.cache.match(request.tokens, salt)
        slots = min(len(request.tokens) + tokens_per_cycle, request.most_tokens)
        reserve = len(self.admitted) * self.cache.pages.pages_for(2 * tokens_per_cycle)
        needed = self.cache.pages.pages_for(slots) - len(held.pages) + reserve
        if self.cache.available < needed or not self.cache.grow(held, slots):
            self.cache.release(held)
            return False
        del self.waiting[0]
        request.held, request.row, request.status = held, self._free_rows.pop(), Status.PREFILLING
        insort(self.admitted, request, key=_place_in_line)
        admitted.append(request)
        return True

    def _chunk(self, request: Request, limit: int) -> PrefillChunk:
        """The next `limit` tokens of the request's prefill, or fewer if it ends sooner. It starts where the cached prefix ends if
        that is further than the request's own chunks: as when it is new, or another request has computed the same tokens."""
        first = cached = request.prefilled
        if request.asked.params.prompt_logprobs is None:
            self.cache.extend_match(request.held, request.tokens)
            shared = self.cache.shared_slots(request.held)
            if shared > cached:
                first, cached = shared - 1, shared
        if request in self._new:
            self._new.remove(request)
            if request.asked.params.prompt_logprobs is None and self.cache.enabled:
                self.counts.prefix_queried_tokens += len(request.tokens)
                self.counts.prefix_hit_tokens += cached
            request.cached_tokens = cached
        size = min(limit, len(request.tokens) - first)
        request.prefilled = first + size
        is_last = request.prefilled == len(request.tokens)
        if is_last:
            request.status = Status.RUNNING
        chunk = PrefillChunk(request, first, size, cached, is_last, list(request.held.pages))
        self.cache.publish(request.held, request.tokens, request.prefilled)
        return chunk

    # The end of a request, or of its turn

    def preempt(self, request: Request) -> None:
        """Takes row and pages from an admitted request, which waits for its turn again; others may use its committed pages. Results
        of its launched programs may still be read, and even finish it."""
        committed = request.prefilled
        if request.status is Status.RUNNING:
            # All tokens that were read are committed but the newest, the next root. The head may lag behind.
            committed = max(committed, len(request.tokens) - 1 - request.held.lag)
        self.cache.publish(request.held, request.tokens, committed)
        self.cache.release(request.held)
        _remove(self.admitted, request, _place_in_line)
        self._free_rows.append(request.row)
        request.row, request.prefilled, request.status = -1, 0, Status.WAITING
        insort(self.waiting, request, key=_place_in_line)

    def lose_device_state(self) -> None:
        """Flushes the prefix cache and preempts all admitted requests, whose keys are lost."""
        self.cache.flush()  # first, so that the lost keys are never published
        for request in list(self.admitted):
            self.preempt(request)

    def finish(self, request: Request) -> None:
        """Removes a request, wherever it is; its row and pages are free for the next launch. Raises IntegrityError if it was the
        last one and pages are missing."""
        del self._unfinished[request.id]
        if request.deadline < math.inf:
            _remove(self.deadlines, request, _deadline)
        if request.status is not Status.WAITING:
            self.preempt(request)
        if request in self.held_back:
            self.held_back.remove(request)
        else:
            _remove(self.waiting, request, _place_in_line)
        self._new.discard(request)
        request.status = Status.FINISHED
        if not self.has_work:
            self.cache.check([])


def _place_in_line(request: Request) -> tuple[int, int]:
    """Sorts the most important request first."""
    return -request.asked.priority, request.arrival


def _deadline(request: Request) -> float:
    return request.deadline


def _remove(line: list[Request], request: Request, key: Callable[[Request], Any]) -> None:
    """Removes the request from a line sorted by `key`; several requests may have the same key."""
    index = 0 if line[0] is request else bisect_left(line, key(request), key=key)
    while line[index] is not request:
        index += 1
    del line[index]
