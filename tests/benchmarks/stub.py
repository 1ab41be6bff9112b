"""A server that does what a test wants, in a thread: how a load generator sees servers that are slow, wrong or broken."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from aiohttp import web

DONE = b"data: [DONE]\n\n"
Script = Callable[["Stub", dict], AsyncIterator[bytes | None]]
"""The bytes of an answer, as they are sent; None cuts the connection."""


def event(content: dict | str) -> bytes:
    return f"data: {content if isinstance(content, str) else json.dumps(content)}\n\n".encode()


def chunk(text: str, tokens: int | None = None, prompt_tokens: int = 7) -> bytes:
    """A chunk of /v1/completions, with `usage` if `tokens` (all so far) are given."""
    usage = None if tokens is None else {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}
    return event({"choices": [{"index": 0, "text": text}], "usage": usage})


def last(tokens: int, **more) -> bytes:
    """The chunk that sums up."""
    return event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": tokens}, **more})


@dataclass
class Stub:
    """A server: what it answers, and what it was asked."""

    script: Script
    bodies: list[dict] = field(default_factory=list)
    headers: list[dict] = field(default_factory=list)
    refuse: Callable[[dict], web.Response | None] = lambda body: None
    """An answer instead of the script's."""
    pages: dict[str, str] = field(default_factory=lambda: {"/v1/models": '{"data": [{"id": "stub"}]}'})
    content_type: str = "text/event-stream"

    @property
    def number(self) -> int:
        """Of the request that is answered; 0 is the probe."""
        return len(self.bodies) - 1

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            page = self.pages.get(request.path)
            return web.Response(text=page, status=200 if page is not None else 404)
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if (refusal := self.refuse(body)) is not None:
            return refusal
        response = web.StreamResponse(headers={"Content-Type": self.content_type})
        await response.prepare(request)
        async for part in self.script(self, body):
            if part is None:
                assert request.transport is not None
                request.transport.abort()
                return response
            await response.write(part)
        return response

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Its URL."""
        with in_thread(self.answer) as url:
            yield url


@contextlib.contextmanager
def in_thread(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Iterator[str]:
    """Runs a server; yields its URL."""
    loop, ready, ports = asyncio.new_event_loop(), threading.Event(), []

    async def start() -> web.AppRunner:
        app = web.Application()
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics", "/server_info"):
            app.router.add_route("*", path, handler)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        ports.append(runner.addresses[0][1])
        return runner

    def serve() -> None:
        runner = loop.run_until_complete(start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        left = asyncio.all_tasks(loop)  # answers that were being written when the server went away
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert ready.wait(10)
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
    assert not thread.is_alive()
