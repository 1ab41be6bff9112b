"""Limits of bodies, one layer alone (test_bad_input.py sends bodies to a whole server), and parsing that delays nobody."""

import asyncio
import json
import threading
import time
from time import perf_counter

import httpx
import pytest
from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import Message

from jaxspec.server import bodies
from jaxspec.server.bodies import MAX_VALUES, BodyLimit, OneByOne, most_bytes, most_values
from jaxspec.server.errors import ClientDisconnected
from jaxspec.server.openai import requests
from jaxspec.server.running import start
from jaxspec.server.streaming import unless_disconnected
from tests.server.conftest import COMPLETIONS, Client
from tests.server.test_bad_input import refusal
from tests.server.test_streaming import receive, send

JSON = {"content-type": "application/json"}


class Connection:
    """Sends the parts of a body with pauses between them; keeps what comes back."""

    def __init__(self, parts: list[bytes], seconds: float = 0.0, declared: bytes | None = None):
        self._parts, self._seconds = parts, seconds
        headers = [] if declared is None else [(b"content-length", declared)]
        self.scope = {"type": "http", "path": "/", "headers": headers}
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


def raised_by(limit: BodyLimit, connection: Connection) -> HTTPException:
    with pytest.raises(HTTPException) as error:
        asyncio.run(limit(connection.scope, connection.receive, connection.send))
    return error.value


def test_bodies_pass():
    reader = Reader()
    limit = BodyLimit(reader, max_bytes=4, max_total_bytes=4, seconds=0.1)
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


def test_one_that_comes_too_slowly():
    error = raised_by(BodyLimit(Reader(), seconds=0.2), Connection([b"a"] * 20, seconds=0.05))
    assert (error.status_code, error.headers) == (408, {"Connection": "close"})


def test_bodies_of_concurrent_requests_share_a_limit():
    """What has been read counts until its request has been answered, and no longer."""
    limit = BodyLimit(Reader(), max_bytes=4, max_total_bytes=10)

    async def together(count: int) -> list[int]:
        connections = [Connection([b"abcd"]) for _ in range(count)]
        work = [limit(each.scope, each.receive, each.send) for each in connections]
        results = await asyncio.gather(*work, return_exceptions=True)
        return sorted(result.status_code if isinstance(result, HTTPException) else 200 for result in results)

    assert asyncio.run(together(2)) == [200, 200]
    assert asyncio.run(together(3)) == [200, 200, 503]
    assert asyncio.run(together(2)) == [200, 200]  # the refused one does not count any more


@pytest.mark.parametrize(
    ("context", "most"), [(1, 2 * 2**20), (2048, 2 * 2**20), (4096, 4 * 2**20), (16384, 16 * 2**20), (131072, 16 * 2**20)]
)
def test_a_body_may_hold_the_prompts_that_a_request_may_have(context: int, most: int):
    assert most_bytes(context) == most


def test_long_contexts_may_have_more_values():
    assert (most_values(4096), most_values(2**20)) == (MAX_VALUES, 2**21)


# Parsing


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [1] * MAX_VALUES}),
        ("/v1/chat/completions", {"messages": [{}] * (MAX_VALUES // 2 + 1)}),
        ("/tokenize", {"prompt": "," * MAX_VALUES}),  # text counts too: looking at every character would take longer
    ],
)
def test_more_values_than_can_mean_something_are_refused_unparsed(client: Client, path: str, body: dict, monkeypatch):
    monkeypatch.setattr(bodies.JsonBody, "parse", lambda *_: pytest.fail("it was parsed"))
    error = refusal(client.http.post(path, content=json.dumps(body, separators=(",", ":")), headers=JSON), 413)
    assert f"more than {MAX_VALUES} values" in error["message"]


def test_large_bodies_are_parsed_in_a_thread_and_small_ones_at_once(client: Client, monkeypatch):
    threads, parse = [], bodies.JsonBody.parse

    def note(self, raw):
        threads.append(threading.current_thread())
        return parse(self, raw)

    monkeypatch.setattr(bodies.JsonBody, "parse", note)
    for length in (10, bodies.LARGE_BYTES, 10):
        assert client.post("/tokenize", prompt="x" * length).status_code == 200
    small, large, again = threads
    assert small is again and small is not large


def test_work_gets_its_share_of_the_time_one_after_the_other():
    async def work() -> tuple[list[int], float]:
        large, running, most = OneByOne(0.2), 0, []

        def busy() -> None:
            nonlocal running
            running += 1
            most.append(running)
            time.sleep(0.05)
            running -= 1

        began = perf_counter()
        await asyncio.gather(*(large.run(busy) for _ in range(4)))
        return most, perf_counter() - began

    together, seconds = asyncio.run(work())
    assert together == [1, 1, 1, 1]
    assert seconds > 3 * 0.05 / 0.2  # the last one's rest is not waited for


def test_work_that_fails_makes_way():
    async def work() -> str:
        large = OneByOne(0.2)
        with pytest.raises(ZeroDivisionError):
            await large.run(lambda: 1 / 0)
        return await large.run(lambda: "next")

    assert asyncio.run(work()) == "next"


def test_probes_are_answered_while_large_bodies_are_parsed(client: Client, monkeypatch):
    """A body that takes long keeps no other request waiting."""
    parse, began, answered = bodies.JsonBody.parse, threading.Event(), threading.Event()

    def slow(self, raw):
        if len(raw) > bodies.LARGE_BYTES:
            began.set()
            assert answered.wait(20)
        return parse(self, raw)

    monkeypatch.setattr(bodies.JsonBody, "parse", slow)
    with httpx.Client(base_url=client.http.base_url, timeout=20) as other:
        sender = threading.Thread(target=other.post, args=["/tokenize"], kwargs={"json": {"prompt": "x" * 100_000}})
        sender.start()
        assert began.wait(10)
        assert client.post("/v1/completions", prompt="x", max_tokens=3).status_code == 200
        answered.set()
        sender.join()


def test_hanging_up_gives_no_turn_to_others_before_the_thread_is_done(client: Client, monkeypatch):
    """And who hangs up before its turn has none."""
    began, goes_on, running, most, started = threading.Semaphore(0), threading.Event(), [], [], []

    def slow(body, model):
        running.append(body)
        most.append(len(running))
        began.release()
        assert goes_on.wait(20)
        running.remove(body)
        return requests.completion_batch(body, model)

    monkeypatch.setattr("jaxspec.server.openai.api.completion_batch", slow)
    monkeypatch.setattr("jaxspec.server.streaming.start", lambda *given: started.append(given) or start(*given))
    body = {"prompt": "x", "max_tokens": 1, "user": "x" * bodies.LARGE_BYTES}
    for number in range(3):
        with send(client, COMPLETIONS, body):
            assert began.acquire(timeout=10) if number == 0 else not began.acquire(timeout=0.5)
    with send(client, COMPLETIONS, body) as connection:
        assert not began.acquire(timeout=0.5)
        goes_on.set()
        receive(connection, b'"text":"T"')
    assert most == [1, 1]
    assert len(started) == 1  # a request whose client has left does not start


@pytest.mark.parametrize("run", [OneByOne().run, run_in_threadpool])
def test_a_request_whose_client_hung_up_ends_with_its_thread(run):
    ended = []

    async def work() -> None:
        await run(lambda: time.sleep(0.4) or ended.append(True))
        await asyncio.sleep(20)

    async def hang_up() -> None:
        with pytest.raises(ClientDisconnected):
            await unless_disconnected(Request({"type": "http"}, Connection([]).receive), work())
        assert ended

    asyncio.run(hang_up())
