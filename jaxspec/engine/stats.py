"""What the engine has done since it started and what it holds now. Plain Python, no JAX."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """Counters are totals since the start: take differences for rates."""

    running: int
    """Admitted requests: prefilling or decoding."""
    waiting: int
    used_pages: int
    total_pages: int
    page_size: int
    prefilled_tokens: int
    generated_tokens: int
    verify_count: int
    """Verifications, counted per request."""
    verified_tokens: int
    """Tokens that verifications emitted: verified_tokens / verify_count is the accept length."""
