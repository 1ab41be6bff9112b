"""How connections begin and end: malformed HTTP, and what a server says while it shuts down."""

import contextlib
import json
import math
import resource
import signal
import socket
import threading
import time
from concurrent.futures import Future
from typing import Any, ClassVar

import httpx
import pytest

from jaxspec.engine import hosts
from jaxspec.engine.hosts import STOP_SIGNAL
from jaxspec.serve import listen
from jaxspec.server import http_server
from jaxspec.server.model import ServedModel
from jaxspec.server.settings import ServerSettings
from tests.server.conftest import Client, ServerThread, served, wait_until
from tests.server.fakes import CONTEXT, TREE, FakeEngine, byte_tokenizer

GET = b"GET /health HTTP/1.1\r\nHost: test\r\n"


def answer_to(client: Client, sent: bytes) -> bytes:
    """Everything that comes until the connection is closed."""
    received = b""
    with client.connect() as connection:
        connection.sendall(sent)
        try:
            while part := connection.recv(65536):
                received += part
        except ConnectionResetError:  # it was closed before all was read
            pass
    return received


def test_requests_for_http_2_leave_no_line_in_the_log(client: Client, caplog: pytest.LogCaptureFixture):
    upgrade = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    assert answer_to(client, GET + upgrade + b"\r\n" + GET + b"connection: close\r\n\r\n").count(b"HTTP/1.1 200 ") == 2
    assert answer_to(client, GET + b"connection: upgrade, close\r\nupgrade: websocket\r\n\r\n").startswith(b"HTTP/1.1 200 ")
    assert answer_to(client, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert not caplog.records


@pytest.mark.parametrize(("path", "status"), [("/health", 200), ("/v1/models", 200), ("/generate", 405)])
def test_head_gets_the_headers_of_get(client: Client, path: str, status: int):
    """Some load balancers probe with it."""
    answer = answer_to(client, b"HEAD %s HTTP/1.1\r\nHost: test\r\nconnection: close\r\n\r\n" % path.encode())
    headers, _, body = answer.partition(b"\r\n\r\n")
    assert f'path="{path}",status="{status // 100}xx"' in client.http.get("/metrics").text
    assert headers.startswith(b"HTTP/1.1 %d " % status) and body == b""


@pytest.mark.parametrize(
    "sent",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 9 + b"\r\n\r\n",  # TLS
        b"GET /health HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET /version HTTP/1.1\r\nHost: x y\r\n\r\n",
        GET + b"x: " + b"x" * 2**17,
        GET + b"".join(b"x%d: y\r\n" % number for number in range(20_000)) + b"\r\n",
        b"GET /" + b"x" * 2**17 + b" HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        GET + b"content-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: test\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + GET + b"\r\n",
    ],
    ids=lambda sent: repr(sent[:20]),
)
def test_malformed_http_gets_an_error_in_the_one_shape(client: Client, sent: bytes):
    head, _, body = answer_to(client, sent).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"content-type: application/json" in head.lower()
    error = json.loads(body)["error"]  # the only answer, whatever follows
    assert (error["code"], error["message"]) == (400, "malformed HTTP request, or headers larger than 64 KiB")


@pytest.mark.parametrize("pause", [0, 0.2])
def test_a_malformed_body_of_a_refused_request_is_answered_once(client: Client, caplog: pytest.LogCaptureFixture, pause: float):
    with client.connect() as connection:
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n" + b"Z\r\n" * (not pause))
        time.sleep(pause)
        connection.sendall(b"Z\r\n" * bool(pause))
        received = connection.recv(65536) + connection.recv(65536)
    assert received.count(b"HTTP/1.1 4") == 1 and received.startswith(b"HTTP/1.1 415 " if pause else b"HTTP/1.1 400 ")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("target", ["http://test/health", "HTTP://other:80/health?x=1", "http://test/nothing"])
