"""The check that the engine generates tokens."""

import asyncio
import uuid

from jaxspec.engine.driver import EngineThread
from jaxspec.engine.generation import Generation
from jaxspec.engine.request import EngineError, GenerationRequest
from jaxspec.engine.scheduler import QueueFull
from jaxspec.sampling_params import SamplingParams
from jaxspec.server.errors import ApiError
from jaxspec.server.fields import MAX_INT

PROBE_SECONDS = 20.0
"""Seconds to wait for a token. A full engine answers much sooner, because other requests' tokens count too."""
INTERVAL = 0.02
"""Seconds between two checks for other requests' tokens."""


class HealthProbe:
    """Asks the engine for one token. However many clients ask at once, there is one such request."""

    def __init__(self, engine: EngineThread, seconds: float = PROBE_SECONDS):
        self._engine, self._seconds = engine, seconds
        self._task: asyncio.Task[bool] | None = None

    async def check(self) -> None:
        """Raises ApiError 503 if no token comes in time."""
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._any_token())
        if not await asyncio.shield(self._task):  # one client that hangs up does not end it for the others
            raise ApiError(503, f"the engine has not made a token within {self._seconds:g} seconds")

    async def _any_token(self) -> bool:
        """Waits for this request's token or for one of another request, whichever comes first."""
        tasks = [asyncio.ensure_future(work) for work in (self._own_token(), self._other_token())]
        try:
            async with asyncio.timeout(self._seconds):
                for first in asyncio.as_completed(tasks):
                    if (made_one := await first) is not None:
                        return made_one
        except TimeoutError:
            pass
        finally:
            for task in tasks:
                task.cancel()
        return False

    async def _own_token(self) -> bool | None:
        """Whether this request got its token. None: the queue is full, so only other requests' tokens can tell."""
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        request = GenerationRequest((0,), params, priority=MAX_INT)
        try:
            with await Generation.start(self._engine, [request], [f"health-{uuid.uuid4().hex}"]) as generation:
                await anext(generation)
        except QueueFull:
            return None
        except EngineError:
            return False
        return True

    async def _other_token(self) -> bool:
        before = self._engine.stats.generated_tokens
        while self._engine.stats.generated_tokens <= before:
            await asyncio.sleep(INTERVAL)
        return True
