"""uvicorn, set up for this server: start, shutdown, and the answer to malformed HTTP."""

import asyncio
import math
import re
import resource
import socket
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxspec.engine.driver import EngineThread
from jaxspec.engine.hosts import STOP_SIGNAL, ToldToEnd
from jaxspec.server.app import Application
from jaxspec.server.errors import ApiError

HTTP_2 = b"PRI * HTTP/2.0"
"""What a client that assumes HTTP/2 sends first; routers try it and fall back to HTTP/1.1."""
MAX_HEADER_BYTES = 64 * 2**10
HEADER_SECONDS = 10.0
"""Time for the headers of a request to arrive, from the first byte on or, on a new connection, from its start."""
READ_SECONDS = 30.0
"""A client that reads nothing of an answer for this long (at most twice this long) is disconnected."""
END_OF_HEADERS = re.compile(rb"\n\r?\n")
ABSOLUTE_FORM = re.compile(rb"(?i:https?)://([^/?#]+)([^#]*)")
"""A request's target as clients send it to proxies: the host, and the path."""
HOST = re.compile(rb"(\[[\w.:~%-]+\]|[\w.~%!$&'()*+,;=-]*)(:\d*)?", re.ASCII)
"""A value of the header Host (RFC 3986, section 3.2.2)."""
MAX_UNUSED = 1000
"""The most connections that wait for a complete request, or for their last answer to be read; one more closes the oldest."""
ERROR_SECONDS = 5.0
"""Seconds that clients get to read the error after the shutdown timeout has ended their requests."""


class Requests(h11.Connection):
    """The requests of one connection, read as RFC 9112 says where h11 leaves it to the server."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEADER_BYTES)

    def next_event(self) -> Any:
        """Raises RemoteProtocolError for a body whose length is given in two ways (section 6.3): if a proxy went by one and the
        server by the other, the rest would run as somebody else's request."""
        event = super().next_event()
        if not isinstance(event, h11.Request):
            return event
        names = {name for name, _ in event.headers}
        if {b"transfer-encoding", b"content-length"} <= names:
            raise h11.RemoteProtocolError("both Transfer-Encoding and Content-Length")
        if not all(HOST.fullmatch(value) for name, value in event.headers if name == b"host"):
            raise h11.RemoteProtocolError("the value of Host is not a host")
        if (absolute := ABSOLUTE_FORM.match(event.target)) is None:
            return event
        headers = [(b"host", absolute[1]), *((name, value) for name, value in event.headers if name != b"host")]  # section 3.2.2
        target = absolute[2] if absolute[2].startswith(b"/") else b"/" + absolute[2]
        return h11.Request(method=event.method, headers=headers, target=target, http_version=event.http_version)


