"""A server that does what a test wants, in threads: how the load client sees servers that are slow, wrong or broken."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, count

DONE = b"data: [DONE]\n\n"
Script = Callable[[int], Iterator[bytes | None]]
"""From a request's number, 0 is the probe, to the parts of the answer as they are sent; None cuts the connection."""


def event(content: dict | str) -> bytes:
    return f"data: {content if isinstance(content, str) else json.dumps(content)}\n\n".encode()


def chunk(text: str, tokens: int | None = None) -> bytes:
    """A chunk of /v1/completions, with `usage` if `tokens` (all so far) are given."""
    usage = None if tokens is None else {"prompt_tokens": 7, "completion_tokens": tokens}
    return event({"choices": [{"index": 0, "text": text}], "usage": usage})


def last(tokens: int) -> bytes:
    """The chunk that sums up."""
    return event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": tokens}})


@dataclass
class Stub:
    """A server: what it answers, and what it was asked."""

    script: Script
    refuse: Callable[[int], tuple[int, str] | None] = lambda number: None
    """Status and text of an answer instead of the script's."""
    bodies: list[dict] = field(default_factory=list)
    headers: list[dict] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[str]:
        """Its URL."""
        stub, numbers = self, count()

        class Handler(BaseHTTPRequestHandler):
            protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

            def do_GET(self) -> None:
                self.answer(*((200, '{"data": [{"id": "stub"}]}') if self.path == "/v1/models" else (404, "")))

            def do_POST(self) -> None:
                stub.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                stub.headers.append(dict(self.headers))
                number = next(numbers)
                if (refusal := stub.refuse(number)) is not None:
                    return self.answer(*refusal)
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for part in chain(stub.script(number), [b""]):  # an empty one is the end
                    if part is None:
                        self.close_connection = True
                        break
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))

            def answer(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            server.handle_error = lambda *_: None  # type: ignore[method-assign]  # the client went away
            threading.Thread(target=server.serve_forever, args=[0.01]).start()
            try:
                yield f"http://127.0.0.1:{server.server_address[1]}"
            finally:
                server.shutdown()
