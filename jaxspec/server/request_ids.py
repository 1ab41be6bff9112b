"""x-request-id: every request has one, the client's or one of ours, and every answer repeats it."""

import uuid
from contextlib import ExitStack

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec.server.errors import REQUEST_ID, ApiError

MAX_LENGTH = 128


class RequestIds:
    """Middleware that gives routes `request.state.request_id`, and `request.state.on_end`: an ExitStack that is closed when the
    answer is out or given up."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(REQUEST_ID.encode())
        is_fine = given is None or is_request_id(given.decode("latin-1"))
        request_id = uuid.uuid4().hex if given is None or not is_fine else given.decode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID.encode(), request_id.encode())]
            await send(message)

        if not is_fine:
            message = f"the header {REQUEST_ID} must be 1 to {MAX_LENGTH} printable ASCII characters"
            await ApiError(400, message, param=REQUEST_ID).response(scope, receive, send_with_id)
            return
        with ExitStack() as on_end:
            scope.setdefault("state", {}).update(request_id=request_id, on_end=on_end)
            await self._app(scope, receive, send_with_id)


def is_request_id(text: str) -> bool:
    """Whether it may name a request: it is repeated in headers, answers and logs."""
    return 1 <= len(text) <= MAX_LENGTH and text.isascii() and text.isprintable()
