"""What happens while an answer is on its way: clients that hang up or read slowly, and an engine that fails."""

import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from jaxspec.server.settings import ServerSettings
from tests.server.conftest import BODIES, GENERATE, MESSAGES, RESPONSES, Client, asking, served, wait_until
from tests.server.fakes import TEXT, FakeEngine, SlowEngine

LATE = "the request was not finished in time: ask for fewer tokens, or try again later"


def send(client: Client, path: str, body: dict) -> socket.socket:
    """Posts over a bare socket, which can be closed at any moment."""
    connection = client.connect()
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def receive(connection: socket.socket, until: bytes) -> bytes:
    """What comes up to these bytes; fails if the connection ends before."""
    received = b""
    while until not in received:
        part = connection.recv(65536)
        assert part, received
        received += part
    return received


@contextmanager
def in_mid_stream(client: Client, path: str) -> Iterator[socket.socket]:
    """A stream that has begun, when the engine stands still again."""
    client.engine.allow(0)
    with send(client, path, asking(path, 50) | {"stream": True}) as connection:
        wait_until(lambda: client.engine.running == 1)
        client.engine.allow(1)
        yield connection


def wait_for_aborts(client: Client, count: int) -> None:
    """The engine goes on slowly: it must hear of the aborts long before the requests are finished."""
    for _ in range(20):
        client.engine.allow(1)
        time.sleep(0.05)
        if len(client.engine.aborted) == count:
            break
    assert len(client.engine.aborted) == count
    assert client.engine.running == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_hanging_up_aborts_the_request(client: Client, path: str, stream: bool):
    """Before the first token, streamed or not."""
    client.engine.allow(0)
    with send(client, path, asking(path, 50) | {"stream": stream}):
        wait_until(lambda: client.engine.running == 1)
    wait_for_aborts(client, 1)


@pytest.mark.parametrize("path", BODIES)
def test_hanging_up_in_mid_stream_aborts_the_request(client: Client, path: str):
    with in_mid_stream(client, path) as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK")
    wait_for_aborts(client, 1)


def test_hanging_up_on_several_prompts_aborts_all(client: Client):
    client.engine.allow(0)
    with send(client, "/v1/completions", {"prompt": ["a", "b", "c"], "max_tokens": 50}):
        wait_until(lambda: client.engine.running == 3)
    wait_for_aborts(client, 3)


def test_text_comes_while_it_is_made(client: Client):
    client.engine.allow(0)
    with send(client, "/v1/completions", {"prompt": "hello", "max_tokens": 63 - 5, "stream": True}) as connection:
        wait_until(lambda: client.engine.running == 1)
        client.engine.allow(3)
        received = receive(connection, b'"text":"he"')  # the second event, while the engine stands still
        assert b"[DONE]" not in received
        client.engine.allow(math.inf)
        receive(connection, b"[DONE]")


def test_one_client_does_not_wait_for_another(client: Client):
    """A client that does not read what it gets: others are answered meanwhile."""
    with send(client, "/generate", {"text": ["hello"] * 200, "sampling_params": {"max_new_tokens": 59}, "stream": True}):
        wait_until(lambda: len(client.engine.params) == 200)
        assert client.post("/v1/completions", prompt="x", max_tokens=5).json()["choices"][0]["text"] == TEXT[:5]


def test_if_one_prompt_is_refused_none_runs(client: Client):
    assert client.post("/v1/completions", prompt=[[1], [2], [999]], stream=True).status_code == 400
    assert len(client.engine.params) == 2  # the engine took the first two ...
    assert len(client.engine.withdrawn) == 2  # ... and gave them back before it did a step


@pytest.mark.parametrize("path", BODIES)
def test_a_failing_step_is_a_500_without_details(client: Client, path: str):
    client.engine.failures = 1
    response = client.post(path, **BODIES[path], stream=True)
    assert response.status_code == 500
    assert list(response.json()) == (["type", "error"] if path == MESSAGES else ["error"])
    error = response.json()["error"]
    assert error["type"] == ("api_error" if path == MESSAGES else "server_error")
    assert "engine" in error["message"] and "secret" not in response.text and "Traceback" not in response.text
    assert client.post(path, **BODIES[path]).status_code == 200


TOLD = dict.fromkeys(BODIES, ('data: {"error":{"message":"SAID', "data: [DONE]\n\n")) | {
    RESPONSES: ("event: response.failed\ndata: ", '"status":"failed"', '"error":{"code":"server_error","message":"SAID'),
    MESSAGES: ('event: error\ndata: {"type":"error","error":{"type":"KIND","message":"SAID',),
}
"""What begins the event that tells of a failure, and what comes after."""