def test_a_target_may_be_a_whole_url(client: Client, target: str):
    """RFC 9112, section 3.2.2: servers must accept what clients send to proxies."""
    answer = answer_to(client, f"GET {target} HTTP/1.1\r\nHost: test\r\nconnection: close\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 404 " if "nothing" in target else b"HTTP/1.1 200 ")


def test_the_host_of_a_whole_url_counts(client: Client):
    """Or a page of another origin could name the server's own in the header."""
    sent = b"GET http://%s/v1/models HTTP/1.1\r\nHost: test\r\nOrigin: http://test\r\nconnection: close\r\n\r\n"
    assert answer_to(client, sent % b"other").startswith(b"HTTP/1.1 403 ")
    assert answer_to(client, sent % b"test").startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("host", ["", "a_b.c-d:80", "[::1]:30000", "127.0.0.1", "xn--bcher-kva.example"])
def test_hosts_have_names_and_addresses(client: Client, host: str):
    assert answer_to(client, f"GET /health HTTP/1.1\r\nHost: {host}\r\nconnection: close\r\n\r\n".encode()).startswith(
        b"HTTP/1.1 200 "
    )


def test_empty_lines_may_come_before_a_request(client: Client):
    with client.connect() as connection:
        for sent in (b"\r\n", b"\r\n\n" + GET + b"connection: close\r\n\r\n"):
            connection.sendall(sent)
            time.sleep(0.1)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("rest", [b"", b"\r\n"], ids=["incomplete", "complete"])
def test_headers_that_come_at_once_are_measured_too(client: Client, rest: bytes):
    """h11's own limit looks only at what is incomplete."""
    sent = GET + b"".join(b"x%d: %s\r\n" % (number, b"y" * 1000) for number in range(100)) + b"\r\n" + rest
    assert answer_to(client, sent).startswith(b"HTTP/1.1 400 ")


POST = b"POST %s HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(GET, id="half"),
        pytest.param(b"GET /version HTTP/1.1\r\nHost: test\r\n\r\n" + GET, id="a second half", marks=pytest.mark.variants),
    ],  # the last takes uvicorn's five seconds between requests
)
def test_headers_must_come_in_time(client: Client, monkeypatch, sent: bytes):
    monkeypatch.setattr(http_server, "HEADER_SECONDS", 0.5)
    started = time.monotonic()
    answer_to(client, sent)
    assert 0.3 < time.monotonic() - started < 8


def test_a_body_may_take_longer_than_headers(client: Client, monkeypatch):
    monkeypatch.setattr(http_server, "HEADER_SECONDS", 0.3)
    body = b'{"prompt": "x"}'
    head = POST % (b"/tokenize", len(body))
    with client.connect() as connection:
        connection.sendall(head)
        time.sleep(0.6)
        connection.sendall(body)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_unused_connections_make_way_for_new_ones(monkeypatch):
    """Whoever opens connections and says nothing, or never ends a request, keeps nobody out."""
    monkeypatch.setattr(http_server, "MAX_UNUSED", 5)
    with served() as client, contextlib.ExitStack() as stack:
        client.engine.allow(0)
        running = stack.enter_context(client.connect())
        body = b'{"prompt": "x", "max_tokens": 3}'
        head = POST % (b"/v1/completions", len(body))
        running.sendall(head + body)
        wait_until(lambda: client.engine.running == 1)
        idle = [stack.enter_context(client.connect()) for _ in range(20)]
        for number, connection in enumerate(idle):
            with contextlib.suppress(OSError):
                connection.sendall((b"", GET, head, head + body[:5])[number % 4])
        assert client.http.get("/health").status_code == 200
        client.engine.allow(math.inf)
        assert running.recv(65536).startswith(b"HTTP/1.1 200 ")  # one that runs a request is never closed
        idle[0].settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert idle[0].recv(1) == b""


