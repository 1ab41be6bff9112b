"""The HTTP application: routes, limits, and one shape for every error. No CORS: pages of other origins can't call it."""

from typing import Any

from fastapi import Depends, FastAPI

from jaxspec.engine.async_engine import AsyncEngine
from jaxspec.server.answers import EVERYWHERE
from jaxspec.server.auth import KeyCheck
from jaxspec.server.body_limit import BodyLimit
from jaxspec.server.content_type import only_json
from jaxspec.server.control_api import control_routes
from jaxspec.server.errors import add_handlers
from jaxspec.server.info_api import info_routes
from jaxspec.server.metrics import Metrics, add_metrics
from jaxspec.server.model import ServedModel
from jaxspec.server.native_api import native_routes
from jaxspec.server.openai_api import openai_routes
from jaxspec.server.page import page_routes
from jaxspec.server.request_ids import RequestIds
from jaxspec.server.running import RunningRequests
from jaxspec.server.settings import ServerSettings
from jaxspec.server.tokenize_api import tokenize_routes
from jaxspec.server.totals import Totals
from jaxspec.version import own_version

DESCRIPTION = """Speculative decoding for LLM serving in JAX. Endpoints and fields are those of OpenAI's API, SGLang's and vLLM's.

Every failure has OpenAI's shape. Every answer has the header x-request-id: the request's own, or one that was made up."""


class Application(FastAPI):
    """What an ASGI server runs. Who runs it may ask it to take no more requests (`running.drain`)."""

    def __init__(self, running: RunningRequests, settings: ServerSettings):
        super().__init__(
            title="jaxspec",
            description=DESCRIPTION,
            version=own_version(),
            docs_url=None,  # these pages load scripts from elsewhere
            redoc_url=None,
            responses=EVERYWHERE,
        )
        self.running, self.settings = running, settings

    def openapi(self) -> dict[str, Any]:
        """FastAPI's, without the 422 that it writes everywhere, as a wrong field is a 400 here. Failures are JSON, whatever the
        answer is."""
        document = super().openapi()
        for operations in document["paths"].values():
            for operation in operations.values():
                _correct(operation["responses"])
        for unused in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(unused, None)
        if self.settings.api_key is not None:
            document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}]
        return document


def _correct(responses: dict[str, Any]) -> None:
    responses.pop("422", None)
    for status, answer in responses.items():
        if int(status) >= 400:
            [schema] = answer["content"].values()
            answer["content"] = {"application/json": schema}


def create_app(
    engine: AsyncEngine, model: ServedModel, settings: ServerSettings | None = None, *, metrics: Metrics | None = None
) -> Application:
    """The application over one engine and its model; whoever made the engine closes it. With `metrics`, one of the engine's
    observers, there is /metrics."""
    settings = settings or ServerSettings()
    running, totals = RunningRequests(engine, settings.request_timeout), Totals(engine)
    app = Application(running, settings)
    add_handlers(app)
    app.add_middleware(BodyLimit)  # the last one added is the first to see a request
    app.add_middleware(KeyCheck, settings=settings)
    app.add_middleware(RequestIds)
    for router in (openai_routes(running, model), native_routes(running, model), tokenize_routes(model, settings.tokenizer_info)):
        app.include_router(router, dependencies=[Depends(only_json)])
    app.include_router(info_routes(running, model, settings, totals))
    app.include_router(control_routes(running, totals))
    app.include_router(page_routes())
    if metrics is not None:
        add_metrics(app, engine, metrics)  # last: what counts requests is outside of what refuses them
    return app