@pytest.mark.parametrize(
    ("reason", "said", "kind"),
    [("error", "the engine failed", "api_error"), ("timeout", LATE, "timeout_error")],
    ids=["error", "timeout"],
)
@pytest.mark.parametrize("path", BODIES)
def test_what_fails_in_mid_stream(client: Client, path: str, reason: str, said: str, kind: str):
    """The status is out already: the error is an event, and the stream ends in order."""
    with in_mid_stream(client, path) as connection:
        received = receive(connection, b"data: ")
        client.engine.ends_with = reason
        client.engine.allow(math.inf)
        received += receive(connection, b"\r\n0\r\n\r\n")
    text = received.decode()
    first, *others = [part.replace("SAID", said).replace("KIND", kind) for part in TOLD[path]]
    _, found, behind = text.partition(first)
    assert text.startswith("HTTP/1.1 200 OK") and found and all(part in behind for part in others) and "secret" not in text
    assert behind.count("data: ") == (path not in (RESPONSES, MESSAGES))


def test_one_that_fails_does_not_end_the_others(client: Client):
    with in_mid_stream(client, GENERATE) as first:
        receive(first, b'"text":"T"')
        with send(client, "/v1/completions", asking("/v1/completions", 50) | {"stream": True}) as second:
            time.sleep(0.1)  # it waits for admission: the engine stands in its second step
            client.engine.allow(1)
            wait_until(lambda: client.engine.running == 2)
            client.engine.ends_with = "error"
            client.engine.allow(math.inf)
            assert b'{"error":{"message":"the engine failed' in receive(first, b"[DONE]")
            assert b'"error"' not in receive(second, b"[DONE]")


@pytest.mark.parametrize("path", BODIES)
def test_running_out_of_time_is_a_504(client: Client, path: str):
    """Nothing asks for a limit yet; if the engine's owner sets one, an answer without a finish_reason would be no answer."""
    client.engine.ends_with = "timeout"
    response = client.post(path, **BODIES[path])
    assert response.status_code == 504
    error = response.json()["error"]
    assert error["type"] == ("timeout_error" if path == MESSAGES else "server_error")
    assert error["message"] == LATE


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_full_queue_is_a_503_that_says_when_to_come_back(client: Client, path: str, stream: bool):
    client.engine.room = 0
    response = client.post(path, **BODIES[path], stream=stream)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    error = response.json()["error"]
    assert (error["type"], error.get("code", 503)) == ("overloaded_error" if path == MESSAGES else "server_error", 503)
    assert "--max-queued-requests is 0: try again" in error["message"]


def test_a_full_queue_takes_all_prompts_or_none(client: Client):
    client.engine.room = 2
    assert client.post("/v1/completions", prompt=["a", "b", "c"]).status_code == 503
    assert len(client.engine.withdrawn) == 2
    assert client.post("/v1/completions", prompt="a", n=3).status_code == 503
    assert len(client.engine.withdrawn) == 4
    assert client.post("/v1/completions", prompt=["a", "b"]).status_code == 200


def test_a_broken_engine(caplog: pytest.LogCaptureFixture):
    """What runs gets a 500; what comes later a 503, as does /health."""
    engine = FakeEngine()
    engine.crash = RuntimeError("secret")
    with served(engine=engine) as client:
        first, second = (client.post("/v1/completions", prompt="x") for _ in range(2))
        health, flush = client.http.get("/health"), client.http.post("/flush_cache")
    assert [response.status_code for response in (first, second, health, flush)] == [500, 503, 503, 503]
    assert second.headers["retry-after"] == "1" and "restart the server" in second.json()["error"]["message"]
    assert engine.steps == 1
    assert "secret" not in first.text + second.text and "secret" in caplog.text


def test_what_runs_when_the_server_ends_gets_an_error():
    """Not a cut connection: the stream ends in order, once the time to drain is over."""
    received: list[str] = []
    first = threading.Event()

    def read(url: httpx.URL) -> None:
        with httpx.stream("POST", url.join(GENERATE), json={"text": "hello", "stream": True}, timeout=20) as response:
            for line in response.iter_lines():
                received.append(line)
                first.set()

    with served(ServerSettings(shutdown_timeout=0.3), engine=SlowEngine()) as client:
        reader = threading.Thread(target=read, args=[client.http.base_url])
        reader.start()
        assert first.wait(20)
    reader.join(20)
    events = [line for line in received if line]
    assert 3 < len(events) < 25  # it went on for a while, but not to its end
    assert json.loads(events[-2].removeprefix("data: "))["error"]["message"] == "the server is shutting down"
    assert events[-1] == "data: [DONE]"
