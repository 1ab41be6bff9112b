"""Who may do what. Without keys everybody who reaches the server may do everything: it listens on loopback by default."""

import hmac
from collections.abc import Iterable, Sequence
from hashlib import sha256

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxspec.server.errors import ApiError
from jaxspec.server.settings import ServerSettings

PUBLIC = frozenset({"/", "/health", "/health_generate", "/ready", "/ping", "/metrics", "/version"})
"""Need no key: what probes and scrapers ask, and the page, which sends the key that its user types."""
HOW = "send the header Authorization: Bearer <key>"


class KeyCheck:
    """Middleware that refuses requests without a valid key, before their body is read, and gives routes
    `request.state.is_admin`."""

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
        scope.setdefault("state", {})["is_admin"] = not self._keys or _is_among(given, self._admin_keys)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if not (self._is_open or path in PUBLIC or _is_among(given, self._keys)):
            what = "the API key is wrong" if given else "this server asks for an API key"
            await invalid_key(f"{what}: {HOW}").response(scope, receive, send)
            return
        await self._app(scope, receive, send)


def admin_only(request: Request) -> None:
    """Raises ApiError 401 unless the request came with the owner's key (ServerSettings.admin_api_key)."""
    if not request.state.is_admin:
        raise invalid_key(f"this needs the server's admin key: {HOW}")


def invalid_key(message: str) -> ApiError:
    """OpenAI's refusal."""
    return ApiError(401, message, code="invalid_api_key")


def _keys_in(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """What the client sent as keys: OpenAI's way, and that of many others. lm-eval sends an empty one if it has none."""
    keys = []
    for name, value in headers:
        scheme, _, credentials = value.strip().partition(b" ")
        if name == b"authorization" and scheme.lower() == b"bearer":
            keys.append(credentials.strip())
        elif name == b"x-api-key":
            keys.append(value.strip())
    return [key for key in keys if key]


def _digest(key: bytes) -> bytes:
    """All have one length, and their first differing byte tells nothing about the key's."""
    return sha256(key).digest()


def _is_among(given: Sequence[bytes], valid: Sequence[bytes]) -> bool:
    """Takes the same time wherever they differ, and whichever matches."""
    return any([hmac.compare_digest(one, other) for one in given for other in valid])
