"""Middleware: the name, the origin and the key of every request. From the outside in: RequestIds, AccessCheck, BodyLimit
(bodies.py)."""

import hmac
import uuid
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from hashlib import sha256

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec.server.errors import REQUEST_ID, ApiError, path_of
from jaxspec.server.fields import MAX_NAME
from jaxspec.server.settings import ANY, ServerSettings

PUBLIC = frozenset({"/", "/health", "/health_generate", "/ready", "/ping", "/metrics", "/version"})
"""Paths that need no key: those of probes and scrapers, and the playground, which sends the key that its user types."""
SEND_KEY = "send the header Authorization: Bearer <key>"


class RequestIds:
    """Middleware that gives every request a name, the client's x-request-id or a new one, and repeats it in the response.

    It also answers HEAD like GET.

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
            await ApiError(400, message, param=REQUEST_ID).response_to(scope)(scope, receive, send_with_id)
            return
        with ExitStack() as on_end:
            scope.setdefault("state", {}).update(request_id=request_id, on_end=on_end)
            inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope  # uvicorn sends no body to HEAD
            try:
                await self._app(inner, receive, send_with_id)
            finally:
                if "route" in inner:
                    scope["route"] = inner["route"]  # the metrics count requests by it


def is_request_id(text: str) -> bool:
    """Whether the text is safe to repeat in headers, responses and logs."""
    return 1 <= len(text) <= MAX_NAME and text.isascii() and text.isprintable()


class AccessCheck:
    """Middleware that refuses requests by their origin and their key before the body is read, and sets `request.state.is_admin`.

    A request that a browser sends for a web page of another origin may only open public pages, unless the settings allow that
    origin. Such a page can't read responses, as there are no CORS headers, but its requests could have effects: browsers send
    `GET /flush_cache` without a CORS preflight.
    Without keys in the settings every client may do everything; by default the server listens on loopback only.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings):
        self._app, self._origins = app, settings.allowed_origins
        keys = [key for key in (settings.api_key, settings.admin_api_key) if key is not None]
        self._is_open = settings.api_key is None
        self._keys = [_digest(key.encode()) for key in keys]
        self._admin_keys = self._keys[-1:]  # admin_api_key, else api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:  # else: such as Ray's announcement of a start
            await refusal.response_to(scope)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers, is_public = Headers(scope=scope), path_of(scope) in PUBLIC
        is_allowed = ANY in self._origins or headers.get("origin") in self._origins
        if not (is_allowed or (is_public and scope["method"] == "GET")) and is_from_elsewhere(headers):
            return ApiError(403, "this request comes from a web page of another origin, which this server does not allow")
        given = [_digest(key) for key in _keys_in(scope["headers"])]
        scope.setdefault("state", {})["is_admin"] = not self._keys or _any_equal(given, self._admin_keys)
        if self._is_open or is_public or _any_equal(given, self._keys):
            return None
        problem = "the API key is wrong" if given else "this server asks for an API key"
        return ApiError(401, f"{problem}: {SEND_KEY}", code="invalid_api_key")


def is_from_elsewhere(headers: Headers) -> bool:
    """Whether a browser sent this for a page of another origin. Browsers omit Sec-Fetch-Site for http:// except on loopback."""
    if (site := headers.get("sec-fetch-site")) is not None:
        return site not in ("same-origin", "none")
    source = headers.get("origin") or headers.get("referer")
    return source is not None and source.partition("://")[2].partition("/")[0] != headers.get("host")


def admin_only(request: Request) -> None:
    """Raises ApiError 401 unless the request has the owner's key (ServerSettings.admin_api_key)."""
    if not request.state.is_admin:
        raise ApiError(401, f"this needs the server's admin key: {SEND_KEY}", code="invalid_api_key")


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
