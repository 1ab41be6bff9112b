"""What the responses of OpenAI's completions and chat completions share, whole and streamed."""

import uuid
from abc import abstractmethod
from collections.abc import Sequence
from time import time
from typing import Any, ClassVar

from jaxspec.engine.request import GenerationOutput, Update
from jaxspec.server.model import ServedModel
from jaxspec.server.openai.requests import OpenAIRequest, StreamOptions
from jaxspec.server.running import RequestBatch
from jaxspec.server.sending import ResponseModel
from jaxspec.server.speculation import (
    SglangSpeculation,
    SpeculativeTrace,
    VllmSpeculation,
    sglang_speculation,
    speculative_trace,
    vllm_speculation,
)
from jaxspec.server.streaming import ResponseBuilder


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


class OpenAIBuilder(ResponseBuilder):
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
        self._tells_all = self._has_trace or bool(body.return_token_ids)
        """Updates have an event too if their text is held back."""
        self._begun: set[int] = set()
        """Choices that had an event."""
        self._outputs: dict[int, GenerationOutput] = {}
        self._generated = 0

    @abstractmethod
    def choice(self, index: int, output: GenerationOutput) -> Choice:
        """A finished choice of a whole response."""

    @abstractmethod
    def pieces(self, index: int, update: Update, is_first: bool) -> list[Choice]:
        """The pieces that an update adds to a choice; none if it adds nothing, unless `_tells_all`."""

    def whole(self, outputs: Sequence[GenerationOutput]) -> OpenAIEvent:
        choices = [self.choice(index, output) for index, output in enumerate(outputs)]
        for choice, output in zip(choices, outputs, strict=True):
            if self._body.return_token_ids:
                self._add_token_ids(choice, output.token_ids, with_prompt=True)
        return self._event(self.whole_type, self.whole_object, choices, **self._statistics(outputs))

    def events(self, index: int, update: Update) -> list[OpenAIEvent]:
        self._generated += len(update.token_ids)
        if update.output is not None:
            self._outputs[index] = update.output
        is_first = index not in self._begun
        pieces = self.pieces(index, update, is_first)
        if not pieces:
            return []
        self._begun.add(index)
        if self._body.return_token_ids:
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


def token_counts(prompt: int, completion: int) -> TokenCounts:
    return TokenCounts(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)
