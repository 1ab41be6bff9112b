"""uvicorn, set up for this server: where it listens, what it says when it is ready, and how it ends."""

import asyncio
import json
import math
import socket
from collections.abc import Callable
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxspec.engine.async_engine import AsyncEngine
from jaxspec.server.address import url_of
from jaxspec.server.app import Application
from jaxspec.server.errors import ApiError

MAX_HEADER_BYTES = 64 * 2**10
HANG_UP_SECONDS = 5.0
"""After the time for running requests, how long clients may take to read the error that ended theirs."""


class Protocol(H11Protocol):
    """One connection. Headers may have 64 KiB together; what is no HTTP gets an error in our shape."""

    def send_400_response(self, msg: str) -> None:
        body = json.dumps(ApiError(400, "this is no valid HTTP request, or its headers are too large").body).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        response = h11.Response(status_code=400, headers=list(headers.items()), reason="Bad Request")
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class HttpServer(uvicorn.Server):
    """Serves the application until SIGTERM or SIGINT; `on_ready` gets the URL once connections are accepted.

    After the signal running requests have the settings' shutdown_timeout to finish, until a second signal ends everything at once.
    Meanwhile probes and new requests get a 503, so that whoever spreads the load goes elsewhere.
    """

    def __init__(self, app: Application, engine: AsyncEngine, on_ready: Callable[[str], None]):
        config = uvicorn.Config(
            app,
            http=Protocol,
            ws="none",
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            log_config=None,  # the root logger has all of uvicorn's lines
            timeout_graceful_shutdown=math.ceil(HANG_UP_SECONDS),
            server_header=False,
            lifespan="off",
        )
        super().__init__(config)
        self._app, self._engine, self._on_ready = app, engine, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            self._on_ready(url_of(sockets[0]))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        stop = asyncio.get_running_loop().call_later(self._app.settings.shutdown_timeout, self._engine.stop)
        impatience = asyncio.create_task(self._hang_up_if_forced())
        self._app.running.drain()
        while self._app.running.is_busy and not self.force_exit:
            await asyncio.sleep(0.05)
        await super().shutdown(sockets)  # closes what listens
        stop.cancel()
        impatience.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came. By itself uvicorn takes only SIGINT for impatience."""
        if self.should_exit:
            self.force_exit = True
        super().handle_exit(sig, frame)

    async def _hang_up_if_forced(self) -> None:
        """uvicorn would go on waiting for its connections."""
        while not self.force_exit:
            await asyncio.sleep(0.05)
        self._engine.stop()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
