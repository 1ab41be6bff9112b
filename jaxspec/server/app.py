"""The HTTP application: routes, limits, and one shape for every error. No CORS: pages of other origins can't call it."""

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec.engine.async_engine import AsyncEngine
from jaxspec.server.errors import ApiError, add_handlers, echo
from jaxspec.server.model import ServedModel
from jaxspec.server.native_api import native_routes
from jaxspec.server.openai_api import openai_routes

MAX_BODY_BYTES = 16 * 2**20


def create_app(engine: AsyncEngine, model: ServedModel) -> FastAPI:
    """The application over one engine and its model; whoever made the engine closes it."""
    app = FastAPI(title="jaxspec", docs_url=None, redoc_url=None)  # their pages load scripts from elsewhere
    add_handlers(app)
    app.add_middleware(BodyLimit, max_bytes=MAX_BODY_BYTES)
    app.include_router(openai_routes(engine, model), dependencies=[Depends(only_json)])
    app.include_router(native_routes(engine, model), dependencies=[Depends(only_json)])

    @app.get("/health")
    async def health() -> Response:
        if not engine.is_healthy:
            raise ApiError(503, "the engine is not running")
        return JSONResponse({"status": "ok"})

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache() -> Response:
        """SGLang's; requests that run are not touched, so it need not wait until none does."""
        await engine.flush_cache()
        return PlainTextResponse("Cache flushed.\n")

    return app


async def only_json(request: Request) -> None:
    """Refuses a body that is not declared as JSON; curl -d without a header declares a form."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = kind.startswith("application/") and (kind == "application/json" or kind.endswith("+json"))
    if request.method == "POST" and not is_json:
        raise ApiError(415, f"send the header Content-Type: application/json, got {echo(kind) or 'none'}", param="content-type")


class BodyLimit:
    """Refuses a body of more than max_bytes with 413, without holding more than that of it."""

    def __init__(self, app: ASGIApp, max_bytes: int):
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        message = f"the request body is larger than {self._max_bytes} bytes"
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > self._max_bytes:
            await JSONResponse(ApiError(413, message).body, 413)(scope, receive, send)
            return
        received = 0

        async def limited() -> Message:
            nonlocal received
            part = await receive()
            received += len(part.get("body", b""))
            if received > self._max_bytes:  # FastAPI lets this one through while it reads the body
                raise HTTPException(413, message)
            return part

        await self._app(scope, limited, send)
