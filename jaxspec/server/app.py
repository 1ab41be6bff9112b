"""The HTTP application: routes, limits, and one shape for every error. Pages of other origins can't call it, unless allowed."""

from threading import Lock
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.middleware.cors import CORSMiddleware

from jaxspec.engine.driver import EngineThread
from jaxspec.server.bodies import PARSING_SHARE, BodyLimit, OneByOne, most_bytes, most_values
from jaxspec.server.errors import REQUEST_ID, add_handlers
from jaxspec.server.messages.api import messages_routes
from jaxspec.server.metrics import RequestCollector, StepTimes, add_metrics
from jaxspec.server.middleware import AccessCheck, RequestIds
from jaxspec.server.model import ServedModel
from jaxspec.server.openai.api import openai_routes
from jaxspec.server.playground import playground_routes
from jaxspec.server.responses.api import responses_routes
from jaxspec.server.running import RunningRequests
from jaxspec.server.sending import COMMON_FAILURES
from jaxspec.server.settings import ServerSettings
from jaxspec.server.sglang.api import sglang_routes
from jaxspec.server.sglang.info import info_routes
from jaxspec.server.tokenize_api import tokenize_routes
from jaxspec.version import own_version

DESCRIPTION = """Speculative decoding for LLM serving in JAX. Endpoints and fields are those of OpenAI's API, SGLang's, vLLM's and
Anthropic's. /v1/models tells what the model can do; embeddings are not served.

Every failure has OpenAI's shape, at Anthropic's endpoints theirs. Every response has the header x-request-id: the request's own, or
a new one."""


class Application(FastAPI):
    """The ASGI application. `running.drain()` makes it refuse new requests."""

    def __init__(self, running: RunningRequests, settings: ServerSettings, context_length: int):
        super().__init__(
            title="jaxspec",
            description=DESCRIPTION,
            version=own_version(),
            docs_url=None,  # these pages load scripts from elsewhere
            redoc_url=None,
            responses=COMMON_FAILURES,
        )
        self.running, self.settings = running, settings
        self.large_parsing, self.large_work = OneByOne(PARSING_SHARE), OneByOne()
        self.max_values = most_values(context_length)
        self._building = Lock()

    def setup(self) -> None:
        """The document is built when it is first asked for, in a thread: it takes a second."""

        def document(_request: Request) -> Response:
            with self._building:
                return JSONResponse(self.openapi())

        self.add_route("/openapi.json", document, include_in_schema=False)

    def openapi(self) -> dict[str, Any]:
        """FastAPI's document, corrected: it lists status 422 for wrong fields, which is 400 here, and gives failures the media type
        of the success, but they are always JSON."""
        if self.openapi_schema is not None:
            return self.openapi_schema
        document = super().openapi()
        for operations in document["paths"].values():
            for operation in operations.values():
                _correct(operation["responses"])
                if "requestBody" in operation:
                    _name_schemas(operation["requestBody"]["content"]["application/json"], document["components"]["schemas"])
        for unused in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(unused, None)
        if self.settings.api_key is not None:
            document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}]
        return document


def _name_schemas(content: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Moves a body's self-contained schema to the named schemas, and refers to it there."""
    schema = dict(content["schema"])
    if "title" in schema:
        schemas |= schema.pop("$defs", {}) | {schema["title"]: schema}
        content["schema"] = {"$ref": f"#/components/schemas/{schema['title']}"}


def _correct(responses: dict[str, Any]) -> None:
    responses.pop("422", None)
    for status, response in responses.items():
        if int(status) >= 400:
            [schema] = response["content"].values()
            response["content"] = {"application/json": schema}


def create_app(
    engine: EngineThread,
    model: ServedModel,
    settings: ServerSettings | None = None,
    *,
    metrics: RequestCollector | None = None,
    steps: StepTimes | None = None,
) -> Application:
    """The application over one engine and its model; the caller closes the engine. /metrics exists if `metrics` is given. It and
    `steps` must be observers of the engine."""
    settings = settings or ServerSettings()
    running = RunningRequests(engine, settings.request_timeout)
    app = Application(running, settings, model.context_length)
    add_handlers(app)
    app.add_middleware(BodyLimit, max_bytes=most_bytes(model.context_length))  # the last one added sees a request first
    app.add_middleware(AccessCheck, settings=settings)
    app.add_middleware(RequestIds)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, "retry-after"],
        )
    generating = [routes(running, model) for routes in (openai_routes, responses_routes, messages_routes, sglang_routes)]
    informing = tokenize_routes(model, settings.tokenizer_info), *info_routes(running, model, settings, steps or StepTimes())
    for router in (*generating, *informing, playground_routes()):
        app.include_router(router)
    if metrics is not None:
        add_metrics(app, engine, metrics)  # last, so that it counts refused requests too
    return app
