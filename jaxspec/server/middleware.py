"""Middleware: the name, the key and the body limits of every request. From the outside in:
RequestIds, KeyCheck, BodyLimit; `only_json` belongs to the routes that take a body."""

import asyncio
import hmac
import uuid
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from hashlib import sha256

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec.server.errors import REQUEST_ID, ApiError, echo
from jaxspec.server.fields import MAX_NAME
from jaxspec.server.settings import ServerSettings

PUBLIC = frozenset({"/", "/health", "/health_generate", "/ready", "/ping", "/metrics", "/version"})
"""Paths that need no key: those of probes and scrapers, and the playground, which sends the key that its user types."""
SEND_KEY = "send the header Authorization: Bearer <key>"
MAX_BODY_BYTES = 16 * 2**20
MAX_TOTAL_BODY_BYTES = 16 * MAX_BODY_BYTES
"""All requests in progress together."""
BODY_SECONDS = 60.0
"""Time for a body to arrive. Without a limit, slow clients could hold memory forever."""


class RequestIds:
    """Middleware that gives every request a name, the client's x-request-id or a new one, and repeats it in the response.

    Routes find it as `request.state.request_id`, and `request.state.on_end`, an ExitStack that closes when the response is over.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(REQUEST_ID.encode())
        is_valid = given is None or is_request_id(given.decode("latin-1"))
        request_id = given.decode() if given is not None and is_valid else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID.encode(), request_id.encode())]
            await send(message)

        if not is_valid:
            message = f"the header {REQUEST_ID} must be 1 to {MAX_NAME} printable ASCII characters: change it or leave it out"
            await ApiError(400, message, param=REQUEST_ID).response(scope, receive, send_with_id)
            return
        with ExitStack() as on_end:
            scope.setdefault("state", {}).update(request_id=request_id, on_end=on_end)
            await self._app(scope, receive, send_with_id)


def is_request_id(text: str) -> bool:
    """Whether the text is safe to repeat in headers, responses and logs."""
    return 1 <= len(text) <= MAX_NAME and text.isascii() and text.isprintable()


class KeyCheck:
    """Middleware that refuses requests without a valid key before their body is read, and sets `request.state.is_admin`.

    Without keys in the settings every client may do everything; by default the server listens on loopback only.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings):
        self._app = app
        keys = [key for key in (settings.api_key, settings.admin_api_key) if key is not None]
        self._is_open = settings.api_key is None
        self._keys = [_digest(key.encode()) for key in keys]
        self._admin_keys = self._keys[-1:]  # admin_api_key, else api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = [_digest(key) for key in _keys_in(scope["headers"])]
        scope.setdefault("state", {})["is_admin"] = not self._keys or _any_equal(given, self._admin_keys)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if not (self._is_open or path in PUBLIC or _any_equal(given, self._keys)):
            problem = "the API key is wrong" if given else "this server asks for an API key"
            await _invalid_key(f"{problem}: {SEND_KEY}").response(scope, receive, send)
            return
        await self._app(scope, receive, send)


def admin_only(request: Request) -> None:
    """Raises ApiError 401 unless the request has the owner's key (ServerSettings.admin_api_key)."""
    if not request.state.is_admin:
        raise _invalid_key(f"this needs the server's admin key: {SEND_KEY}")


def _invalid_key(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key")


def _keys_in(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """The keys that the client sent, as a bearer token or as x-api-key. lm-eval sends an empty one if it has none."""
    keys = []
    for name, value in headers:
        scheme, _, credentials = value.strip().partition(b" ")
        if name == b"authorization" and scheme.lower() == b"bearer":
            keys.append(credentials.strip())
        elif name == b"x-api-key":
            keys.append(value.strip())
    return [key for key in keys if key]


def _digest(key: bytes) -> bytes:
    """Comparing digests reveals neither the key's length nor how much of it was right."""
    return sha256(key).digest()


def _any_equal(given: Sequence[bytes], valid: Sequence[bytes]) -> bool:
    """Takes the same time for every key, right or wrong."""
    return any([hmac.compare_digest(one, other) for one in given for other in valid])


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
            await ApiError(413, too_large).response(scope, receive, send)
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


async def only_json(request: Request) -> None:
    """Refuses a body that is not declared as JSON; curl -d without a header declares a form."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = kind.startswith("application/") and (kind == "application/json" or kind.endswith("+json"))
    if request.method in ("POST", "PUT") and not is_json:
        raise ApiError(415, f"send the header Content-Type: application/json, got {echo(kind) or 'none'}", param="content-type")
