"""A real HTTP server over the fake engine, on a free port: tests are its clients."""

import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import httpx
import pytest

from jaxspec.engine.driver import EngineThread
from jaxspec.serve import listen, url_of
from jaxspec.server.app import create_app
from jaxspec.server.http_server import HttpServer
from jaxspec.server.metrics import RequestCollector, StepTimes
from jaxspec.server.model import ServedModel
from jaxspec.server.sampling_fields import SGLANG_NAMES
from jaxspec.server.settings import ServerSettings
from jaxspec.text.answer_parser import REASONING_FORMATS
from jaxspec.text.chat_template import ChatTemplate
from jaxspec.text.tool_formats import TOOL_FORMATS
from jaxspec.tree_shape import PLAIN
from tests.server.fakes import CHAT_TEMPLATE, CONTEXT, TOOL_TEMPLATE, TREE, FakeEngine, byte_tokenizer

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USER = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hello"},
    CHAT: {"messages": USER},
    GENERATE: {"text": "hello"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": USER, "max_tokens": 9},
}
"""What each endpoint needs to generate."""


def asking(path: str, tokens: int, **params: Any) -> dict[str, Any]:
    """A body that asks for so many tokens. `params`: other sampling parameters, by our names."""
    if path == GENERATE:
        given = {SGLANG_NAMES[name]: value for name, value in {"max_tokens": tokens, **params}.items()}
        return BODIES[path] | {"sampling_params": given}
    return BODIES[path] | {"max_output_tokens" if path == RESPONSES else "max_tokens": tokens} | params


@dataclass
class Client:
    """An HTTP client of a server, and the engine after it."""

    http: httpx.Client
    engine: FakeEngine

    def post(self, path: str, **body) -> httpx.Response:
        return self.http.post(path, json=body)

    def post_text(self, path: str, body: bytes | str | Iterator[bytes]) -> httpx.Response:
        """Posts what is declared as JSON."""
        return self.http.post(path, content=body, headers={"content-type": "application/json"})

    def connect(self) -> socket.socket:
        """A bare connection, which can be closed at any moment."""
        return socket.create_connection((self.http.base_url.host, self.http.base_url.port), timeout=20)

    def events(self, path: str, **body) -> list[dict]:
        """The events of a stream: with their types in lines of their own, where they have types, or [DONE] at the end."""
        response, is_typed = self.post(path, stream=True, **body), path in (RESPONSES, MESSAGES)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        *lines, rest = response.text.split("\n\n")
        assert rest == "" and (is_typed or lines.pop() == "data: [DONE]")
        parts = [line.partition("data: ") for line in lines]
        events = [json.loads(data) for _, _, data in parts]
        assert [kind for kind, _, _ in parts] == [f"event: {event['type']}\n" if is_typed else "" for event in events]
        return events


class ServerThread:
    """A server in a thread."""

    def __init__(self, engine: FakeEngine, model: ServedModel, settings: ServerSettings | None = None):
        self._ready = threading.Event()
        metrics, steps = RequestCollector(model.name), StepTimes()
        self.engine = EngineThread(engine, [metrics, steps])
        app = create_app(self.engine, model, settings, metrics=metrics, steps=steps)
        self.server = HttpServer(app, self.engine, self._ready.set)
        self._listener = listen("127.0.0.1", 0)
        self.url, self.address = url_of(self._listener), self._listener.getsockname()
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self._listener]}, daemon=True)
        self.thread.start()

    def __enter__(self) -> Self:
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        self.engine.close()
        self._listener.close()
        assert not self.thread.is_alive()


@contextlib.contextmanager
def serving(engine: FakeEngine, model: ServedModel, settings: ServerSettings | None = None) -> Iterator[str]:
    """Runs a server; yields its URL."""
    with contextlib.ExitStack() as stack:
        if model.chat_template is not None:
            stack.enter_context(model.chat_template)
        yield stack.enter_context(ServerThread(engine, model, settings)).url


@contextlib.contextmanager
def served(
    settings: ServerSettings | None = None, *, engine: FakeEngine | None = None, template: str | None = None, **fields: Any
) -> Iterator[Client]:
    """A client of a server of its own. `fields`: of its model."""
    model = {"name": "fake", "context_length": CONTEXT, "tree": TREE, "tokenizer": byte_tokenizer(template), **fields}
    if "chat_template" not in model:
        model["chat_template"] = ChatTemplate.of_model(model["tokenizer"])
    engine = engine or FakeEngine()
    with serving(engine, ServedModel(**model), settings) as url, httpx.Client(base_url=url, timeout=20) as http:
        yield Client(http, engine)


def wait_until(condition: Callable[[], bool]) -> None:
    """Fails if the condition does not come true in time."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def shared_tools() -> Iterator[Client]:
    """A server whose model thinks and calls tools. Its answers end before the character 0, which is none of the client's stops."""
    template = ChatTemplate(TOOL_TEMPLATE, {}, "test", stop=("\x00",))
    formats = {"tool_format": TOOL_FORMATS["hermes"], "reasoning": REASONING_FORMATS["qwen3"]}
    with served(context_length=4096, chat_template=template, **formats) as client:
        yield client


def lent(shared: Client) -> Iterator[Client]:
    """A server whose engine has noted nothing yet. Whatever a test does to it, afterwards it is idle."""
    engine = shared.engine
    for noted in (engine.params, engine.prompts, engine.priorities, engine.salts, engine.aborted, engine.withdrawn):
        noted.clear()
    yield shared
    engine.allow(math.inf)
    engine.failures, engine.room, engine.cached_tokens = 0, math.inf, 0
    wait_until(lambda: not engine.running)


@pytest.fixture
def caller(shared_tools: Client) -> Iterator[Client]:
    yield from lent(shared_tools)


@pytest.fixture(scope="session")
def shared() -> Iterator[Client]:
    with served(template=CHAT_TEMPLATE, trees=(TREE, PLAIN), algorithm="EAGLE3") as client:
        yield client


@pytest.fixture
def client(shared: Client) -> Iterator[Client]:
    """Such a server, which still answers afterwards."""
    yield from lent(shared)
    answer = shared.post(COMPLETIONS, prompt="after", max_tokens=3)
    assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "The")
