"""Who is computed next: first come, first served. Plain Python, no JAX.

A request is admitted when a state row is free and the pages of its whole life (prompt + max_tokens) are: so a running
request can never run out, and its page table does not change while it runs.
"""

from collections import deque
from typing import NamedTuple

from jaxspec.engine.pages import PageAllocator
from jaxspec.engine.request import Request, Status


class PrefillStep(NamedTuple):
    """A chunk of one prompt: tokens first_slot .. first_slot + size - 1."""

    request: Request
    first_slot: int
    size: int
    is_last: bool


class Plan(NamedTuple):
    """What one engine step launches: at most one prefill chunk, then one cycle of all requests that run."""

    prefill: PrefillStep | None
    cycle: list[Request]


class Scheduler:
    """Holds every unfinished request, in order of arrival."""

    def __init__(self, pages: PageAllocator, max_running_requests: int, prefill_chunk: int):
        self.pages, self.prefill_chunk = pages, prefill_chunk
        self.waiting: deque[Request] = deque()
        self.admitted: list[Request] = []
        self._unfinished: dict[str, Request] = {}
        self._free_rows = list(range(max_running_requests - 1, -1, -1))

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.admitted)

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        self._unfinished[request.id] = request

    def find(self, request_id: str) -> Request | None:
        """The unfinished request with this id."""
        return self._unfinished.get(request_id)

    def plan(self) -> Plan:
        """What to launch now. Requests that become RUNNING with this prefill join the next plan's cycle."""
        cycle = [request for request in self.admitted if request.wants_cycle]
        return Plan(self._next_prefill(), cycle)

    def _next_prefill(self) -> PrefillStep | None:
        request = next((request for request in self.admitted if request.status is Status.PREFILLING), None) or self._admit()
        if request is None:
            return None
        first = request.prefilled
        size = min(self.prefill_chunk, len(request.prompt) - first)
        request.prefilled += size
        is_last = request.prefilled == len(request.prompt)
        if is_last:
            request.status = Status.RUNNING
        return PrefillStep(request, first, size, is_last)

    def _admit(self) -> Request | None:
        """Gives the first waiting request a row and pages, if there are enough of both."""
        if not self.waiting or not self._free_rows:
            return None
        request = self.waiting[0]
        pages = self.pages.allocate(self.pages.pages_for(len(request.prompt) + request.params.max_tokens))
        if pages is None:
            return None
        self.waiting.popleft()
        request.pages, request.row, request.status = pages, self._free_rows.pop(), Status.PREFILLING
        self.admitted.append(request)
        return request

    def finish(self, request: Request) -> None:
        """Takes a request out, wherever it is; its row and pages are free for the next launch."""
        del self._unfinished[request.id]
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            self.admitted.remove(request)
            self._free_rows.append(request.row)
            self.pages.release(request.pages)
            request.pages = []
        request.status = Status.FINISHED
        if not self.has_work:
            self.pages.check_idle()
