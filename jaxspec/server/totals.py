"""Averages since the cache was flushed: SGLang's benchmark flushes it before a run, and reads the accept length after it."""

from jaxspec.engine.async_engine import AsyncEngine


class Totals:
    """Averages over what an engine did since it was made, or since `restart`."""

    def __init__(self, engine: AsyncEngine):
        self._engine = engine
        self.restart()

    def restart(self) -> None:
        """What was before counts no more."""
        self._before = self._engine.stats

    @property
    def accept_length(self) -> float | None:
        """Tokens per verification, bonus included; None before the first one."""
        now, before = self._engine.stats, self._before
        verifications = now.verify_count - before.verify_count
        return (now.verified_tokens - before.verified_tokens) / verifications if verifications else None

    @property
    def cache_hit_rate(self) -> float:
        """The share of the prompts' tokens that the prefix cache had."""
        now, before = self._engine.stats, self._before
        queried = now.prefix_queried_tokens - before.prefix_queried_tokens
        return (now.prefix_hit_tokens - before.prefix_hit_tokens) / queried if queried else 0.0

    @property
    def throughput(self) -> float:
        """Generated tokens per second of work."""
        now, before = self._engine.stats, self._before
        seconds = now.step_seconds - before.step_seconds
        return (now.generated_tokens - before.generated_tokens) / seconds if seconds > 0 else 0.0