@pytest.mark.parametrize(("files", "most"), [(resource.RLIM_INFINITY, 1000), (10**6, 1000), (256, 128)])
def test_as_many_connections_may_be_unused_as_there_are_files_for(monkeypatch, files: int, most: int):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert http_server.most_unused() == most


def test_a_second_request_without_its_end_makes_way_too(monkeypatch):
    monkeypatch.setattr(http_server, "MAX_UNUSED", 2)
    with served() as client, contextlib.ExitStack() as stack:
        connections = []
        for _ in range(4):
            connections.append(connection := stack.enter_context(client.connect()))
            connection.sendall(GET + b"\r\n" + POST % (b"/tokenize", 9))
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        connections[0].settimeout(3)
        with contextlib.suppress(ConnectionResetError):
            assert connections[0].recv(1) == b""


@pytest.mark.parametrize("kept", ["close", "keep-alive"])
def test_clients_that_do_not_read_are_hung_up_on(monkeypatch, kept: str):
    monkeypatch.setattr(http_server, "READ_SECONDS", 0.5)
    with ServerThread(FakeEngine(), ServedModel("fake", CONTEXT, TREE, byte_tokenizer())) as running, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(running.address)
        body = json.dumps({"prompt": 2**20 * "x", "return_token_strs": True}).encode()  # an answer of 9 MB
        head = POST % (b"/tokenize", len(body))
        client.sendall(head.replace(b"\r\n\r\n", b"\r\nConnection: %s\r\n\r\n" % kept.encode()) + body)
        assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
        [connection] = running.server.server_state.connections
        wait_until(lambda: connection in connection._unused)  # type: ignore[union-attr]
        wait_until(lambda: not running.server.server_state.connections)
        assert not connection._unused  # type: ignore[union-attr]


def test_clients_that_read_slowly_get_all(monkeypatch):
    monkeypatch.setattr(http_server, "READ_SECONDS", 1.0)
    with served() as client, client.connect() as connection:
        body = json.dumps({"prompt": 2**20 * "x", "return_token_strs": True}).encode()
        connection.sendall(POST.replace(b"Host", b"Connection: close\r\nHost") % (b"/tokenize", len(body)) + body)
        received = b""
        while part := connection.recv(2**18):
            received += part
            time.sleep(0.1)
        assert len(received) > 2**23 and received.endswith(b"}")


