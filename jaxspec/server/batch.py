"""What one HTTP request asks the engine for, and how it gets there."""

import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from fastapi import Request

from jaxspec.config import SpecConfig
from jaxspec.engine.async_engine import AsyncRequest, Generation
from jaxspec.engine.request import GenerationOutput, Update
from jaxspec.sampling_params import SamplingParams
from jaxspec.server.errors import ApiError, refused
from jaxspec.server.running import RunningRequests

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
    prompt_only: bool = False
    """Nothing but the prompt is wanted. The one token that is generated nevertheless is left out of the answer."""
    tree: SpecConfig | None = None
    """Of all completions; None: whatever the engine chooses."""
    trace: bool = False
    """The stream says where its tokens come from."""
    rid: str | list[str] | None = None
    """The client's name for the whole, or one for each prompt."""

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

    def names(self, request_id: str) -> list[str]:
        """What each completion can be aborted by. `request_id`, which every HTTP request has, is for those without a `rid`."""
        name = request_id if self.rid is None else self.rid
        each = [name] * len(self.prompts) if isinstance(name, str) else name
        return [name for name in each for _ in range(self.n)]

    def ids(self, request_id: str) -> list[str]:
        """What the answer calls each completion: its name, with a number if several have it.

        In:  rid = ["a", "b"], n = 2
        Out: ["a-0", "a-1", "b-0", "b-1"]
        """
        names = self.names(request_id)
        share = names.count(names[0])  # of a list of names each has as many
        return names if share == 1 else [f"{name}-{number % share}" for number, name in enumerate(names)]


async def start(running: RunningRequests, request: Request, batch: Batch, client_names: Mapping[str, str]) -> Generation:
    """Hands the batch to the engine. Until the answer to the HTTP request is out, it can be aborted by its names.

    Raises ApiError, in the client's words; QueueFull passes.
    """
    running.check_open()
    if (entries := batch.logprobs) > MAX_LOGPROBS:
        param = client_names.get("logprobs", "logprobs")
        message = f"{param}: the answer may need {entries} log probabilities; at most {MAX_LOGPROBS} fit: send less at once"
        raise ApiError(400, message, param=param)
    copies = [(ids, copy) for ids, params in batch.prompts for copy in params.copies()]
    unique = uuid.uuid4().hex
    requests = [
        AsyncRequest(f"{unique}-{index}", *copy, batch.priority, running.request_timeout, batch.tree, batch.trace)
        for index, copy in enumerate(copies)
    ]
    _name(running, request, batch, [each.id for each in requests], client_names.get("rid", "rid"))
    try:
        return await running.engine.start(requests)
    except ValueError as error:
        raise refused(error, client_names) from None


def _name(running: RunningRequests, request: Request, batch: Batch, engine_ids: Sequence[str], param: str) -> None:
    """Makes the batch known by its names. A client's rid must be free; an x-request-id may stand for several requests at once, as
    proxies repeat it when they try again."""
    if isinstance(batch.rid, list) and not len(set(batch.rid)) == len(batch.rid) == len(batch.prompts):
        message = f"{param} must be one name, or a different one for each of the {len(batch.prompts)} prompts"
        raise ApiError(400, message, param=param)
    engine_ids_of: dict[str, list[str]] = {}
    for name, engine_id in zip(batch.names(request.state.request_id), engine_ids, strict=True):
        engine_ids_of.setdefault(name, []).append(engine_id)
    if batch.rid is not None:
        for name in engine_ids_of:
            running.check_free(name, param)
    request.state.on_end.enter_context(running.named(engine_ids_of))


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
