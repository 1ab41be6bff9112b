"""The answers of OpenAI's API: whole, and in chunks."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from time import time
from typing import ClassVar

from jaxspec.engine.async_engine import Generation
from jaxspec.engine.request import GenerationOutput, Speculation, Update
from jaxspec.server.batch import Batch, updates
from jaxspec.server.logprobs import CompletionLogprobs, chat_logprobs, join
from jaxspec.server.model import ServedModel
from jaxspec.server.openai_protocol import OpenAIRequest, StreamOptions
from jaxspec.server.speculation import Trace, sglang_details, vllm_metrics
from jaxspec.server.streaming import Event


class Responder(ABC):
    """Makes the answer to one HTTP request; completions and chat completions differ in their choices only."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, model: ServedModel, body: OpenAIRequest, batch: Batch):
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self._model, self._body, self._batch, self._created = model, body, batch, int(time())

    @abstractmethod
    def choice(self, index: int, output: GenerationOutput) -> Event:
        """A finished choice of a whole answer."""

    @abstractmethod
    def nothing(self, index: int) -> Event:
        """A piece of a choice that adds nothing to it."""

    @abstractmethod
    def deltas(self, index: int, update: Update, is_first: bool) -> Iterator[Event]:
        """What an update adds to a choice; nothing, if it brought neither text nor logprobs."""

    def whole(self, outputs: Sequence[GenerationOutput]) -> Event:
        """The answer in one piece."""
        if self._batch.prompt_only:
            outputs = [without_output(output) for output in outputs]
        choices = [
            self.choice(index, output) | self._token_ids(index, output.token_ids, True) for index, output in enumerate(outputs)
        ]
        return self._event(self.whole_object, choices) | self._statistics(outputs)

    async def chunks(self, generation: Generation) -> AsyncIterator[Event]:
        """The answer as it comes; with usage, a last chunk without choices carries it."""
        options = self._body.stream_options or StreamOptions()
        index_of = {request_id: index for index, request_id in enumerate(generation.request_ids)}
        outputs: dict[int, GenerationOutput] = {}
        begun: set[int] = set()
        generated = 0
        trace = Trace(self._model, self._batch.prompts[0][1]) if self._batch.trace else None
        async for update in updates(generation):
            index = index_of[update.request_id]
            generated += len(update.token_ids)
            if update.output is not None:
                outputs[index] = update.output
            more: Event = {"usage": None} if options.include_usage else {}
            if options.continuous_usage_stats:
                more = {"usage": token_counts(sum(len(ids) for ids, _ in self._batch.prompts), generated)}
            deltas = list(self.deltas(index, update, index not in begun))
            if (trace is not None or self._body.return_token_ids) and not deltas:  # tokens whose text is held back
                deltas = [self.nothing(index)]
            if self._body.return_token_ids:
                deltas[0] |= self._token_ids(index, update.token_ids, index not in begun)
            begun.add(index)
            for delta in deltas:
                # The first one of an update tells of its tokens.
                first = {"speculative_trace": trace.add(update)} if trace is not None and delta is deltas[0] else {}
                yield self._event(self.chunk_object, [delta]) | more | first
        if options.include_usage:
            yield self._event(self.chunk_object, []) | self._statistics([outputs[index] for index in sorted(outputs)])

    def _statistics(self, outputs: Sequence[GenerationOutput]) -> Event:
        return {"usage": usage(outputs, self._batch.firsts(outputs))} | speculation_report(outputs, self._body)

    def _token_ids(self, index: int, token_ids: Sequence[int], with_prompt: bool) -> Event:
        """vLLM's extra fields of a choice, if they are wanted."""
        if not self._body.return_token_ids:
            return {}
        prompt = {"prompt_token_ids": self._batch.prompt_of(index)[0]} if with_prompt else {}
        return prompt | {"token_ids": list(token_ids)}

    def _event(self, kind: str, choices: list[Event]) -> Event:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model.name, "choices": choices}


