"""OpenAI's API: /v1/models, /v1/completions and /v1/chat/completions, and the responses of each, whole and streamed."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from time import time
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from jaxspec.engine.request import GenerationOutput, Update
from jaxspec.server.bodies import JsonBody, documented
from jaxspec.server.logprobs import ChatLogprobs, CompletionLogprobs, chat_logprobs, completion_logprobs, join, prompt_offsets
from jaxspec.server.model import ServedModel
from jaxspec.server.openai_requests import (
    ChatRequest,
    CompletionRequest,
    OpenAIRequest,
    StreamOptions,
    chat_batch,
    chat_names,
    completion_batch,
    completion_names,
)
from jaxspec.server.responses import ResponseModel, failures, json_response, success, success_or_stream
from jaxspec.server.running import RequestBatch, RunningRequests
from jaxspec.server.speculation import (
    SglangSpeculation,
    SpeculativeTrace,
    VllmSpeculation,
    sglang_speculation,
    speculative_trace,
    vllm_speculation,
)
from jaxspec.server.streaming import respond


class ModelCard(ResponseModel):
    """An entry of the model list, with the extra fields of vLLM and SGLang."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(ResponseModel):
    object: str
    data: list[ModelCard]


class TokenCounts(ResponseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class PromptTokensDetails(ResponseModel):
    cached_tokens: int


class Usage(TokenCounts):
    """A prompt counts once, however many completions it has."""

    prompt_tokens_details: PromptTokensDetails


class Metrics(ResponseModel):
    speculative_decoding: VllmSpeculation


class SglangExtension(ResponseModel):
    spec_tokens_details: SglangSpeculation


class Choice(ResponseModel):
    """A completion, or a piece of one."""

    index: int
    finish_reason: str | None
    prompt_token_ids: list[int] | None = None
    """With return_token_ids; in a stream only in the first event of the choice."""
    token_ids: list[int] | None = None
    """With return_token_ids."""


class OpenAIEvent(ResponseModel):
    """An event of a stream; whole responses have the same fields."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[Choice]
    usage: Usage | TokenCounts | None = None
    """In a stream as stream_options say."""
    metrics: Metrics | None = None
    """For a single choice that used speculation."""
    sglext: SglangExtension | None = None
    """With return_spec_tokens_details."""
    speculative_trace: SpeculativeTrace | None = None
    """With speculative.trace."""


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None


class CompletionEvent(OpenAIEvent):
    choices: list[CompletionChoice]


class CompletionResponse(CompletionEvent):
    usage: Usage


class ChatMessage(ResponseModel):
    role: str
    content: str
    refusal: str | None


class ChatChoice(Choice):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatResponse(OpenAIEvent):
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(ResponseModel):
    """A piece of a message: the first has the role."""

    role: str | None = None
    content: str | None = None


class ChatDeltaChoice(Choice):
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChatEvent(OpenAIEvent):
    choices: list[ChatDeltaChoice]


_FAILURES = failures(404, 415, 504)
COMPLETION = success_or_stream(CompletionResponse, "each a text_completion whose text continues the one before") | _FAILURES
CHAT = success_or_stream(ChatResponse, "each a chat.completion.chunk") | _FAILURES


def openai_routes(running: RunningRequests, model: ServedModel) -> APIRouter:
    """The endpoints over one engine and its model."""
    router = APIRouter()

    @router.get("/v1/models", responses=success(ModelList))
    async def models() -> Response:
        return json_response(ModelList(object="list", data=[model_card(model, name) for name in model.names]))

    @router.get("/v1/models/{name:path}", responses=success(ModelCard) | failures(404))
    async def one_model(name: str) -> Response:
        if name not in model.names:
            model.refuse_name(name)
        return json_response(model_card(model, name))

    @router.post("/v1/completions", responses=COMPLETION, openapi_extra=documented(CompletionRequest))
    async def completions(body: Annotated[CompletionRequest, Depends(JsonBody(CompletionRequest))], request: Request) -> Response:
        prepare, build = partial(completion_batch, body, model), partial(CompletionBuilder, model, body)
        return await respond(running, request, prepare, build, completion_names(body), stream=body.stream)

    @router.post("/v1/chat/completions", responses=CHAT, openapi_extra=documented(ChatRequest))
    async def chat_completions(body: Annotated[ChatRequest, Depends(JsonBody(ChatRequest))], request: Request) -> Response:
        prepare, build = partial(chat_batch, body, model), partial(ChatBuilder, model, body)
        return await respond(running, request, prepare, build, chat_names(body), stream=body.stream)

    return router


def model_card(model: ServedModel, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        object="model",
        created=model.created,
        owned_by="jaxspec",
        root=model.path or model.name,
        max_model_len=model.context_length,
    )


class OpenAIBuilder(ABC):
    """Builds the response to one request; completions and chat completions differ in their choices only."""

    id_prefix: ClassVar[str]
    whole_type: ClassVar[type[OpenAIEvent]]
    whole_object: ClassVar[str]
    event_type: ClassVar[type[OpenAIEvent]]
    event_object: ClassVar[str]

    def __init__(self, model: ServedModel, body: OpenAIRequest, batch: RequestBatch):
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self._model, self._body, self._batch, self._created = model, body, batch, int(time())
        self._options = body.stream_options or StreamOptions()
        self._has_trace = batch.prompts[0].wants_trees
        self._begun: set[int] = set()
        """Choices that had an event."""
        self._outputs: dict[int, GenerationOutput] = {}
        self._generated = 0

    @abstractmethod
    def choice(self, index: int, output: GenerationOutput) -> Choice:
        """A finished choice of a whole response."""

    @abstractmethod
    def empty(self, index: int) -> Choice:
        """A piece that adds nothing to a choice."""

    @abstractmethod
    def pieces(self, index: int, update: Update, is_first: bool) -> list[Choice]:
        """The pieces that an update adds to a choice; none if it adds nothing."""

    def whole(self, outputs: Sequence[GenerationOutput]) -> OpenAIEvent:
        choices = [self.choice(index, output) for index, output in enumerate(outputs)]
        for choice, output in zip(choices, outputs, strict=True):
            self._add_token_ids(choice, output.token_ids, with_prompt=True)
        return self._event(self.whole_type, self.whole_object, choices, **self._statistics(outputs))

    def events(self, index: int, update: Update) -> list[OpenAIEvent]:
        self._generated += len(update.token_ids)
        if update.output is not None:
            self._outputs[index] = update.output
        is_first = index not in self._begun
        pieces = self.pieces(index, update, is_first)
        if not pieces and (self._has_trace or self._body.return_token_ids):
            pieces = [self.empty(index)]  # for tokens whose text is held back
        if not pieces:
            return []
        self._begun.add(index)
        self._add_token_ids(pieces[0], update.token_ids, with_prompt=is_first)
        events = [self._event(self.event_type, self.event_object, [piece]) for piece in pieces]
        if self._has_trace:
            events[0].speculative_trace = speculative_trace(update, self._model)
        for event in events:
            if self._options.continuous_usage_stats:
                event.usage = token_counts(sum(len(each.prompt) for each in self._batch.prompts), self._generated)
            elif self._options.include_usage:
                event.usage = None
        return events

    def last_events(self) -> list[OpenAIEvent]:
        """With include_usage: an event without choices."""
        if not self._options.include_usage:
            return []
        statistics = self._statistics([self._outputs[index] for index in sorted(self._outputs)])
        return [self._event(self.event_type, self.event_object, [], **statistics)]

    def _event(self, kind: type[OpenAIEvent], name: str, choices: list[Choice], **more: Any) -> OpenAIEvent:
        return kind(id=self.id, object=name, created=self._created, model=self._model.name, choices=choices, **more)

    def _add_token_ids(self, choice: Choice, token_ids: Sequence[int], *, with_prompt: bool) -> None:
        if self._body.return_token_ids:
            choice.token_ids = list(token_ids)
            if with_prompt:
                choice.prompt_token_ids = list(self._batch.prompt_of(choice.index).prompt)

    def _statistics(self, outputs: Sequence[GenerationOutput]) -> dict[str, Any]:
        """Usage; and for a single choice with speculation vLLM's `metrics` and, on request, SGLang's `sglext`."""
        firsts = outputs[:: self._batch.n]  # a prompt counts once
        counts = token_counts(sum(len(each.prompt_token_ids) for each in firsts), sum(len(each.token_ids) for each in outputs))
        cached = PromptTokensDetails(cached_tokens=sum(each.cached_tokens for each in firsts))
        fields: dict[str, Any] = {"usage": Usage(**dict(counts), prompt_tokens_details=cached)}
        if len(outputs) == 1 and (speculation := vllm_speculation(outputs[0].speculation)) is not None:
            fields["metrics"] = Metrics(speculative_decoding=speculation)
            if self._body.return_spec_tokens_details:
                fields["sglext"] = SglangExtension(spec_tokens_details=sglang_speculation(outputs[0].speculation))
        return fields


class CompletionBuilder(OpenAIBuilder):
    """Builds the responses of /v1/completions."""

    id_prefix = "cmpl"
    whole_type, whole_object = CompletionResponse, "text_completion"
    event_type, event_object = CompletionEvent, "text_completion"

    def choice(self, index: int, output: GenerationOutput) -> Choice:
        echo = self._echo(index)
        logprobs = None if output.logprobs is None else self._logprobs(output, len(echo))
        if logprobs is not None and output.prompt_logprobs is not None:
            asked = self._batch.prompt_of(index)
            special = asked.params.skip_special_tokens
            offsets = prompt_offsets(self._model, asked.prompt, len(echo), skip_special_tokens=special)
            logprobs = join(completion_logprobs(self._model, asked.prompt, output.prompt_logprobs, offsets), logprobs)
        return CompletionChoice(index=index, text=echo + output.text, logprobs=logprobs, finish_reason=output.finish_reason)

    def empty(self, index: int) -> Choice:
        return CompletionChoice(index=index, text="", logprobs=None, finish_reason=None)

    def pieces(self, index: int, update: Update, is_first: bool) -> list[Choice]:
        text = (self._echo(index) if is_first else "") + update.text
        logprobs = self._logprobs(update, 0) if update.logprobs else None  # echo with logprobs can't be streamed
        if not text and logprobs is None and update.output is None:
            return []
        finish_reason = None if update.output is None else update.output.finish_reason
        return [CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=finish_reason)]

    def _echo(self, index: int) -> str:
        """The prompt, if the text begins with it."""
        if self._batch.echo is None:
            return ""
        text = self._batch.echo[index // self._batch.n]
        if text is not None:
            return text
        assert self._model.tokenizer is not None
        asked = self._batch.prompt_of(index)
        return str(self._model.tokenizer.decode(list(asked.prompt), skip_special_tokens=asked.params.skip_special_tokens))

    def _logprobs(self, result: GenerationOutput | Update, before: int) -> CompletionLogprobs:
        """Of generated tokens; `before` characters of the choice's text come before the output."""
        assert result.logprobs is not None and result.text_offsets is not None
        return completion_logprobs(
            self._model, result.token_ids, result.logprobs, (before + offset for offset in result.text_offsets)
        )


class ChatBuilder(OpenAIBuilder):
    """Builds the responses of /v1/chat/completions."""

    id_prefix = "chatcmpl"
    whole_type, whole_object = ChatResponse, "chat.completion"
    event_type, event_object = ChatEvent, "chat.completion.chunk"

    def choice(self, index: int, output: GenerationOutput) -> Choice:
        message = ChatMessage(role="assistant", content=output.text, refusal=None)
        logprobs = None if output.logprobs is None else chat_logprobs(self._model, output.logprobs)
        return ChatChoice(index=index, message=message, logprobs=logprobs, finish_reason=output.finish_reason)

    def empty(self, index: int) -> Choice:
        return ChatDeltaChoice(index=index, delta=ChatDelta(content=""), logprobs=None, finish_reason=None)

    def pieces(self, index: int, update: Update, is_first: bool) -> list[Choice]:
        pieces: list[Choice] = []
        if is_first:
            delta = ChatDelta(role="assistant", content="")
            pieces.append(ChatDeltaChoice(index=index, delta=delta, logprobs=None, finish_reason=None))
        if update.text or update.logprobs:
            delta = ChatDelta(content=update.text)
            logprobs = chat_logprobs(self._model, update.logprobs) if update.logprobs else None
            pieces.append(ChatDeltaChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=None))
        if update.output is not None:
            finish_reason = update.output.finish_reason
            pieces.append(ChatDeltaChoice(index=index, delta=ChatDelta(), logprobs=None, finish_reason=finish_reason))
        return pieces


def token_counts(prompt: int, completion: int) -> TokenCounts:
    return TokenCounts(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)
