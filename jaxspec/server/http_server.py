"""uvicorn, set up for this server: where it listens, what it says when it is ready, and how it ends."""

import asyncio
import socket
from collections.abc import Callable
from ipaddress import ip_address

import uvicorn
from fastapi import FastAPI

from jaxspec.engine.async_engine import AsyncEngine

DRAIN_SECONDS = 3.0
"""After a signal, how long running requests may still go on."""
HANG_UP_SECONDS = 5.0
"""After that, how long clients may take to read the error that ended their request."""


class HttpServer(uvicorn.Server):
    """Serves the application until SIGTERM or SIGINT; `on_ready` gets the URL once connections are accepted."""

    def __init__(self, app: FastAPI, engine: AsyncEngine, on_ready: Callable[[str], None]):
        config = uvicorn.Config(
            app,
            log_config=None,  # the root logger has all of uvicorn's lines
            timeout_graceful_shutdown=round(DRAIN_SECONDS + HANG_UP_SECONDS),
            server_header=False,
            lifespan="off",
        )
        super().__init__(config)
        self._engine, self._on_ready = engine, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            self._on_ready(url_of(sockets[0]))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        stop = asyncio.get_running_loop().call_later(DRAIN_SECONDS, self._engine.stop)
        await super().shutdown(sockets)
        stop.cancel()


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address; connections are accepted once the server runs. Raises OSError if it can't be had."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def is_loopback(listener: socket.socket) -> bool:
    """True if only this machine can connect."""
    return ip_address(listener.getsockname()[0]).is_loopback


def url_of(listener: socket.socket) -> str:
    """Where clients find it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
