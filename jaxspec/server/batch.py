"""What one HTTP request asks the engine for, and how it gets there."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxspec.engine.async_engine import AsyncEngine, AsyncRequest, Generation
from jaxspec.engine.request import GenerationOutput, Update
from jaxspec.sampling_params import SamplingParams
from jaxspec.server.errors import ApiError, refused

MAX_LOGPROBS = 2**21
"""Log probabilities that one answer may have to hold, alternatives included: some hundred megabytes."""


@dataclass(frozen=True)
class Batch:
    """n completions of every prompt: those of the first prompt come first, so completion i of prompt p is number p * n + i."""

    prompts: Sequence[tuple[list[int], SamplingParams]]
    """Token ids, and the parameters of all n completions."""
    priority: int = 0
    texts: Sequence[str | None] | None = None
    """The prompts as the client wrote them (None: as token ids), if the answer shall begin with them."""

    @property
    def n(self) -> int:
        return self.prompts[0][1].n

    @property
    def logprobs(self) -> int:
        """Log probabilities in the answer, at most."""
        return sum(
            params.n * (params.logprobs + 1) * (params.max_tokens + (0 if params.prompt_logprobs is None else len(ids)))
            for ids, params in self.prompts
            if params.logprobs is not None
        )

    def prompt_of(self, index: int) -> tuple[list[int], SamplingParams]:
        """The prompt of a completion."""
        return self.prompts[index // self.n]

    def firsts(self, outputs: Sequence[GenerationOutput]) -> Sequence[GenerationOutput]:
        """The first completion of each prompt."""
        return outputs[:: self.n]


def sampling_params(client_names: Mapping[str, str], **fields: Any) -> SamplingParams:
    """SamplingParams from the fields that were given (not None). Raises ApiError, in the client's words."""
    try:
        params = SamplingParams(**{name: value for name, value in fields.items() if value is not None})
    except ValueError as error:
        raise refused(error, client_names) from None
    return params


async def start(engine: AsyncEngine, request_id: str, batch: Batch, client_names: Mapping[str, str]) -> Generation:
    """Hands the batch to the engine. Raises ApiError, in the client's words; QueueFull passes."""
    if (entries := batch.logprobs) > MAX_LOGPROBS:
        param = client_names.get("logprobs", "logprobs")
        message = f"{param}: the answer may need {entries} log probabilities; at most {MAX_LOGPROBS} fit: send less at once"
        raise ApiError(400, message, param=param)
    copies = [(ids, copy) for ids, params in batch.prompts for copy in params.copies()]
    requests = [AsyncRequest(f"{request_id}-{index}", *copy, batch.priority) for index, copy in enumerate(copies)]
    try:
        return await engine.start(requests)
    except ValueError as error:
        raise refused(error, client_names) from None


async def updates(generation: Generation) -> AsyncIterator[Update]:
    """What the engine produces. OpenAI has no finish_reason for a request that ran out of time: that is an error here."""
    async for update in generation:
        if update.output is not None and update.output.finish_reason == "timeout":
            raise ApiError(504, "the request was not finished in time")
        yield update


async def collect(generation: Generation) -> list[GenerationOutput]:
    """The finished outputs, in the order of the requests."""
    with generation:
        outputs = {update.request_id: update.output async for update in updates(generation)}  # the last update of each has it
    return [output for request_id in generation.request_ids if (output := outputs[request_id]) is not None]
