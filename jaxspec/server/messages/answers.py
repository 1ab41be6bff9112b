"""The answers of Anthropic's Messages API, as one object or as its typed events."""

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json, to_json

from jaxspec.engine.request import GenerationOutput, Update
from jaxspec.server.answer_parts import AnswerPart, AnswerParts, Change, as_update, is_unfinished
from jaxspec.server.errors import ApiError
from jaxspec.server.messages.requests import MessagesRequest
from jaxspec.server.model import ServedModel
from jaxspec.server.running import RequestBatch
from jaxspec.server.sending import AnthropicErrorResponse, ResponseModel, TypedEvent
from jaxspec.server.streaming import ResponseBuilder


class AnswerBlock(ResponseModel):
    """A part of the answer: text, thinking or tool_use."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    """Of thinking; empty: it is not signed."""
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    """Of a call; of one that was cut off, what there is of it."""


class AnthropicUsage(ResponseModel):
    """The prompt's tokens are the sum of input_tokens and cache_read_input_tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    """0: every prefix is cached as long as there is room."""
    cache_read_input_tokens: int
    output_tokens: int


class MessagesResponse(ResponseModel):
    """An answer, or in the first event of a stream its beginning."""

    id: str
    type: str
    role: str
    model: str
    content: list[AnswerBlock]
    stop_reason: str | None
    """end_turn, max_tokens, stop_sequence or tool_use; abort if the request was ended by its name."""
    stop_sequence: str | None
    usage: AnthropicUsage


class AnswerDelta(ResponseModel):
    """A piece of a block, or the end of the answer."""

    type: str | None = None
    """text_delta, thinking_delta, signature_delta or input_json_delta; none at the end."""
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    partial_json: str | None = None
    stop_reason: str | None = None
    stop_sequence: str | None = None


class MessagesEvent(TypedEvent):
    """An event of a stream."""

    message: MessagesResponse | None = None
    index: int | None = None
    content_block: AnswerBlock | None = None
    delta: AnswerDelta | None = None
    usage: AnthropicUsage | None = None


class TokenCounted(ResponseModel):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


class MessagesBuilder(ResponseBuilder):
    stream_end = ""

    def __init__(self, model: ServedModel, body: MessagesRequest, batch: RequestBatch):
        self._id = f"msg_{uuid.uuid4().hex}"
        self._model, self._body, self._batch = model, body, batch
        self._parts = AnswerParts(batch.answer)
        self._has_begun = False

    def whole(self, outputs: Sequence[GenerationOutput]) -> MessagesResponse:
        [output] = outputs
        self._parts.add(as_update(output))
        reason, sequence = self._stop(output)
        return self._response([block_of(part, part.text) for part in self._parts.parts], reason, sequence, usage_of(output))

    def events(self, _index: int, update: Update) -> list[MessagesEvent]:
        events = []
        if not self._has_begun:
            self._has_begun = True
            usage = counted(len(self._batch.prompts[0].prompt), 0, 0)
            events.append(MessagesEvent(type="message_start", message=self._response([], None, None, usage)))
        for change in self._parts.add(update):
            match change:
                case Change("begun", number, part):
                    events.append(MessagesEvent(type="content_block_start", index=number, content_block=block_of(part)))
                case Change("grown", number, part, piece):
                    events.append(MessagesEvent(type="content_block_delta", index=number, delta=delta_of(part, piece)))
                case Change("ended", number):
                    events.append(MessagesEvent(type="content_block_stop", index=number))
        if update.output is not None:
            reason, sequence = self._stop(update.output)
            end = AnswerDelta(stop_reason=reason, stop_sequence=sequence)
            events.append(MessagesEvent(type="message_delta", delta=end, usage=usage_of(update.output)))
            events.append(MessagesEvent(type="message_stop"))
        return events

    def failure(self, error: ApiError) -> AnthropicErrorResponse:
        return error.anthropic_report

    def _stop(self, output: GenerationOutput) -> tuple[str, str | None]:
        """Why the answer ended, and at which of the request's strings."""
        if output.finish_reason != "stop":
            return {"length": "max_tokens"}.get(output.finish_reason, output.finish_reason), None
        matched = output.matched_stop
        if isinstance(matched, str) and matched in (self._body.stop_sequences or ()):
            return "stop_sequence", matched
        calls = [part.text for part in self._parts.parts if part.kind == "call"]
        return "tool_use" if calls and not is_unfinished(calls[-1]) else "end_turn", None

    def _response(
        self, content: list[AnswerBlock], reason: str | None, sequence: str | None, usage: AnthropicUsage
    ) -> MessagesResponse:  # fmt: skip
        return MessagesResponse(
            id=self._id,
            type="message",
            role="assistant",
            model=self._model.name,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=usage,
        )


def block_of(part: AnswerPart, text: str = "") -> AnswerBlock:
    """A part with its text, or as it begins."""
    match part.kind:
        case "text":
            return AnswerBlock(type="text", text=text)
        case "thinking":
            return AnswerBlock(type="thinking", thinking=text, signature="")
        case "call":
            call_id = f"toolu_{uuid.uuid4().hex[:24]}"
            return AnswerBlock(type="tool_use", id=call_id, name=part.name, input=arguments_of(text))


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a call, which may be cut off; {} for what is no JSON object. Clients read streams in the same way.

    In:  '{"city": "Paris", "day": "Mon'
    Out: {"city": "Paris"}
    """
    try:
        found = from_json(text or "{}", allow_partial=True)
    except ValueError:
        try:  # Python's reader takes raw line breaks, and halves of surrogate pairs, which no response can hold
            written = json.dumps(json.loads(text, strict=False), ensure_ascii=False)
            found = json.loads(re.sub("[\ud800-\udfff]", "\ufffd", written))
            to_json(found)  # raises ValueError for what is nested too deeply for the response
        except (ValueError, RecursionError):
            return {}
    return found if isinstance(found, dict) else {}


def delta_of(part: AnswerPart, piece: str) -> AnswerDelta:
    """A block that goes on."""
    match part.kind:
        case "text":
            return AnswerDelta(type="text_delta", text=piece)
        case "thinking":
            return AnswerDelta(type="thinking_delta", thinking=piece)
        case "call":
            return AnswerDelta(type="input_json_delta", partial_json=piece)


def usage_of(output: GenerationOutput) -> AnthropicUsage:
    return counted(len(output.prompt_token_ids), output.cached_tokens, len(output.token_ids))


def counted(prompt: int, cached: int, generated: int) -> AnthropicUsage:
    """Counted as Anthropic does: input_tokens leaves out cached tokens."""
    return AnthropicUsage(
        input_tokens=prompt - cached, cache_creation_input_tokens=0, cache_read_input_tokens=cached, output_tokens=generated
    )
