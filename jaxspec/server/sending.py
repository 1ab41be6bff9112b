"""The description of responses in /openapi.json, and sending them. Each API defines its own where it builds them."""

from collections.abc import Sequence
from typing import Any

from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict

type Documented = dict[int | str, dict[str, Any]]
"""FastAPI's `responses`: what each status means."""


class ResponseModel(BaseModel):
    """A JSON object that the server sends, with the fields that were set. Later versions may add fields, never remove them."""

    model_config = ConfigDict(extra="allow", protected_namespaces=(), use_attribute_docstrings=True)


class TypedEvent(ResponseModel):
    """An event of a stream whose type is also in a line of its own."""

    type: str


class ErrorDetail(ResponseModel):
    """An error, in OpenAI's terms."""

    message: str
    type: str
    """invalid_request_error, or server_error from status 500 on."""
    param: str | None
    """The field at fault."""
    code: str | int
    """OpenAI's code if there is one, else the status."""


class ErrorResponse(ResponseModel):
    """Every failure."""

    error: ErrorDetail


class AnthropicErrorDetail(ResponseModel):
    """An error, in Anthropic's terms."""

    type: str
    message: str
    details: dict[str, str] | None = None
    """{"error_code": ...}, if there is more to tell apart than the type."""


class AnthropicErrorResponse(TypedEvent):
    """Every failure of Anthropic's endpoints."""

    type: str
    """error"""
    error: AnthropicErrorDetail


_MEANINGS = {
    400: "A field, parameter or header is wrong; the message says which.",
    401: "The key is missing or wrong.",
    403: "It comes from a web page of another origin.",
    404: "The endpoint or model does not exist.",
    405: "The endpoint does not support this method.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    500: "The server failed; its log says why.",
    503: "The queue is full, the engine does not work, or the server is shutting down. Retry-After says when to try again.",
    504: "The request was not finished in time.",
}


def failures(*statuses: int, shape: type[ResponseModel] = ErrorResponse) -> Documented:
    """Documents failures, which all have one shape."""
    return {status: {"model": shape, "description": _MEANINGS[status]} for status in statuses}


def success(model: Any) -> Documented:
    """Documents a response in JSON."""
    return {200: {"model": model, "description": "The response."}}


def success_or_stream(model: Any, event: str, last: str = "; of the last event: [DONE]") -> Documented:
    """Documents a response in JSON, or with `stream` as server-sent events; `event` describes what each holds, and `last` the last
    one, if that differs."""
    data = {"type": "string", "description": f"JSON, {event}{last}."}
    events = {"schema": {"type": "object", "properties": {"data": data}, "required": ["data"]}}
    return {200: {"model": model, "description": "The response, whole or as a stream.", "content": {"text/event-stream": events}}}


COMMON = (400, 401, 403, 405, 408, 413, 500, 503)
"""Failures of any endpoint."""
COMMON_FAILURES = failures(*COMMON)


def to_json(model: BaseModel) -> str:
    """The JSON of the fields that were set."""
    return model.model_dump_json(exclude_unset=True)


def json_response(content: BaseModel | Sequence[BaseModel]) -> Response:
    """A response, or a list of them, as JSON. Slow for thousands of log probabilities."""
    text = to_json(content) if isinstance(content, BaseModel) else f"[{','.join(map(to_json, content))}]"
    return Response(text, media_type="application/json")
