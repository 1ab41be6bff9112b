"""The answers of the Responses API, built whole or as the events of a stream."""

import uuid
from collections.abc import Sequence
from time import time
from typing import Any

from jaxspec.engine.request import GenerationOutput, Update
from jaxspec.server.answer_parts import AnswerPart, AnswerParts, Change, as_update, is_unfinished, thinking_tokens
from jaxspec.server.errors import ApiError
from jaxspec.server.logprobs import ChatEntry, chat_logprobs
from jaxspec.server.model import ServedModel
from jaxspec.server.openai.chat import call_id
from jaxspec.server.responses.objects import (
    IncompleteDetails,
    InputDetails,
    OutputDetails,
    OutputItem,
    OutputPart,
    ResponsesEvent,
    ResponsesFailure,
    ResponsesResponse,
    ResponsesUsage,
    ShownFormat,
)
from jaxspec.server.responses.requests import FlatNamedTool, ResponsesRequest
from jaxspec.server.running import RequestBatch
from jaxspec.server.streaming import ResponseBuilder

SHOWN_OF_TOOLS = {"type", "name", "description", "parameters", "strict"}


class ResponsesBuilder(ResponseBuilder):
    stream_end = ""

    def __init__(self, model: ServedModel, body: ResponsesRequest, batch: RequestBatch):
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time())
        self._model, self._body, self._batch = model, body, batch
        self._parts = AnswerParts(batch.answer)
        self._items: list[OutputItem] = []
        """One for each part, as far as it came."""
        self._logprobs: list[ChatEntry] = []
        self._sent_logprobs = 0
        """How many log probabilities were in deltas so far."""
        self._sent = 0
        """Events so far."""

    def whole(self, outputs: Sequence[GenerationOutput]) -> ResponsesResponse:
        [output] = outputs
        self._add(as_update(output))
        return self._ended(output)

    def events(self, _index: int, update: Update) -> list[ResponsesEvent]:
        events = []
        if not self._sent:
            begun = self._response("in_progress")
            events = [self._event(f"response.{name}", response=begun) for name in ("created", "in_progress")]
        events += self._add(update)
        if update.output is not None:
            response = self._ended(update.output)
            events.append(self._event(f"response.{response.status}", response=response))
        return events

    def failure(self, error: ApiError) -> ResponsesEvent:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        failure = ResponsesFailure(code=code, message=error.report.error.message)
        return self._event("response.failed", response=self._response("failed", error=failure))

    def _add(self, update: Update) -> list[ResponsesEvent]:
        """The events of parts that an update changes."""
        self._logprobs += chat_logprobs(self._model, update.logprobs).content if update.logprobs else ()
        is_complete = update.output is None or update.output.finish_reason == "stop"
        events = []
        for change in self._parts.add(update):
            match change:
                case Change("begun", number, part):
                    events += self._begin(number, part)
                case Change("grown", number, part, piece):
                    events.append(self._grow(number, part, piece))
                case Change("ended", number, part):
                    is_last = number == len(self._parts.parts) - 1
                    is_incomplete = (is_last and not is_complete) or (part.kind == "call" and is_unfinished(part.text))
                    events += self._end(number, part, "incomplete" if is_incomplete else "completed")
        return events

    def _begin(self, number: int, part: AnswerPart) -> list[ResponsesEvent]:
        unique = uuid.uuid4().hex
        match part.kind:
            case "call":
                item = OutputItem(id=f"fc_{unique}", type="function_call", status="in_progress", call_id=call_id(), name=part.name)
                item.arguments = ""
            case "text":
                item = OutputItem(id=f"msg_{unique}", type="message", status="in_progress", role="assistant", content=[])
            case "thinking":
                item = OutputItem(id=f"rs_{unique}", type="reasoning", status="in_progress", summary=[], content=[])
        self._items.append(item)
        added = self._event("response.output_item.added", output_index=number, item=item.model_copy())
        if part.kind == "call":
            return [added]
        return [added, self._item_event("response.content_part.added", number, content_index=0, part=self._content(part, ""))]

    def _grow(self, number: int, part: AnswerPart, piece: str) -> ResponsesEvent:
        match part.kind:
            case "call":
                return self._item_event("response.function_call_arguments.delta", number, delta=piece)
            case "thinking":
                return self._item_event("response.reasoning_text.delta", number, content_index=0, delta=piece)
            case "text":
                new, self._sent_logprobs = self._logprobs[self._sent_logprobs :], len(self._logprobs)
                return self._item_event("response.output_text.delta", number, content_index=0, delta=piece, logprobs=new)

    def _end(self, number: int, part: AnswerPart, status: str) -> list[ResponsesEvent]:
        item = self._items[number]
        item.status = status
        events = []
        if part.kind == "call":
            item.arguments = part.text
            kind = "response.function_call_arguments.done"
            events.append(self._item_event(kind, number, name=part.name, arguments=part.text))
        else:
            content = self._content(part, part.text)
            item.content = [content]
            more = {"logprobs": self._logprobs} if part.kind == "text" else {}
            events.append(self._item_event(f"response.{content.type}.done", number, content_index=0, text=part.text, **more))
            events.append(self._item_event("response.content_part.done", number, content_index=0, part=content))
        return [*events, self._event("response.output_item.done", output_index=number, item=item)]

    def _content(self, part: AnswerPart, text: str) -> OutputPart:
        if part.kind == "thinking":
            return OutputPart(type="reasoning_text", text=text)
        content = OutputPart(type="output_text", text=text, annotations=[])
        if self._batch.prompts[0].params.logprobs is not None:
            content.logprobs = self._logprobs if text else []
        return content

    def _event(self, kind: str, **fields: Any) -> ResponsesEvent:
        self._sent += 1
        return ResponsesEvent(type=kind, sequence_number=self._sent - 1, **fields)

    def _item_event(self, kind: str, number: int, **fields: Any) -> ResponsesEvent:
        return self._event(kind, item_id=self._items[number].id, output_index=number, **fields)

    def _ended(self, output: GenerationOutput) -> ResponsesResponse:
        """The response when the answer has ended."""
        prompt, generated = len(output.prompt_token_ids), len(output.token_ids)
        usage = ResponsesUsage(
            input_tokens=prompt,
            input_tokens_details=InputDetails(cached_tokens=output.cached_tokens),
            output_tokens=generated,
            output_tokens_details=OutputDetails(reasoning_tokens=thinking_tokens(self._model, self._batch, output)),
            total_tokens=prompt + generated,
        )
        if output.finish_reason == "stop":
            return self._response("completed", usage=usage)
        reason = "max_output_tokens" if output.finish_reason == "length" else output.finish_reason
        return self._response("incomplete", usage=usage, incomplete_details=IncompleteDetails(reason=reason))

    def _response(self, status: str, **more: Any) -> ResponsesResponse:
        body, params, choice = self._body, self._batch.prompts[0].params, self._body.tool_choice
        asked = None if body.text is None else body.text.format
        shown = {"type": "text" if asked is None else asked.type}
        shown |= {} if asked is None else asked.model_dump(by_alias=True, exclude_none=True)
        fields: dict[str, Any] = {"usage": None, "incomplete_details": None, "error": None} | more
        return ResponsesResponse(
            id=self._id,
            object="response",
            created_at=self._created,
            status=status,
            model=self._model.name,
            output=list(self._items),
            store=False,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_logprobs=body.top_logprobs or 0,
            tools=[tool.model_dump(include=SHOWN_OF_TOOLS) for tool in body.tools or ()],
            tool_choice={"type": "function", "name": choice.name} if isinstance(choice, FlatNamedTool) else choice or "auto",
            parallel_tool_calls=body.parallel_tool_calls is not False,
            text=ShownFormat(format=shown),
            reasoning={"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            truncation="disabled",
            background=False,
            previous_response_id=None,
            metadata=body.metadata or {},
            user=body.user,
            **fields,
        )