class Completion(Responder):
    """Answers /v1/completions."""

    id_prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: ServedModel, body: OpenAIRequest, batch: Batch):
        super().__init__(model, body, batch)
        self._streamed: dict[int, CompletionLogprobs] = {}

    def choice(self, index: int, output: GenerationOutput) -> Event:
        before = self._before(index)
        logprobs = None
        if output.logprobs is not None:
            logprobs = self._logprobs(index, len(before)).add(output.token_ids, output.logprobs)
        if logprobs is not None and output.prompt_logprobs is not None:
            prompt = self._logprobs(index, 0).add(output.prompt_token_ids, output.prompt_logprobs, most=len(before))
            logprobs = join(prompt, logprobs)
        return {"index": index, "text": before + output.text, "logprobs": logprobs, "finish_reason": output.finish_reason}

    def nothing(self, index: int) -> Event:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": None}

    def deltas(self, index: int, update: Update, is_first: bool) -> Iterator[Event]:
        text = (self._before(index) if is_first else "") + update.text
        logprobs = None
        if update.logprobs:
            if index not in self._streamed:
                self._streamed[index] = self._logprobs(index, len(self._before(index)))
            logprobs = self._streamed[index].add(update.token_ids, update.logprobs)
        if text or logprobs is not None or update.output is not None:
            reason = None if update.output is None else update.output.finish_reason
            yield {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _before(self, index: int) -> str:
        """The prompt as a part of the answer."""
        if self._batch.texts is None:
            return ""
        text = self._batch.texts[index // self._batch.n]
        if text is not None:
            return text
        assert self._model.tokenizer is not None
        ids, params = self._batch.prompt_of(index)
        return str(self._model.tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens))

    def _logprobs(self, index: int, offset: int) -> CompletionLogprobs:
        return CompletionLogprobs(self._model, offset, self._batch.prompt_of(index)[1].skip_special_tokens)


class ChatCompletion(Responder):
    """Answers /v1/chat/completions."""

    id_prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, output: GenerationOutput) -> Event:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        logprobs = None if output.logprobs is None else chat_logprobs(self._model, output.logprobs)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": output.finish_reason}

    def nothing(self, index: int) -> Event:
        return self._delta(index, {"content": ""})

    def deltas(self, index: int, update: Update, is_first: bool) -> Iterator[Event]:
        if is_first:
            yield self._delta(index, {"role": "assistant", "content": ""})
        if update.text or update.logprobs:
            logprobs = chat_logprobs(self._model, update.logprobs) if update.logprobs else None
            yield self._delta(index, {"content": update.text}) | {"logprobs": logprobs}
        if update.output is not None:
            yield self._delta(index, {}, update.output.finish_reason)

    def _delta(self, index: int, delta: dict[str, str], finish_reason: str | None = None) -> Event:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def usage(outputs: Sequence[GenerationOutput], firsts: Sequence[GenerationOutput]) -> Event:
    """Token counts over all choices; a prompt counts once, by the first of its completions."""
    prompt = sum(len(output.prompt_token_ids) for output in firsts)
    counts = token_counts(prompt, sum(len(output.token_ids) for output in outputs))
    return counts | {"prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in firsts)}}


def token_counts(prompt: int, completion: int) -> Event:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def without_output(output: GenerationOutput) -> GenerationOutput:
    """For whoever wants the prompt alone."""
    logprobs = None if output.logprobs is None else ()
    return replace(output, text="", token_ids=(), logprobs=logprobs, finish_reason="length", speculation=Speculation())


def speculation_report(outputs: Sequence[GenerationOutput], body: OpenAIRequest) -> Event:
    """vLLM's `metrics` and, if asked for, SGLang's `sglext`; nothing for several choices or without speculation."""
    if len(outputs) != 1 or (metrics := vllm_metrics(outputs[0].speculation)) is None:
        return {}
    report: Event = {"metrics": {"speculative_decoding": metrics}}
    if body.return_spec_tokens_details:
        report["sglext"] = {"spec_tokens_details": sglang_details(outputs[0].speculation)}
    return report
