"""The answers of OpenAI's API: whole, and in chunks."""

import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from time import time
from typing import ClassVar

from jaxspec.config import SpecConfig
from jaxspec.engine.async_engine import Generation
from jaxspec.engine.request import GenerationOutput, Update
from jaxspec.server.model import ServedModel
from jaxspec.server.streaming import Event


class Responder(ABC):
    """Makes the answer to one HTTP request; completions and chat completions differ in their choices only."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, model: ServedModel):
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self._model, self._created = model, int(time())

    @abstractmethod
    def choice(self, index: int, output: GenerationOutput) -> Event:
        """A finished choice of a whole answer."""

    @abstractmethod
    def deltas(self, index: int, update: Update, is_first: bool) -> Iterator[Event]:
        """What an update adds to a choice; nothing, if it brought no text."""

    def whole(self, outputs: Sequence[GenerationOutput]) -> Event:
        """The answer in one piece."""
        choices = [self.choice(index, output) for index, output in enumerate(outputs)]
        return self._event(self.whole_object, choices) | {"usage": usage(outputs)} | metrics(outputs, self._model.spec)

    async def chunks(self, generation: Generation, include_usage: bool) -> AsyncIterator[Event]:
        """The answer as it comes; with usage, a last chunk without choices carries it."""
        index_of = {request_id: index for index, request_id in enumerate(generation.request_ids)}
        outputs: dict[int, GenerationOutput] = {}
        begun = set()
        async for update in generation:
            index = index_of[update.request_id]
            if update.output is not None:
                outputs[index] = update.output
            for delta in self.deltas(index, update, index not in begun):
                yield self._event(self.chunk_object, [delta]) | ({"usage": None} if include_usage else {})
            begun.add(index)
        if include_usage:
            ordered = [outputs[index] for index in sorted(outputs)]
            yield self._event(self.chunk_object, []) | {"usage": usage(ordered)} | metrics(ordered, self._model.spec)

    def _event(self, kind: str, choices: list[Event]) -> Event:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model.name, "choices": choices}


class Completion(Responder):
    """Answers /v1/completions."""

    id_prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, output: GenerationOutput) -> Event:
        return {"index": index, "text": output.text, "logprobs": None, "finish_reason": output.finish_reason}

    def deltas(self, index: int, update: Update, is_first: bool) -> Iterator[Event]:
        if update.text or update.output is not None:
            reason = None if update.output is None else update.output.finish_reason
            yield {"index": index, "text": update.text, "logprobs": None, "finish_reason": reason}


class ChatCompletion(Responder):
    """Answers /v1/chat/completions."""

    id_prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, output: GenerationOutput) -> Event:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": output.finish_reason}

    def deltas(self, index: int, update: Update, is_first: bool) -> Iterator[Event]:
        if is_first:
            yield self._delta(index, {"role": "assistant", "content": ""})
        if update.text:
            yield self._delta(index, {"content": update.text})
        if update.output is not None:
            yield self._delta(index, {}, update.output.finish_reason)

    def _delta(self, index: int, delta: dict[str, str], finish_reason: str | None = None) -> Event:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def usage(outputs: Sequence[GenerationOutput]) -> dict[str, int]:
    """Token counts over all choices."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(output.token_ids) for output in outputs)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def metrics(outputs: Sequence[GenerationOutput], spec: SpecConfig) -> Event:
    """vLLM's per-request `metrics.speculative_decoding`, by its names; nothing for several choices or without speculation."""
    if len(outputs) != 1 or spec.num_steps == 0 or not outputs[0].speculation.verify_count:
        return {}
    speculation = outputs[0].speculation
    drafted = speculation.verify_count * (spec.num_draft_tokens - 1)
    return {
        "metrics": {
            "speculative_decoding": {
                "mean_acceptance_length": round(speculation.accept_length, 4),
                "draft_acceptance_rate": round(speculation.accepted_drafts / drafted, 4),
                "acceptance_histogram": acceptance_histogram(outputs[0], spec.num_steps),
                "num_spec_steps": speculation.verify_count,
                "num_accepted_draft_tokens": speculation.accepted_drafts,
                "num_draft_tokens": drafted,
            }
        }
    }


def acceptance_histogram(output: GenerationOutput, num_steps: int) -> list[int]:
    """How many verifications accepted 0, 1, ... num_steps drafts.

    Each emits its accepted drafts and one bonus token, except that a stop may cut the bonus off the last one.
    """
    accepted = [length - 1 for length in output.speculation.accept_lengths]
    accepted[-1] += output.speculation.accepted_drafts - sum(accepted)
    counts = Counter(accepted)
    return [counts[number] for number in range(num_steps + 1)]
