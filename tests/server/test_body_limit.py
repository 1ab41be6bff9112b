"""Limits of bodies, one layer alone: test_bad_input.py sends too large ones to a whole server."""

import asyncio
import json

import pytest
from starlette.exceptions import HTTPException
from starlette.types import Message

from jaxspec.server.body_limit import BodyLimit


class Connection:
    """Sends the parts of a body with pauses between them; keeps what comes back."""

    def __init__(self, parts: list[bytes], seconds: float = 0.0, declared: bytes | None = None):
        self._parts, self._seconds = parts, seconds
        headers = [] if declared is None else [(b"content-length", declared)]
        self.scope = {"type": "http", "headers": headers}
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        await asyncio.sleep(self._seconds)
        if not self._parts:
            await asyncio.sleep(0.2)
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": self._parts.pop(0), "more_body": bool(self._parts)}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return self.sent[0]["status"]


class Reader:
    """An application that reads the body, then waits for the client to hang up, as a stream does."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def __call__(self, scope, receive, send) -> None:
        body = b""
        while (part := await receive())["type"] == "http.request":
            body += part["body"]
            if not part["more_body"]:
                self.bodies.append(body)
        await send({"type": "http.response.start", "status": 200})


def refusal(limit: BodyLimit, connection: Connection) -> HTTPException:
    with pytest.raises(HTTPException) as error:
        asyncio.run(limit(connection.scope, connection.receive, connection.send))
    return error.value


def test_bodies_pass():
    reader = Reader()
    limit = BodyLimit(reader, max_bytes=4, max_bytes_together=4, seconds=0.1)
    for parts in ([b"abcd"], [b"ab", b"cd"], [b""]):
        connection = Connection(parts)
        asyncio.run(limit(connection.scope, connection.receive, connection.send))  # longer than `seconds`: it is there by then
        assert connection.status == 200
    assert reader.bodies == [b"abcd", b"abcd", b""]


@pytest.mark.parametrize("declared", [b"5", b"99999999999999999999", b"-1", b"x", b""])
def test_what_is_declared_too_large_is_not_read(declared: bytes):
    connection = Connection([b"abc"], declared=declared)
    asyncio.run(BodyLimit(Reader(), max_bytes=4)(connection.scope, connection.receive, connection.send))
    assert connection.status == 413
    assert json.loads(connection.sent[1]["body"])["error"]["code"] == 413


def test_one_that_is_too_large():
    assert refusal(BodyLimit(Reader(), max_bytes=4), Connection([b"abc", b"de"])).status_code == 413


def test_one_that_comes_too_slowly():
    error = refusal(BodyLimit(Reader(), seconds=0.2), Connection([b"a"] * 20, seconds=0.05))
    assert (error.status_code, error.headers) == (408, {"Connection": "close"})


def test_many_at_once_share_the_room():
    """What has been read counts until its request has been answered, and no longer."""
    reader = Reader()
    limit = BodyLimit(reader, max_bytes=4, max_bytes_together=10)

    async def together(count: int) -> list[int]:
        connections = [Connection([b"abcd"]) for _ in range(count)]
        work = [limit(each.scope, each.receive, each.send) for each in connections]
        results = await asyncio.gather(*work, return_exceptions=True)
        return sorted(result.status_code if isinstance(result, HTTPException) else 200 for result in results)

    assert asyncio.run(together(2)) == [200, 200]
    assert asyncio.run(together(3)) == [200, 200, 503]
    assert asyncio.run(together(2)) == [200, 200]  # the refused one has given its room back too
