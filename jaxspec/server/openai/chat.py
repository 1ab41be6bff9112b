"""The responses of /v1/chat/completions: thinking, content and tool calls, as a message or in pieces."""

import uuid
from collections import defaultdict
from typing import Any

from jaxspec.engine.request import GenerationOutput, Update
from jaxspec.server.answer_parts import is_unfinished
from jaxspec.server.logprobs import ChatLogprobs, chat_logprobs
from jaxspec.server.model import ServedModel
from jaxspec.server.openai.objects import Choice, OpenAIBuilder, OpenAIEvent, Usage
from jaxspec.server.openai.requests import ChatRequest
from jaxspec.server.running import RequestBatch
from jaxspec.server.sending import ResponseModel
from jaxspec.text.answer_parser import Answer, AnswerParser
from jaxspec.text.answer_reader import Arguments, CallStart, Content, Reasoning


class CalledFunction(ResponseModel):
    """A function that the answer calls, or a piece of it: the first has the name."""

    name: str | None = None
    arguments: str
    """The text of a JSON object."""


class ToolCallInAnswer(ResponseModel):
    """In a stream, only the first piece of a call has id and type."""

    index: int | None = None
    """In a stream: which call it is a piece of."""
    id: str | None = None
    type: str | None = None
    function: CalledFunction


class ChatMessage(ResponseModel):
    role: str
    content: str | None
    """Null if there is nothing but calls."""
    refusal: str | None
    reasoning_content: str | None = None
    """The thinking, if the server separates it."""
    tool_calls: list[ToolCallInAnswer] | None = None


class ChatChoice(Choice):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatResponse(OpenAIEvent):
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    """Where vLLM's clients look for them: the same as in the choices."""


class ChatDelta(ResponseModel):
    """A piece of a message: the first has the role."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallInAnswer] | None = None


class ChatDeltaChoice(Choice):
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChatEvent(OpenAIEvent):
    choices: list[ChatDeltaChoice]
    prompt_token_ids: list[int] | None = None


class ChatBuilder(OpenAIBuilder):
    id_prefix = "chatcmpl"
    whole_type, whole_object = ChatResponse, "chat.completion"
    event_type, event_object = ChatEvent, "chat.completion.chunk"

    def __init__(self, model: ServedModel, body: ChatRequest, batch: RequestBatch):
        super().__init__(model, body, batch)
        self._parsers = defaultdict[int, AnswerParser](lambda: AnswerParser(batch.answer))
        self._newest_arguments: dict[int, str] = {}
        """For each choice that calls a tool: the arguments of its newest call so far."""
        self._leaves_reasoning_out = body.include_reasoning is False

    def choice(self, index: int, output: GenerationOutput) -> Choice:
        answer = Answer.of(AnswerParser(self._batch.answer).add(output.text, is_last=True))
        message = ChatMessage(role="assistant", content=answer.content or (None if answer.calls else ""), refusal=None)
        if answer.reasoning and not self._leaves_reasoning_out:
            message.reasoning_content = answer.reasoning
        if answer.calls:
            self._newest_arguments[index] = answer.calls[-1].arguments
            message.tool_calls = [
                ToolCallInAnswer(id=call_id(), type="function", function=CalledFunction(**call._asdict())) for call in answer.calls
            ]
        logprobs = None if output.logprobs is None else chat_logprobs(self._model, output.logprobs)
        return ChatChoice(index=index, message=message, logprobs=logprobs, finish_reason=self._finish_reason(index, output))

    def pieces(self, index: int, update: Update, is_first: bool) -> list[Choice]:
        first = [ChatDelta(role="assistant", content="")] if is_first else []
        last = [] if update.output is None else [ChatDelta()]
        deltas = self._deltas(index, update)
        if not deltas and (update.logprobs or (self._tells_all and not first and not last)):
            deltas = [ChatDelta(content="")]
        pieces = [
            ChatDeltaChoice(index=index, delta=delta, logprobs=None, finish_reason=None) for delta in (*first, *deltas, *last)
        ]
        if update.logprobs:
            pieces[len(first)].logprobs = chat_logprobs(self._model, update.logprobs)
        if update.output is not None:
            pieces[-1].finish_reason = self._finish_reason(index, update.output)
        return [*pieces]

    def _event(self, kind: type[OpenAIEvent], name: str, choices: list[Choice], **more: Any) -> OpenAIEvent:
        ids = choices[0].prompt_token_ids if choices else None
        return super()._event(kind, name, choices, **more, **({} if ids is None else {"prompt_token_ids": ids}))

    def _deltas(self, index: int, update: Update) -> list[ChatDelta]:
        """What an update adds to the parts of a choice."""
        deltas = []
        for event in self._parsers[index].add(update.text, is_last=update.output is not None):
            match event:
                case Content(text):
                    deltas.append(ChatDelta(content=text))
                case Reasoning(text):
                    if not self._leaves_reasoning_out:
                        deltas.append(ChatDelta(reasoning_content=text))
                case CallStart(number, name):
                    self._newest_arguments[index] = ""
                    function = CalledFunction(name=name, arguments="")
                    call = ToolCallInAnswer(index=number, id=call_id(), type="function", function=function)
                    deltas.append(ChatDelta(tool_calls=[call]))
                case Arguments(number, text):
                    self._newest_arguments[index] += text
                    call = ToolCallInAnswer(index=number, function=CalledFunction(arguments=text))
                    deltas.append(ChatDelta(tool_calls=[call]))
        return deltas

    def _finish_reason(self, index: int, output: GenerationOutput) -> str:
        """The reason: "tool_calls" for a complete answer with calls, unless it stopped within one."""
        arguments = self._newest_arguments.get(index)
        is_call = arguments is not None and not is_unfinished(arguments)
        return "tool_calls" if is_call and output.finish_reason == "stop" else output.finish_reason


def call_id() -> str:
    """A new name for a tool call, in OpenAI's form."""
    return f"call_{uuid.uuid4().hex[:24]}"
