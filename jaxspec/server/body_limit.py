"""How large a request's body may be, how large all of them together, and how long one may take to arrive."""

import asyncio

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec.server.errors import ApiError

MAX_BODY_BYTES = 16 * 2**20
MAX_BYTES_TOGETHER = 16 * MAX_BODY_BYTES
"""Bodies of the requests that are being answered. It takes many large ones at once to come near."""
BODY_SECONDS = 60.0
"""For a body to arrive; else a client that sends a byte now and then keeps what it sent in memory for ever."""


class BodyLimit:
    """Middleware that refuses bodies: 413 beyond max_bytes, without holding more than that; 503 while others fill the room; 408
    beyond the time."""

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int = MAX_BODY_BYTES,
        max_bytes_together: int = MAX_BYTES_TOGETHER,
        seconds: float = BODY_SECONDS,
    ):
        self._app, self._max_bytes, self._max_bytes_together, self._seconds = app, max_bytes, max_bytes_together, seconds
        self._held = 0
        """Bytes of the bodies of all requests that are being answered."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        too_large = f"the request body is larger than {self._max_bytes} bytes"
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > self._max_bytes:
            await ApiError(413, too_large).response(scope, receive, send)
            return
        received = 0
        deadline: float | None = asyncio.get_running_loop().time() + self._seconds

        async def limited() -> Message:
            """What it raises, FastAPI lets through while it reads the body."""
            nonlocal received, deadline
            try:
                async with asyncio.timeout_at(deadline):
                    part = await receive()
            except TimeoutError:
                message = f"the request body did not arrive within {self._seconds:g} seconds"
                raise HTTPException(408, message, {"Connection": "close"}) from None
            if not part.get("more_body", False):
                deadline = None  # from now on it waits for the client to hang up
            length = len(part.get("body", b""))
            received += length
            self._held += length
            if received > self._max_bytes:
                raise HTTPException(413, too_large)
            if self._held > self._max_bytes_together:
                raise HTTPException(503, "the bodies of other requests fill the memory for them: try again later")
            return part

        try:
            await self._app(scope, limited, send)
        finally:
            self._held -= received
