"""uvicorn, set up for this server: start, shutdown, and the answer to malformed HTTP."""

import asyncio
import math
import socket
from collections.abc import Callable
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxspec.engine.async_engine import AsyncEngine
from jaxspec.server.app import Application
from jaxspec.server.errors import ApiError

MAX_HEADER_BYTES = 64 * 2**10
ERROR_SECONDS = 5.0
"""Seconds that clients get to read the error after the shutdown timeout has ended their requests."""


class Connection(H11Protocol):
    """One connection. Its headers may have 64 KiB together; malformed HTTP gets an error in the server's own shape."""

    def send_400_response(self, msg: str) -> None:
        message = f"malformed HTTP request, or headers larger than {MAX_HEADER_BYTES // 2**10} KiB"
        body = ApiError(400, message).body.encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        response = h11.Response(status_code=400, headers=list(headers.items()), reason="Bad Request")
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class HttpServer(uvicorn.Server):
    """Serves the application until SIGTERM or SIGINT; `on_ready` is called once connections are accepted.

    After the signal, running requests have the settings' shutdown_timeout to finish; a second signal ends them at once.
    Meanwhile probes and new requests get a 503, so that load balancers go elsewhere.
    """

    def __init__(self, app: Application, engine: AsyncEngine, on_ready: Callable[[], None]):
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            log_config=None,  # uvicorn logs through the root logger
            timeout_graceful_shutdown=math.ceil(ERROR_SECONDS),
            server_header=False,
            lifespan="off",
        )
        super().__init__(config)
        self._app, self._engine, self._on_ready = app, engine, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        stop = asyncio.get_running_loop().call_later(self._app.settings.shutdown_timeout, self._engine.stop)
        second_signal = asyncio.create_task(self._hang_up_if_forced())
        self._app.running.drain()
        while self._app.running.is_busy and not self.force_exit:
            await asyncio.sleep(0.05)
        await super().shutdown(sockets)  # closes the listening sockets
        stop.cancel()
        second_signal.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came. uvicorn itself forces the end after a second SIGINT only, not after a second SIGTERM."""
        if self.should_exit:
            self.force_exit = True
        super().handle_exit(sig, frame)

    async def _hang_up_if_forced(self) -> None:
        """Closes all connections after a second signal; uvicorn would keep waiting for them."""
        while not self.force_exit:
            await asyncio.sleep(0.05)
        self._engine.stop()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
