"""HTTP/1.1 on bare sockets, for clients that no library would be: they send garbage, hang up, and read a byte now and then."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Connection:
    """One connection to the server."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the next answer."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), headers

    async def pieces(self, headers: dict[str, str]) -> AsyncIterator[bytes]:
        """The body of the answer, as it comes."""
        if "chunked" not in headers.get("transfer-encoding", ""):
            yield await self.reader.readexactly(int(headers.get("content-length", 0)))
            return
        while size := int(await self.reader.readline(), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readline()

    async def answer(self) -> tuple[int, bytes]:
        """Status and body of the next answer."""
        status, headers = await self.head()
        return status, b"".join([piece async for piece in self.pieces(headers)])

    def hang_up(self) -> None:
        """At once, and without reading what is on its way."""
        self.writer.transport.abort()


@asynccontextmanager
async def connected(url: str, *, receive_buffer: int | None = None) -> AsyncIterator[Connection]:
    """A connection; with `receive_buffer` (bytes) the server can send only so much ahead of what is read."""
    address = urlsplit(url)
    plain = socket.socket()
    plain.setblocking(False)
    if receive_buffer is not None:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    await asyncio.get_running_loop().sock_connect(plain, (address.hostname, address.port))
    reader, writer = await asyncio.open_connection(sock=plain, limit=2**16 if receive_buffer is None else receive_buffer)
    connection = Connection(reader, writer)
    try:
        yield connection
    finally:
        connection.hang_up()


def request(path: str, body: Any, *, method: str = "POST", kind: str = "application/json") -> bytes:
    """A request with a body of JSON, or of these bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"{method} {path} HTTP/1.1\r\nHost: test\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
