"""Every failure in OpenAI's shape: {"error": {"message", "type", "param", "code"}}, or at Anthropic's endpoints in theirs.

Clients read all four fields (openai-python raises them as attributes). Nothing else leaves the server: no `detail` of FastAPI's,
no traceback, no path. A client's own input is repeated up to MAX_ECHO characters.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from jaxspec.engine.request import EngineClosed, EngineError, RequestError
from jaxspec.engine.scheduler import QueueFull
from jaxspec.server.fields import EACH, ONE
from jaxspec.server.sending import AnthropicErrorDetail, AnthropicErrorResponse, ErrorDetail, ErrorResponse, to_json

MAX_ECHO = 200
MAX_NAME = 80
"""The most characters shown of a field's name."""
LEAST_ECHO = 8
"""If fewer characters are left for a field, it is only counted."""
MAX_REPORTED = 10
"""Invalid fields named in one message; further ones are counted."""
REQUEST_ID = "x-request-id"
"""The header with the name of a request. openai-python shows it with every error."""
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}
"""Headers of all responses with this status. After a 503 openai-python tries again twice by itself."""

ANTHROPIC = "/v1/messages"
"""Where Anthropic's endpoints begin."""
ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error", 413: "request_too_large",
    500: "api_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
"""Anthropic's name of a failure with this status; of any other: invalid_request_error."""

UNSERVED = {"/v1/embeddings": "embeddings are not served: this server only generates text; ask one that has an embedding model"}
"""Endpoints that clients of OpenAI's API may well ask for, and what they are told."""

FLAGS = {"num_pages": "--max-total-tokens", "max_waiting_requests": "--max-queued-requests"}
"""Settings in the engine's messages to clients, and their flags: only the owner can change them."""

logger = logging.getLogger(__name__)
_ENCODER = json.JSONEncoder(ensure_ascii=False)


class ApiError(Exception):
    """A failure to report to the client. `param` names the field at fault; `code` is the API's, or None for the status."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | int | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def report(self) -> ErrorResponse:
        """What the client gets. Characters that UTF-8 can't encode (halves of surrogate pairs) become question marks."""
        error = ErrorDetail(
            message=_encodable(str(self)),
            type="invalid_request_error" if self.status < 500 else "server_error",
            param=None if self.param is None else _encodable(self.param),
            code=self.status if self.code is None else self.code,
        )
        return ErrorResponse(error=error)

    @property
    def anthropic_report(self) -> AnthropicErrorResponse:
        """The same in Anthropic's shape, which has no `param`: its messages name the field."""
        kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        error = AnthropicErrorDetail(type=kind, message=_encodable(str(self)))
        if isinstance(self.code, str):
            error.details = {"error_code": self.code}
        return AnthropicErrorResponse(type="error", error=error)

    def response_to(self, scope: Scope) -> Response:
        """The response to a request, in the shape of its endpoint."""
        path = path_of(scope)
        report: BaseModel = self.anthropic_report if path == ANTHROPIC or path.startswith(f"{ANTHROPIC}/") else self.report
        return Response(to_json(report), self.status, HEADERS.get(self.status), "application/json")


def wrong(field: str, said: str) -> ApiError:
    """A client's field is at fault: the message begins with its name, after which a colon may stand.

    In:  "messages:", "this model has no chat template"
    Out: ApiError(400, "messages: this model has no chat template", param="messages")
    """
    return ApiError(400, f"{field} {said}", param=field.removesuffix(":"))


class ClientDisconnected(Exception):
    """The client hung up before the response began."""


def path_of(scope: Scope) -> str:
    """The path as routes see it."""
    return str(scope["path"].removeprefix(scope.get("root_path", "")))


def echo(value: Any, most: int = MAX_ECHO) -> str:
    """A client's value as messages show it: in JSON, truncated to so many characters."""
    text = ""
    try:
        for piece in _ENCODER.iterencode(value[: most + 1] if isinstance(value, str) else value):  # no more of it than is shown
            text += piece
            if len(text) > most:
                break
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def refused(error: ValueError, client_names: Mapping[str, str]) -> ApiError:
    """Restates an error of the engine or of SamplingParams, whose messages begin with a field, in the client's terms.

    In:  ValueError("max_tokens must be ..."), {"max_tokens": "sampling_params.max_new_tokens"}
    Out: ApiError(400, "sampling_params.max_new_tokens must be ...", param="sampling_params.max_new_tokens")
    """
    return restated(ApiError(400, str(error), param=str(error).partition(" ")[0]), {**client_names, **FLAGS})


def restated(error: ApiError, client_names: Mapping[str, str]) -> ApiError:
    """The error in the words of an API with other field names. A message begins with a field and may name others, which are renamed
    too, unless they are also English words. Anything inside a renamed field is named by that field alone.

    In:  ApiError(400, "messages.1.name must be ...", param="messages.1.name"), {"messages": "input"}
    Out: ApiError(400, "input must be ...", param="input")
    """

    def renamed(field: str) -> str:
        around = [name for name in client_names if field == name or field.startswith(f"{name}.")]
        return client_names[max(around, key=len)] if around else field

    first, space, rest = str(error).partition(" ")
    field = first.removesuffix(":")
    message = f"{renamed(field)}{first[len(field) :]}{space}{_renamed(rest, client_names)}"
    return ApiError(error.status, message, param=None if error.param is None else renamed(error.param), code=error.code)


