"""A headless chromium and what it visits: pages of servers."""

import contextlib
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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


@pytest.fixture(scope="package")
def browser(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Package scope: while Playwright's loop lives in this thread, no other can, and other tests have one."""

    def lacks(what: str) -> None:
        (pytest.fail if request.config.getoption("--require-clients") else pytest.skip)(f"{what} is not installed")

    program = shutil.which("chromium")
    if program is None:
        lacks("chromium (Debian's package)")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        lacks("playwright (from PyPI)")
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

    def until(self, script: str, seconds: float = 60) -> None:
        """Waits until the script is true. (Playwright's own waiting evaluates strings in the page, which its policy forbids.)"""
        deadline = time.monotonic() + seconds
        while not self.page.evaluate(script):
            assert time.monotonic() < deadline, f"it did not come true: {script}"
            time.sleep(0.02)

    def run(self, prompt: str | None = None, button: str = "#run") -> None:
        """Runs the prompt to its end."""
        if prompt is not None:
            self.page.fill("#prompt", prompt)
        self.page.click(button)
        self.until_idle()

    def until_idle(self) -> None:
        self.until("state.stopper === null")

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).text_content())

    def answer(self, lane: int = 0) -> str:
        """The text of an answer, the prompt left out."""
        return str(self.page.evaluate(f"outputs[{lane}].answer.textContent"))

    def tokens(self, lane: int = 0) -> list[tuple[str, str]]:
        """Text and colour class of every token that is shown."""
        script = "lane => outputs[lane].spans.flat().map(span => [span.textContent, span.classList[1]])"
        return [(text, origin) for text, origin in self.page.evaluate(script, lane)]

    def number(self, selector: str) -> float:
        """The number in an element, without its unit."""
        found = re.match(r"[\d.]+", self.text(selector))
        assert found, f"{selector} shows no number but {self.text(selector)!r}"
        return float(found[0])

    def slide(self, slider: str, value: float) -> None:
        """Sets a slider, as dragging it does."""
        self.page.evaluate(f"byId('{slider}').value = {value}; byId('{slider}').dispatchEvent(new Event('input'))")

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
            context = stack.enter_context(
                contextlib.closing(browser.new_context(viewport={"width": width, "height": height}, **options))
            )
            page = context.new_page()
            page.set_default_timeout(20_000)
            visited = Visit(page, url, tmp_path)
            page.on("console", lambda message: message.type in ("error", "warning") and visited.complaints.append(message.text))
            page.on("pageerror", lambda error: visited.complaints.append(str(error)))
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
def serving(app: Any) -> Iterator[str]:
    """Runs an application in a thread; yields its URL."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield url_of(listener)
        finally:
            server.should_exit = True
            thread.join(20)
    assert not thread.is_alive()
