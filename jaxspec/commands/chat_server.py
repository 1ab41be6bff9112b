"""`jaxspec chat --url`: answers of a running server, by OpenAI's chat completions. Loads no JAX.

Any such server will do; jaxspec's also says where tokens come from (docs/server.md, "Speculation in responses").
"""

import json
import re
from collections.abc import Generator
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from jaxspec.commands.chat_loop import Messages, Piece, Wishes
from jaxspec.commands.chat_screen import THINKING
from jaxspec.commands.common import json_of
from jaxspec.commands.generate import CONTROL
from jaxspec.commands.options import OPTIONS
from jaxspec.tree_shape import PLAIN, TreeShape

KEY = OPTIONS["api_key"].secret
"""The environment variable that may hold the server's key."""
CONNECT_SECONDS = 10
MAX_ERROR = 500
"""Characters of a server's error that are shown."""


class ServerSource:
    """A server at `url`, such as http://127.0.0.1:30000, with or without /v1. Raises ValueError if none answers there."""

    def __init__(self, url: str, api_key: str | None = None):
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query:
            got = "" if "@" in url else f", got {url[:200]!r}"  # it may hold a password
            raise ValueError(f"--url must be like http://127.0.0.1:30000, without user, password or query{got}")
        if not re.fullmatch("[!-~]*", api_key or ""):
            raise ValueError(f"--api-key, or {KEY}, must be visible ASCII characters, without spaces and line ends")
        self._parts, self._url = parts, f"{parts.scheme}://{parts.netloc}"
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        with closing(self._connect()) as connection:
            listed = json_of(self._ask(connection, "GET", "/models").read()).get("data")
        if not isinstance(listed, list) or not listed or not isinstance(listed[0], dict) or "id" not in listed[0]:
            raise ValueError(f"{self._url}{self._path}/models names no model: is this a server with OpenAI's API?")
        self.model = str(listed[0]["id"])

    def about(self) -> dict[str, str]:
        return {"model": self.model.translate(CONTROL), "server": self._url}

    def prepare(self, tree: TreeShape | None) -> None:
        """Nothing to prepare: the server itself refuses a request for a tree that it lacks, and names those that it has."""

    def answer(self, messages: Messages, wishes: Wishes) -> Generator[Piece]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        optional = {"temperature": wishes.temperature, "max_tokens": wishes.max_tokens, "speculative": speculative(wishes)}
        body |= {name: value for name, value in optional.items() if value is not None}
        tokens = 0
        with closing(self._connect()) as connection, self._ask(connection, "POST", "/chat/completions", body) as response:
            for event in events(response):
                if "error" in event:
                    raise ValueError(error_of(event))
                piece = piece_of(event)
                yield piece._replace(tokens=max(0, piece.tokens - tokens))
                tokens = max(tokens, piece.tokens)

    def _connect(self) -> HTTPConnection:
        """A connection; reading from it may take as long as it likes: the server may have other work."""
        kind = HTTPSConnection if self._parts.scheme == "https" else HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
        except OSError as error:
            raise ValueError(
                f"no server answers at {self._url} ({error.strerror or error}): start one with `jaxspec serve`, or correct --url"
            ) from None
        connection.sock.settimeout(None)
        return connection

    def _ask(self, connection: HTTPConnection, method: str, path: str, body: dict[str, Any] | None = None) -> HTTPResponse:
        """The response. Raises ValueError if it is an error, or none at all."""
        try:
            connection.request(method, self._path + path, None if body is None else json.dumps(body), self._headers)
            response = connection.getresponse()
            if response.status == 200:
                return response
            what = error_of(json_of(response.read()))
        except (HTTPException, ConnectionError) as error:
            raise ValueError(f"{self._url} does not answer as a server with OpenAI's API ({type(error).__name__})") from None
        hint = f": give --api-key, or set {KEY}" if response.status == 401 else ""
        raise ValueError(f"{self._url}{self._path}{path} answers with status {response.status}: {what}{hint}")


def speculative(wishes: Wishes) -> dict[str, Any] | None:
    """Our own request field; None if the user asked for nothing that needs it, as other servers don't know it."""
    tree, asked = wishes.tree, dict[str, Any]()
    if tree == PLAIN:
        asked["enabled"] = False
    elif tree is not None:
        asked |= {"num_steps": tree.num_steps, "eagle_topk": tree.topk, "num_draft_tokens": tree.num_draft_tokens}
        asked |= {} if tree.head_steps is None else {"head_steps": tree.head_steps}
    if wishes.shows_drafts:
        asked["trace"] = True
    return asked or None


def events(response: HTTPResponse) -> Generator[dict[str, Any]]:
    """The events of a stream."""
    try:
        for line in response:
            if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                yield json_of(data)
    except (HTTPException, ConnectionError) as error:
        raise ValueError(f"the server broke off ({type(error).__name__})") from None


def piece_of(event: dict[str, Any]) -> Piece:
    """What an event says; `tokens` is their number so far."""
    choice: dict[str, Any] = next(iter(event.get("choices") or []), {})
    delta, trace, spans = choice.get("delta") or {}, event.get("speculative_trace"), list[tuple[str, str]]()
    if thought := delta.get("reasoning_content"):
        spans.append((thought, THINKING))
    if text := delta.get("content"):
        traced = [(token["text"], token["from"]) for token in trace["tokens"]] if trace else []
        spans += traced if "".join(each for each, _ in traced) == text else [(text, "")]
    usage = event.get("usage") or {}
    counts = (event.get("metrics") or {}).get("speculative_decoding") or {}
    forwards = counts.get("num_spec_steps", 0)
    forwarded = round(forwards * counts.get("mean_acceptance_length", 0))
    return Piece(tuple(spans), usage.get("completion_tokens", 0), forwards, forwarded, choice.get("finish_reason"))


def error_of(body: dict[str, Any]) -> str:
    """What OpenAI's error says, in one line."""
    error = body.get("error", body)
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split()).translate(CONTROL)[:MAX_ERROR] or "no reason given"