class Connection(H11Protocol):
    """One connection, with limits: headers take at most 64 KiB and 10 seconds, and clients must read answers. While unused, it may
    be closed to make room for others. Malformed HTTP gets an error in the server's own format."""

    def __init__(self, *args: Any, unused: "dict[Connection, None]", most_unused: int, **kwargs: Any):
        """`unused`: the connections without a complete request, the oldest first."""
        super().__init__(*args, **kwargs)
        self.conn = Requests()
        self._unused, self._most_unused = unused, most_unused
        self._timer: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._unread = math.inf
        """Bytes not yet read by the client at the last look; infinite if more were added since, or if it was not behind."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in H11Protocol
        super().connection_made(transport)
        self._expect_request()
        self._start_timer()
        self._reading = self.loop.call_later(READ_SECONDS, self._look)

    def data_received(self, data: bytes) -> None:
        if self.conn.states[h11.CLIENT] is h11.IDLE:
            self._start_timer()
            if not self.conn.trailing_data[0]:
                data = data.lstrip(b"\r\n")  # empty lines before a request (RFC 9112, section 2.2)
                if not data:
                    return
            headers = self.conn.trailing_data[0] + data
            end = END_OF_HEADERS.search(headers)
            is_too_long = (len(headers) if end is None else end.end()) > MAX_HEADER_BYTES  # h11 checks only what is incomplete
            if is_too_long or headers.startswith(HTTP_2):
                self.send_400_response("")
                return
        super().data_received(data)
        if self.conn.states[h11.CLIENT] is not h11.IDLE:
            self._stop_timer()
        if self.conn.states[h11.CLIENT] not in (h11.IDLE, h11.SEND_BODY):
            self._unused.pop(self, None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            is_unused = self.transport.get_write_buffer_size() > 0
        else:
            is_unused = self.conn.states[h11.CLIENT] in (h11.IDLE, h11.SEND_BODY)
        if is_unused:
            self._expect_request()  # the next one, the rest of one that has begun, or the rest of one refused early

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = math.inf

    def _look(self) -> None:
        """Hangs up on a client that has read nothing since the last look."""
        unread = self.transport.get_write_buffer_size() if self.flow.write_paused or self.transport.is_closing() else math.inf
        if math.inf > unread >= self._unread:
            self.transport.abort()
        self._unread = unread
        self._reading = self.loop.call_later(READ_SECONDS, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()
        if self._reading is not None:
            self._reading.cancel()
        self._unused.pop(self, None)

    def _should_upgrade(self) -> bool:
        """Always False, without the two log lines that uvicorn would write: routers ask every server for HTTP/2."""
        return False

    def _expect_request(self) -> None:
        """Counts this connection as unused from now on. If that is one too many, the oldest is closed."""
        self._unused[self] = None
        if len(self._unused) > self._most_unused:
            oldest = next(iter(self._unused))
            del self._unused[oldest]
            oldest.transport.abort()

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None:  # this may be the body of its request, which gets no other answer
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        message = f"malformed HTTP request, or headers larger than {MAX_HEADER_BYTES // 2**10} KiB"
        body = ApiError(400, message).report.model_dump_json().encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        response = h11.Response(status_code=400, headers=list(headers.items()), reason="Bad Request")
        is_answered = self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE)
        for event in () if is_answered else (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def most_unused() -> int:
    """MAX_UNUSED, or half of the files that this process may have open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_UNUSED if files == resource.RLIM_INFINITY else min(MAX_UNUSED, files // 2)


class HttpServer(uvicorn.Server):
    """Serves the application until SIGTERM or SIGINT; `on_ready` is called once connections are accepted.

    After the signal, running requests have the settings' shutdown_timeout to finish; a second signal ends them at once.
    Meanwhile probes and new requests get a 503, so that load balancers go elsewhere.
    """

    def __init__(self, app: Application, engine: EngineThread, on_ready: Callable[[], None]):
        config = uvicorn.Config(
            app,
            http=partial(Connection, unused={}, most_unused=most_unused()),  # type: ignore[arg-type]  # uvicorn only calls it
            ws="none",
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            log_config=None,  # uvicorn logs through the root logger
            timeout_graceful_shutdown=math.ceil(ERROR_SECONDS),
            server_header=False,
            proxy_headers=False,  # or a client's X-Forwarded-For would be its address in the log
            lifespan="off",
        )
        super().__init__(config)
        self._app, self._engine, self._on_ready = app, engine, on_ready
        self._told = ToldToEnd()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in sockets or ():  # connections inherit it: those that this server closes don't hold the address for a minute
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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
        """Handles a signal. uvicorn would force the end at a SIGINT after any signal (even STOP_SIGNAL), never at a SIGTERM."""
        if sig != STOP_SIGNAL and self._told.again(sig):
            self.force_exit = True
        self.should_exit = True

    async def _hang_up_if_forced(self) -> None:
        """Closes all connections after a second signal; uvicorn would keep waiting for them."""
        while not self.force_exit:
            await asyncio.sleep(0.05)
        self._engine.stop()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
