"""A real HTTP server over the fake engine, on a free port: tests are its clients."""

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import pytest

from jaxspec.config import PLAIN
from jaxspec.engine.driver import EngineThread
from jaxspec.serve import listen, url_of
from jaxspec.server.app import create_app
from jaxspec.server.http_server import HttpServer
from jaxspec.server.metrics import RequestCollector, StepTimes
from jaxspec.server.model import ServedModel
from jaxspec.server.settings import ServerSettings
from jaxspec.text.answer_parser import REASONING_FORMATS
from jaxspec.text.chat_template import ChatTemplate
from jaxspec.text.tool_formats import TOOL_FORMATS
from tests.server.fakes import CONTEXT, TOOL_TEMPLATE, TREE, FakeEngine, byte_tokenizer


@dataclass
class Client:
    """An HTTP client of a server, and the engine behind it."""

    http: httpx.Client
    engine: FakeEngine

    def post(self, path: str, **body) -> httpx.Response:
        return self.http.post(path, json=body)

    def events(self, path: str, **body) -> list[dict]:
        """The events of a stream, which must end with [DONE]."""
        response = self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        *events, done, rest = response.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def typed_events(self, path: str, **body) -> list[dict]:
        """The events of a stream whose types are in lines of their own."""
        response = self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return parsed(response.text)


def parsed(text: str) -> list[dict]:
    """The typed events of a stream that has ended."""
    *events, rest = text.split("\n\n")
    assert rest == ""
    found = []
    for event in events:
        kind, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    return found


@contextlib.contextmanager
def serving(engine: FakeEngine, model: ServedModel, settings: ServerSettings | None = None) -> Iterator[str]:
    """Runs a server in a thread; yields its URL."""
    ready = threading.Event()
    metrics, steps = RequestCollector(model.name), StepTimes()
    engine_thread = EngineThread(engine, [metrics, steps])
    server = HttpServer(create_app(engine_thread, model, settings, metrics=metrics, steps=steps), engine_thread, ready.set)
    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            assert ready.wait(20)
            yield url_of(listener)
        finally:
            server.should_exit = True
            thread.join(20)
            engine_thread.close()
            if model.chat_template is not None:
                model.chat_template.close()
    assert not thread.is_alive()


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    """Fails if the condition does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def shared_tools() -> Iterator[Client]:
    """A server whose model thinks and calls tools. Its answers end before the character 0, which is none of the client's stops."""
    engine, tokenizer = FakeEngine(), byte_tokenizer(TOOL_TEMPLATE)
    model = ServedModel(
        "fake", 4096, TREE, tokenizer, ChatTemplate.of_model(tokenizer, stop=("\x00",)),
        tool_format=TOOL_FORMATS["hermes"], reasoning=REASONING_FORMATS["qwen3"],
    )  # fmt: skip
    with serving(engine, model) as url, httpx.Client(base_url=url, timeout=20) as http:
        yield Client(http, engine)


@pytest.fixture
def caller(shared_tools: Client) -> Iterator[Client]:
    """Such a server, idle afterwards."""
    shared_tools.engine.params.clear()
    shared_tools.engine.prompts.clear()
    shared_tools.engine.aborted.clear()
    yield shared_tools
    shared_tools.engine.allow(math.inf)
    shared_tools.engine.cached_tokens = 0
    wait_until(lambda: not shared_tools.engine.running)


@pytest.fixture(scope="session")
def shared() -> Iterator[Client]:
    engine = FakeEngine()
    tokenizer = byte_tokenizer()
    model = ServedModel("fake", CONTEXT, TREE, tokenizer, ChatTemplate.of_model(tokenizer), (TREE, PLAIN), algorithm="EAGLE3")
    with serving(engine, model) as url, httpx.Client(base_url=url, timeout=20) as http:
        yield Client(http, engine)


@pytest.fixture
def client(shared: Client) -> Iterator[Client]:
    """Whatever a test does to the server, afterwards it is idle and answers."""
    shared.engine.params.clear()
    shared.engine.priorities.clear()
    shared.engine.salts.clear()
    shared.engine.aborted.clear()
    yield shared
    shared.engine.allow(math.inf)
    shared.engine.failures = 0
    shared.engine.room = math.inf
    shared.engine.cached_tokens = 0
    wait_until(lambda: not shared.engine.running)
    answer = shared.post("/v1/completions", prompt="after", max_tokens=3)
    assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "The")
