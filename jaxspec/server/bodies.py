"""Request bodies: limits of their size, time and structure, and parsing that delays no other request."""

import asyncio
import json
from collections.abc import Callable
from time import perf_counter
from typing import Any

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec.server.errors import ApiError, ClientDisconnected, echo
from jaxspec.server.model import MAX_COMPLETIONS

MAX_BODY_BYTES = 16 * 2**20
MIN_BODY_BYTES = 2 * 2**20
"""The limits of a body's size for models with the longest contexts, and with the shortest."""
MAX_TOTAL_BODY_BYTES = 16 * MAX_BODY_BYTES
"""All requests in progress together."""
BODY_SECONDS = 60.0
"""Time for a body to arrive. Without a limit, slow clients could hold memory forever."""
MAX_VALUES = 300_000
"""JSON values in a body; parsing and checking so many takes a third of a second (two-core EPYC, Python 3.12, November 2026)."""
LARGE_BYTES = 64 * 2**10
"""Larger bodies are parsed in a thread, one at a time."""
PARSING_SHARE = 0.2
"""The share of the time that goes to parsing large bodies, during which Python can do nothing else."""


def most_bytes(context_length: int) -> int:
    """The largest body that can be useful: the most prompts, each filling the context, at four bytes a token."""
    return min(MAX_BODY_BYTES, max(MIN_BODY_BYTES, 4 * MAX_COMPLETIONS * context_length))


def most_values(context_length: int) -> int:
    """The most JSON values in a body, estimated from its commas and opening brackets, some of which may be in strings."""
    return max(MAX_VALUES, 2 * context_length)


class BodyLimit:
    """Middleware that refuses bodies: 413 above max_bytes, without reading more; 503 if all bodies together exceed
    max_total_bytes; 408 if a body takes longer than `seconds`."""

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int = MAX_BODY_BYTES,
        max_total_bytes: int = MAX_TOTAL_BODY_BYTES,
        seconds: float = BODY_SECONDS,
    ):
        self._app, self._max_bytes, self._max_total_bytes, self._seconds = app, max_bytes, max_total_bytes, seconds
        self._held = 0
        """Bytes of the bodies of all requests in progress."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        too_large = f"the request body is larger than {self._max_bytes} bytes"
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > self._max_bytes:
            await ApiError(413, too_large).response_to(scope)(scope, receive, send)
            return
        received = 0
        deadline: float | None = asyncio.get_running_loop().time() + self._seconds

        async def receive_limited() -> Message:
            """Raises HTTPException, the only kind that FastAPI lets through while it reads the body."""
            nonlocal received, deadline
            try:
                async with asyncio.timeout_at(deadline):
                    part = await receive()
            except TimeoutError:
                message = f"the request body did not arrive within {self._seconds:g} seconds"
                raise HTTPException(408, message, {"Connection": "close"}) from None
            if not part.get("more_body", False):
                deadline = None  # from now on it waits for the client to hang up
            length = len(part.get("body", b""))
            received += length
            self._held += length
            if received > self._max_bytes:
                raise HTTPException(413, too_large)
            if self._held > self._max_total_bytes:
                raise HTTPException(503, "the bodies of other requests use all memory for bodies: try again later")
            return part

        try:
            await self._app(scope, receive_limited, send)
        finally:
            self._held -= received


class OneByOne:
    """Runs work in a thread, one after the other, with pauses that keep it to a share of the time."""

    def __init__(self, share: float = 1.0) -> None:
        self._share = share
        self._lock = asyncio.Lock()
        self._rests_until = 0.0

    async def run[T](self, work: Callable[[], T]) -> T:
        """The result of the work, when its turn has come."""
        async with self._lock:
            await asyncio.sleep(self._rests_until - perf_counter())
            began = perf_counter()
            try:
                return await run_in_threadpool(work)
            finally:
                ended = perf_counter()
                self._rests_until = ended + (ended - began) * (1 / self._share - 1)


class JsonBody[Model: BaseModel]:
    """A route's dependency: its body, parsed and checked. All failures are 4xx.

    `request.state.run` then runs further work on the body in a thread, as its size demands.
    """

    def __init__(self, model: type[Model]):
        self.model = model

    async def __call__(self, request: Request) -> Model:
        check_content_type(request)
        try:
            raw = await request.body()
        except ClientDisconnect:
            raise ClientDisconnected from None
        if len(raw) <= LARGE_BYTES:
            request.state.run = run_in_threadpool
            return self.parse(raw)
        request.state.run = request.app.large_work.run
        most = request.app.max_values
        if sum(map(raw.count, (b",", b"[", b"{"))) > most:
            raise ApiError(413, f"the request body holds more than {most} values (commas and opening brackets): split it")
        return await request.app.large_parsing.run(lambda: self.parse(raw))

    def parse(self, raw: bytes) -> Model:
        """Raises ApiError for what is not JSON and RequestValidationError for wrong fields."""
        try:
            return self.model.model_validate(json.loads(raw))
        except json.JSONDecodeError as error:
            raise ApiError(400, f"the request body is not valid JSON: {error.msg} at character {error.pos}") from None
        except ValidationError as error:
            raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in error.errors()]) from None
        except (ValueError, RecursionError):  # bytes that are not Unicode, numbers of thousands of digits, deep nesting
            raise ApiError(400, "the request body can't be parsed: it is not Unicode, or nested too deeply") from None


def documented(model: type[BaseModel]) -> dict[str, Any]:
    """A route's `openapi_extra`: FastAPI does not know that it takes a body."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}}


def check_content_type(request: Request) -> None:
    """Raises ApiError 415 for a body that is not declared as plain JSON; curl -d without a header declares a form."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ApiError(415, f"send the body without Content-Encoding, got {echo(encoding)}", param="content-encoding")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not (kind.startswith("application/") and (kind == "application/json" or kind.endswith("+json"))):
        raise ApiError(415, f"send the header Content-Type: application/json, got {echo(kind) or 'none'}", param="content-type")
