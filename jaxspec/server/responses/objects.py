"""What the Responses API answers: the response, its items, and the events of a stream."""

from typing import Any

from pydantic import SkipValidation

from jaxspec.server.logprobs import ChatEntry
from jaxspec.server.sending import ResponseModel, TypedEvent


class OutputPart(ResponseModel):
    """A piece of a message, output_text, or of thinking, reasoning_text."""

    type: str
    text: str
    annotations: list[str] | None = None
    """Of a message; empty."""
    logprobs: SkipValidation[list[ChatEntry]] | None = None
    """Of a message, if the request asks for them."""


class OutputItem(ResponseModel):
    """A part of the answer: reasoning, message or function_call."""

    id: str
    type: str
    status: str
    """in_progress, completed or incomplete."""
    role: str | None = None
    content: list[OutputPart] | None = None
    summary: list[OutputPart] | None = None
    """Of reasoning; empty."""
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    """The text of a JSON object, unless the answer was cut off."""


class InputDetails(ResponseModel):
    cached_tokens: int


class OutputDetails(ResponseModel):
    reasoning_tokens: int


class ResponsesUsage(ResponseModel):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(ResponseModel):
    reason: str
    """max_output_tokens, or abort if the request was ended by its name."""


class ResponsesFailure(ResponseModel):
    code: str
    message: str


class ShownFormat(ResponseModel):
    """The text's format, as it was asked for."""

    format: dict[str, Any]


class ResponsesResponse(ResponseModel):
    """An answer, or in events what there is of it. Fields of the request come back."""

    id: str
    object: str
    created_at: int
    status: str
    """in_progress, completed, incomplete or failed."""
    model: str
    output: list[OutputItem]
    usage: ResponsesUsage | None
    """Null until the answer is complete."""
    incomplete_details: IncompleteDetails | None
    error: ResponsesFailure | None
    store: bool
    """False: nothing is stored."""
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    text: ShownFormat
    reasoning: dict[str, str | None]
    truncation: str
    background: bool
    previous_response_id: str | None
    metadata: dict[str, Any]
    user: str | None


class ResponsesEvent(TypedEvent):
    """An event of a stream."""

    sequence_number: int
    response: ResponsesResponse | None = None
    output_index: int | None = None
    item: OutputItem | None = None
    item_id: str | None = None
    content_index: int | None = None
    part: OutputPart | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    logprobs: SkipValidation[list[ChatEntry]] | None = None
