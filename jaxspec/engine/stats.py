"""What the engine has done since it started and what it holds now. Plain Python, no JAX."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter


@dataclass(frozen=True)
class EngineStats:
    """Counters are totals since the start: take differences for rates."""

    running: int = 0
    """Admitted requests: prefilling or decoding."""
    waiting: int = 0
    """Including preempted ones."""
    used_pages: int = 0
    """Held by requests; shared pages count once."""
    cached_pages: int = 0
    """Held by the prefix cache alone: evicted when requests need them."""
    total_pages: int = 0
    page_size: int = 1
    prefilled_tokens: int = 0
    """Computed by prefill; what the prefix cache spared is not among them."""
    prefix_queried_tokens: int = 0
    """Tokens that were looked up in the prefix cache."""
    prefix_hit_tokens: int = 0
    """Those that were found."""
    prompt_tokens: int = 0
    """Of all requests that were taken in, cached ones included."""
    generated_tokens: int = 0
    finished: Mapping[str, int] = field(default_factory=dict)
    """Requests that ended, by finish_reason."""
    verify_count: int = 0
    """Verifications, counted per request."""
    verified_tokens: int = 0
    """Tokens that verifications emitted: verified_tokens / verify_count is the accept length."""
    draft_count: int = 0
    """Verifications of a tree: verify_count without plain decoding."""
    draft_tokens: int = 0
    """What they verified: nodes below the roots."""
    accepted_tokens: int = 0
    """Drafts that they accepted and that were emitted."""
    accepted_per_position: tuple[int, ...] = ()
    """How often the first draft of a path was accepted, the second, and so on."""
    preemptions: int = 0
    cycles: int = 0
    """Cycles, one per batch."""
    failed_steps: int = 0
    """Failed steps in a row; 0 as soon as one succeeds."""
    step_seconds: float = 0.0
    """Time inside Engine.step."""
    waiting_seconds: float = 0.0
    """The part of it that waited for the device."""
    launching_seconds: float = 0.0
    """The part of it that handed programs to the device; a CPU computes part of them meanwhile."""

    @property
    def host_seconds(self) -> float:
        """What the engine itself took: scheduling, pages, reading results, text. Divide by cycles for the host's share of one.
        Where the device is a CPU, its threads slow this down too."""
        return self.step_seconds - self.waiting_seconds - self.launching_seconds


class Stopwatch:
    """Adds up the time that passes inside its `with` blocks, in seconds."""

    def __init__(self):
        self.seconds = self._started = 0.0

    def __enter__(self) -> None:
        self._started = perf_counter()

    def __exit__(self, *_exception: object) -> None:
        self.seconds += perf_counter() - self._started