def test_the_address_in_the_log_is_the_clients_own(client: Client, caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO"):
        client.http.get("/v1/models", headers={"x-forwarded-for": "6.6.6.6"})
    assert "127.0.0.1" in caplog.text and "6.6.6.6" not in caplog.text


def test_headers_of_usual_size_pass(client: Client):
    response = client.http.get("/health", headers={f"x-{number}": "y" * 1000 for number in range(50)})
    assert response.status_code == 200


def test_websockets_are_not_taken(client: Client):
    headers = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13", "sec-websocket-key": "x" * 22 + "=="}
    assert client.http.get("/health", headers=headers).status_code == 200


class Draining(ServerThread):
    """A server that shuts down while a request runs."""

    params: ClassVar[dict[str, Any]] = {}

    def __init__(self, shutdown_timeout: float):
        model, settings = ServedModel("fake", CONTEXT, TREE, byte_tokenizer()), ServerSettings(shutdown_timeout=shutdown_timeout)
        self.fake = FakeEngine()
        super().__init__(self.fake, model, settings)
        self.answers: list[httpx.Response] = []
        self.client = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        self.answers.append(httpx.post(f"{self.url}/generate", json={"text": "x", "sampling_params": self.params}, timeout=20))

    def __enter__(self) -> "Draining":
        super().__enter__()
        self._begin()
        self.server.should_exit = True
        wait_until(lambda: httpx.get(f"{self.url}/health").status_code == 503)
        return self

    def _begin(self) -> None:
        self.fake.allow(0)
        self.client.start()
        wait_until(lambda: self.fake.running == 1)
        self.fake.allow(1)
        wait_until(lambda: self.engine.stats.running == 1)

    def __exit__(self, *_: object) -> None:
        self.fake.allow(999)
        self.client.join(20)
        super().__exit__()
        assert not self.client.is_alive()


def test_a_port_is_free_at_once_after_a_server_that_closed_its_connections():
    with Draining(shutdown_timeout=20) as draining:
        address = draining.address
        with socket.create_connection(address) as client:
            client.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            while client.recv(4096):
                pass
    listen(*address).close()


def test_what_runs_may_finish_while_others_go_elsewhere():
    with Draining(shutdown_timeout=20) as draining:
        url = draining.url
        refused = [
            *(httpx.get(f"{url}/{path}") for path in ("health", "ready", "ping", "health_generate")),
            httpx.post(f"{url}/v1/completions", json={"prompt": "x"}),
            httpx.post(f"{url}/generate", json={"text": "x", "stream": True}),
        ]
        assert httpx.get(f"{url}/version").status_code == 200
    [answer] = draining.answers
    assert (answer.status_code, answer.json()["meta_info"]["finish_reason"]["type"]) == (200, "length")
    for response in refused:
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["message"] == "the server is shutting down"


def test_after_the_time_to_drain_the_rest_gets_an_error():
    with Draining(shutdown_timeout=0.5) as draining:
        time.sleep(0.6)
        draining.fake.allow(1)
    [answer] = draining.answers
    assert answer.status_code == 503 and "shutting down" in answer.text


class Compiling(Draining):
    """The grammar of its request compiles when the signal comes."""

    params: ClassVar = {"regex": "a"}

    def _begin(self) -> None:
        asked: list[object] = []
        self.compiled: Future[None] = Future()
        self.engine.compile = lambda each: asked.append(each) or self.compiled  # type: ignore[method-assign,func-returns-value]
        self.server.config.timeout_graceful_shutdown = 0
        self.client.start()
        wait_until(lambda: bool(asked))


def test_what_the_engine_does_not_have_yet_may_finish_too():
    with Compiling(shutdown_timeout=20) as draining:
        time.sleep(0.2)
        draining.compiled.set_result(None)
    assert [answer.status_code for answer in draining.answers] == [200]


def test_an_idle_server_ends_at_once():
    with served(ServerSettings(shutdown_timeout=60)):
        started = time.monotonic()
    assert time.monotonic() - started < 5


class HungUp(Draining):
    """The server closes the connection of its client."""

    def _ask(self) -> None:
        with pytest.raises(httpx.HTTPError):
            super()._ask()


@pytest.mark.parametrize(
    ("numbers", "seconds", "forces"),
    [
        (["SIGTERM", "SIGTERM"], 9, False),
        (["SIGTERM", "SIGTERM"], 0, True),
        (["SIGINT", "SIGINT"], 9, True),
        ([STOP_SIGNAL.name, "SIGINT"], 0, False),
        (["SIGTERM", STOP_SIGNAL.name, STOP_SIGNAL.name], 0, False),
    ],
)
def test_what_counts_as_a_second_signal(monkeypatch, numbers: list[str], seconds: float, forces: bool):
    """systemd tells every process of a service, and a group of servers tells its own; two SIGINT come from a person. Other hosts
    that were told to end are not this one's operator."""
    monkeypatch.setattr(hosts, "SAME_SIGTERM", seconds)
    server: Any = http_server.HttpServer(None, None, None)  # type: ignore[arg-type]
    for number in numbers:
        time.sleep(0.001)
        server.handle_exit(signal.Signals[number], None)
    assert (server.should_exit, server.force_exit) == (True, forces)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_everything_at_once(number: signal.Signals, monkeypatch):
    monkeypatch.setattr(hosts, "SAME_SIGTERM", 0)
    with HungUp(shutdown_timeout=60) as draining:
        for _ in range(2):
            draining.server.handle_exit(number, None)
        draining.thread.join(5)
        assert not draining.thread.is_alive()
        assert not draining.engine.is_healthy
