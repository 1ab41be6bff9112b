"""The answers of OpenAI's API: whole, and in chunks."""

import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from time import time
from typing import Any, ClassVar

from jaxspec.engine.async_engine import Generation
from jaxspec.engine.request import GenerationOutput, Update
from jaxspec.server.batch import Batch, updates
from jaxspec.server.logprobs import CompletionLogprobs, chat_logprobs, join
from jaxspec.server.model import ServedModel
from jaxspec.server.streaming import Event


class Responder(ABC):
    """Makes the answer to one HTTP request; completions and chat completions differ in their choices only."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, model: ServedModel, batch: Batch):
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self._model, self._batch, self._created = model, batch, int(time())

    @abstractmethod
    def choice(self, index: int, output: GenerationOutput) -> Event:
        """A finished choice of a whole answer."""

    @abstractmethod
    def deltas(self, index: int, update: Update, is_first: bool) -> Iterator[Event]:
        """What an update adds to a choice; nothing, if it brought neither text nor logprobs."""

    def whole(self, outputs: Sequence[GenerationOutput]) -> Event:
        """The answer in one piece."""
        choices = [self.choice(index, output) for index, output in enumerate(outputs)]
        return self._event(self.whole_object, choices) | self._statistics(outputs)

    async def chunks(self, generation: Generation, include_usage: bool) -> AsyncIterator[Event]:
        """The answer as it comes; with usage, a last chunk without choices carries it."""
        index_of = {request_id: index for index, request_id in enumerate(generation.request_ids)}
        outputs: dict[int, GenerationOutput] = {}
        begun = set()
        async for update in updates(generation):
            index = index_of[update.request_id]
            if update.output is not None:
                outputs[index] = update.output
            for delta in self.deltas(index, update, index not in begun):
                yield self._event(self.chunk_object, [delta]) | ({"usage": None} if include_usage else {})
            begun.add(index)
        if include_usage:
            yield self._event(self.chunk_object, []) | self._statistics([outputs[index] for index in sorted(outputs)])

    def _statistics(self, outputs: Sequence[GenerationOutput]) -> Event:
        return {"usage": usage(outputs, self._batch.firsts(outputs))} | metrics(outputs, self._model)

    def _event(self, kind: str, choices: list[Event]) -> Event:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model.name, "choices": choices}


class Completion(Responder):
    """Answers /v1/completions."""

    id_prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: ServedModel, batch: Batch):
        super().__init__(model, batch)
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


def usage(outputs: Sequence[GenerationOutput], firsts: Sequence[GenerationOutput]) -> dict[str, Any]:
    """Token counts over all choices; a prompt counts once, by the first of its completions."""
    prompt = sum(len(output.prompt_token_ids) for output in firsts)
    completion = sum(len(output.token_ids) for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in firsts)},
    }


def metrics(outputs: Sequence[GenerationOutput], model: ServedModel) -> Event:
    """vLLM's per-request `metrics.speculative_decoding`, by its names; nothing for several choices or without speculation.

    An adaptive engine does not tell which cycle had which tree, so what depends on the trees is left out then.
    """
    spec = model.spec
    if len(outputs) != 1 or spec.num_steps == 0 or not outputs[0].speculation.verify_count:
        return {}
    speculation = outputs[0].speculation
    numbers: Event = {
        "mean_acceptance_length": round(speculation.accept_length, 4),
        "num_spec_steps": speculation.verify_count,
        "num_accepted_draft_tokens": speculation.accepted_drafts,
    }
    if not model.adaptive:
        drafted = speculation.verify_count * (spec.num_draft_tokens - 1)
        numbers |= {
            "draft_acceptance_rate": round(speculation.accepted_drafts / drafted, 4),
            "acceptance_histogram": acceptance_histogram(outputs[0], spec.num_steps),
            "num_draft_tokens": drafted,
        }
    return {"metrics": {"speculative_decoding": numbers}}


def acceptance_histogram(output: GenerationOutput, num_steps: int) -> list[int]:
    """How many verifications accepted 0, 1, ... num_steps drafts.

    Each emits its accepted drafts and one bonus token, except that a stop may cut the bonus off the last one.
    """
    accepted = [length - 1 for length in output.speculation.accept_lengths]
    accepted[-1] += output.speculation.accepted_drafts - sum(accepted)
    counts = Counter(accepted)
    return [counts[number] for number in range(num_steps + 1)]