def from_engine(error: Exception) -> ApiError:
    """A failure of the server: 503 while the queue is full or the server shuts down, else 500. Details are in the log only."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return ApiError(503, _renamed(str(error), FLAGS))
    if isinstance(error, EngineClosed):
        return ApiError(503, str(error))
    if isinstance(error, RequestError):
        return ApiError(400, str(error))
    return ApiError(500, str(error) if isinstance(error, EngineError) else "internal server error")


def add_handlers(app: FastAPI) -> None:
    """Makes the application turn every exception into an ErrorResponse."""

    @app.exception_handler(ApiError)
    @app.exception_handler(EngineError)
    @app.exception_handler(QueueFull)
    async def known_error(request: Request, error: Exception) -> Response:
        return from_engine(error).response_to(request.scope)

    @app.exception_handler(RequestValidationError)
    async def invalid_request(request: Request, error: RequestValidationError) -> Response:
        return _from_validation(error.errors()).response_to(request.scope)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = error.detail
        if error.status_code == 404:
            unknown = f"unknown endpoint {echo(request.url.path)}: /openapi.json lists all"
            message = UNSERVED.get(path_of(request.scope), unknown)
        elif error.status_code == 405:
            message = f"{echo(request.url.path)} does not support the method {echo(request.method)}"
        response = ApiError(error.status_code, message).response_to(request.scope)
        response.headers.update(error.headers or {})
        routers = [getattr(each, "original_router", None) for each in request.app.routes]  # newer FastAPIs keep routers as they are
        routes = [*request.app.routes, *(route for router in routers if router is not None for route in router.routes)]
        matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
        methods = {method for route in matching for method in getattr(route, "methods", None) or ()}
        if error.status_code == 405 and methods:
            response.headers["Allow"] = ", ".join(sorted(methods))  # Starlette alone names those of one route only
        return response

    @app.exception_handler(ClientDisconnected)
    async def client_disconnected(_request: Request, _error: ClientDisconnected) -> Response:
        return Response(status_code=499)  # only for the access log; 499 is nginx's status for this

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> Response:
        """Starlette sends this response from outside all middleware, so it lacks the request's id. Then Starlette raises the error
        again, and uvicorn closes the connection: without the header the client's next request would fail."""
        response = from_engine(error).response_to(request.scope)
        response.headers.update({REQUEST_ID: request.state.request_id, "Connection": "close"})
        return response


OUR_WORDS = {
    "too_short": "must have {min_length} or more entries",
    "too_long": "must have {max_length} entries at most",
    "string_too_short": "must have {min_length} or more characters",
    "string_too_long": "must have {max_length} characters at most",
    "string_pattern_mismatch": "must match the pattern {pattern}",
}
"""Our wording in place of pydantic's, by the type of error."""


def _from_validation(errors: Sequence[dict[str, Any]]) -> ApiError:
    """One error for all that pydantic found. It names every field; `param` is the first."""
    reports: list[str] = []
    first, left = "", MAX_ECHO  # names of fields count too, as the client may have made them up; the first is in `param` as well
    for error in errors[:MAX_REPORTED]:
        place = error["loc"][1:]  # after "body", "query" or "path"
        own = place[-1:] if error["type"] == "extra_forbidden" else ()  # the client's word, whatever it is
        parts = [str(part) for part in (*(each for each in place[: len(place) - len(own)] if each not in (ONE, EACH)), *own)]
        param = ".".join(parts)[:MAX_NAME]
        first = param if not reports else first
        left -= len(param) * (1 if reports else 2)
        if left < LEAST_ECHO:
            break
        report, echoed = _report(param, error, left)
        reports.append(report)
        left -= echoed
    if len(errors) > len(reports):
        reports.append(f"and {len(errors) - len(reports)} more")
    return ApiError(400, "; ".join(reports), param=first or None)


def _report(param: str, error: dict[str, Any], most: int) -> tuple[str, int]:
    """What is wrong with a field, and how many characters of the client's value it shows, at most `most`."""
    if not param and error["type"] in ("missing", "model_type", "model_attributes_type"):
        return "the request body must be a JSON object", 0
    if error["type"] == "missing":
        return f"{param} is required", 0
    if error["type"] == "extra_forbidden":
        return f"{param} is not a field of this endpoint", 0
    shown, own = echo(error["input"], most), OUR_WORDS.get(error["type"])
    said = error["msg"].replace("Input should be", "must be", 1) if own is None else own.format(**error["ctx"])
    return f"{param or 'the request body:'} {said}, got {shown}", len(shown)


_WORD = re.compile(
    r"""(?<=^and )\w+|can't be compiled: .*|"(?:\\.|[^"\\])*"?|(?<!\w)'(?:\\.|[^'\\])*'?|[a-z_]+(?:\.[a-z_]+)+|[a-z]+_[a-z_]+""",
    re.DOTALL,
)
"""What may be a field's name. Quoted text, and what follows "can't be compiled", match as a whole, so that nothing in them is
renamed: they are the client's words. After an "and" at the beginning stands the second of two fields at fault."""


def _renamed(text: str, names: Mapping[str, str]) -> str:
    return _WORD.sub(lambda word: names.get(word[0], word[0]), text)


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
