"""What AsyncEngine works with: an engine to step, and observers that watch it."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from jaxspec.config import SpecConfig
from jaxspec.engine.request import GenerationOutput, Update
from jaxspec.engine.stats import EngineStats
from jaxspec.sampling_params import SamplingParams


@runtime_checkable
class StepEngine(Protocol):
    """What the thread needs of an engine; jaxspec.engine.engine.Engine is one."""

    @property
    def has_work(self) -> bool: ...

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        tree: SpecConfig | None = None,
        wants_trees: bool = False,
    ) -> Any: ...

    def abort(self, request_id: str) -> Update | None: ...

    def flush_cache(self) -> None: ...

    def step(self) -> list[Update]: ...

    def stats(self) -> EngineStats: ...


@runtime_checkable
class Observer(Protocol):
    """Watches the engine; called in the engine's thread, so it must be quick."""

    def after_step(self, stats: EngineStats, idle: bool) -> None:
        """After every step: the engine's counters, and whether the work has just run out."""

    def finished(self, output: GenerationOutput) -> None:
        """A request has ended, whatever the reason."""
