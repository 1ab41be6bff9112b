"""A headless chromium and what it visits: pages of servers."""

import contextlib
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn

from jaxspec.serve import listen, url_of
from tests.browser.mock_server import create_mock

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


SIZES = {"desk": (1280, 800), "phone": (390, 844)}
NAMES = """const { state } = modules['state.js'], { byId, make } = modules['dom.js'], { selectCycle } = modules['cycles.js'],
    { addEvent } = modules['runs.js'];"""
"""What scripts of tests may call by its name, of what the page's modules export."""


def lacks(request: pytest.FixtureRequest, what: str) -> None:
    (pytest.fail if request.config.getoption("--require-clients") else pytest.skip)(f"{what} is not installed")


@pytest.fixture(scope="package")
def axe_core(request: pytest.FixtureRequest) -> str:
    """The script of axe-core."""
    try:
        return (files("axe_playwright_python") / "axe.min.js").read_text("utf-8")
    except ImportError:
        lacks(request, "axe-playwright-python (from PyPI)")
        raise


@pytest.fixture(scope="package")
def browser(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Package scope: while Playwright's loop lives in this thread, no other can, and other tests have one."""

    program = shutil.which("chromium")
    if program is None:
        lacks(request, "chromium (Debian's package)")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        lacks(request, "playwright (from PyPI)")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=FLAGS)  # a fresh profile each time
        yield chromium
        chromium.close()


@dataclass
class Visit:
    """A tab, and what must not happen in it."""

    page: Any
    url: str
    folder: Path
    """For screenshots."""
    complaints: list[str] = field(default_factory=list)
    """Errors and warnings of the console, and exceptions."""
    foreign: list[str] = field(default_factory=list)
    """Requests to other hosts."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Of its requests for answers."""

    def until(self, script: str, seconds: float = 60) -> None:
        """Waits until the script is true. (Playwright's own waiting evaluates strings in the page, which its policy forbids.)"""
        deadline = time.monotonic() + seconds
        while not self.evaluate(script):
            assert time.monotonic() < deadline, f"it did not come true: {script}"
            time.sleep(0.02)

    def reload(self) -> None:
        """Loads the page again, and waits for what it asks the server."""
        self.page.reload()
        self.until("state.card !== null")

    def expect_complaints(self, part: str) -> None:
        """The complaints so far all have this in them, and are forgotten."""
        assert all(part in complaint for complaint in self.complaints)
        self.complaints.clear()

    def ask(self, text: str) -> None:
        """Asks with the keyboard, and waits for the end of the answer."""
        self.type(text)
        self.until_idle()

    def type(self, text: str) -> None:
        """Types into the box and sends."""
        self.page.fill("#message", text)
        self.page.press("#message", "Enter" if self.evaluate("state.conversation.kind") == "chat" else "Control+Enter")

    def evaluate(self, script: str, argument: Any = None) -> Any:
        """Evaluates an expression, or a function of the argument, among what the page's modules export."""
        return self.page.evaluate(
            f"(argument) => {{ {NAMES} const it = ({script}); return typeof it === 'function' ? it(argument) : it }}", argument
        )

    def until_idle(self) -> None:
        self.until("modules['state.js'].state.stopper === null")

    def look_inside(self) -> None:
        """Opens the panel, unless it is open."""
        if self.page.get_attribute("#inside-open", "aria-expanded") != "true":
            self.page.click("#inside-open")

    def set(self, field: str, value: object) -> None:
        """Sets a field of the settings, as typing or dragging does."""
        script = "([id, value]) => { byId(id).value = value; byId(id).dispatchEvent(new Event('input')) }"
        self.evaluate(script, [field, str(value)])

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).text_content())

    def answer(self) -> str:
        """What the last answer is kept as."""
        return str(self.evaluate("state.conversation.messages.at(-1).content"))

    def tokens(self, box: str = ".turn:last-child .body") -> list[tuple[str, str]]:
        """Text and colour class of every token shown; those of one character's parts are one. Markdown gives it several spans."""
        script = """box => [...document.querySelectorAll(`${box} .token`)]
            .map(span => [span.dataset.start, span.textContent, span.classList[1]])"""
        tokens: dict[str, tuple[str, str]] = {}
        for start, text, origin in self.page.evaluate(script, box):
            tokens[start] = (tokens.get(start, ("", ""))[0] + text, origin)
        return [*tokens.values()]

    def number(self, selector: str) -> float:
        """The number in an element, without its unit."""
        found = re.match(r"[\d.]+", self.text(selector))
        assert found, f"{selector} shows no number but {self.text(selector)!r}"
        return float(found[0])

    def screenshot(self, name: str) -> None:
        self.page.screenshot(path=self.folder / f"{name}.png")

    def overflows(self) -> bool:
        """True if the page can be scrolled sideways."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth > innerWidth"))


@pytest.fixture
def visit(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Visit]]:
    """Opens the page of a server. At the end nothing may have gone wrong in any of the tabs."""
    with contextlib.ExitStack() as stack:
        visits = []

        def open_page(url: str, width: int = 1280, height: int = 800, **options: Any) -> Visit:
            """A browser that has not seen the page before."""
            context = stack.enter_context(
                contextlib.closing(browser.new_context(viewport={"width": width, "height": height}, **options))
            )
            page = context.new_page()
            page.set_default_timeout(20_000)
            visited = Visit(page, url, tmp_path)
            page.on("console", lambda message: message.type in ("error", "warning") and visited.complaints.append(message.text))
            page.on("pageerror", lambda error: visited.complaints.append(str(error)))
            page.on("request", lambda request: request.post_data and visited.bodies.append(request.post_data_json))
            page.on("request", lambda request: is_foreign(request.url, url) and visited.foreign.append(request.url))
            page.goto(url)
            visited.until("document.getElementById('model').textContent !== 'connecting…'")
            visits.append(visited)
            return visited

        yield open_page
        assert not [complaint for visited in visits for complaint in visited.complaints]
        assert not [request for visited in visits for request in visited.foreign]


def is_foreign(address: str, url: str) -> bool:
    return urlsplit(address).scheme != "data" and urlsplit(address).netloc != urlsplit(url).netloc


@pytest.fixture(scope="package")
def mock_url(browser: Any) -> Iterator[str]:
    with serving(create_mock(pace=0.002)) as url:
        yield url


@contextlib.contextmanager
def serving(app: Any, port: int = 0) -> Iterator[str]:
    """Runs an application in a thread; yields its URL. At the end connections are cut, as if the process were killed."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    with listen("127.0.0.1", port) as listener:
        # As HttpServer does: connections that were cut keep no address.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield url_of(listener)
        finally:
            server.should_exit = server.force_exit = True
            thread.join(20)
    assert not thread.is_alive()
