"""What runs, by the names that clients know it by, so that others can end it; and whether anything new may start."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from jaxspec.engine.async_engine import AsyncEngine
from jaxspec.server.errors import ApiError


class RunningRequests:
    """Client names and the engine's request ids behind them. The engine's own are made up, so no client can meet another's by
    accident. Used in the event loop's thread only."""

    def __init__(self, engine: AsyncEngine, request_timeout: float | None = None):
        """`request_timeout`: seconds that anything may run."""
        self.engine, self.request_timeout = engine, request_timeout
        self._engine_ids: dict[str, set[str]] = {}
        self._is_draining = False

    def drain(self) -> None:
        """From now on nothing new starts; what runs goes on."""
        self._is_draining = True

    @property
    def is_busy(self) -> bool:
        """Whether the engine works on requests, as far as its last step tells."""
        stats = self.engine.stats
        return self.engine.is_healthy and stats.running + stats.waiting > 0

    def check_available(self) -> None:
        """Raises ApiError 503 while the server ends, or while the engine does not work."""
        self.check_open()
        if not self.engine.is_healthy:
            raise ApiError(503, "the engine is not running")

    def check_open(self) -> None:
        """Raises ApiError 503 while the server ends. An engine that fails may be tried: one success heals it."""
        if self._is_draining:
            raise ApiError(503, "the server is shutting down")

    def check_free(self, name: str, param: str) -> None:
        """Raises ApiError if something runs by this name."""
        if name in self._engine_ids:
            raise ApiError(400, f"{param} {name!r} is in use by a request that runs: choose another", param=param)

    @contextmanager
    def named(self, names: Mapping[str, Sequence[str]]) -> Iterator[None]:
        """Engine requests have these names as long as the context lasts. A name may stand for several."""
        for name, engine_ids in names.items():
            self._engine_ids.setdefault(name, set()).update(engine_ids)
        try:
            yield
        finally:
            for name, engine_ids in names.items():
                self._engine_ids[name].difference_update(engine_ids)
                if not self._engine_ids[name]:
                    del self._engine_ids[name]

    async def abort(self, names: Sequence[str]) -> int:
        """Ends what has these names: its clients get what there is, with finish_reason "abort". Returns how many completions
        that were; names of nothing are fine, as whatever had them may just have ended."""
        return await self.engine.abort([engine_id for name in names for engine_id in self._engine_ids.get(name, ())])

    async def abort_all(self) -> int:
        """Ends everything."""
        return await self.engine.abort()
