"""Running requests: the completions of an HTTP request, how they reach the engine, and the names by which they can be aborted."""

import asyncio
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from fastapi import Request

from jaxspec.engine.driver import EngineThread
from jaxspec.engine.generation import Generation
from jaxspec.engine.request import GenerationOutput, GenerationRequest, RefusedRequest
from jaxspec.engine.speculation import Speculation
from jaxspec.server.errors import ApiError, refused, wrong
from jaxspec.text.answer_parser import AnswerFormat

MAX_LOGPROBS = 2**21
"""Log probabilities in one response, alternatives included: a few hundred megabytes."""


@dataclass(frozen=True)
class RequestBatch:
    """n completions of every prompt. Completion i of prompt p is number p * n + i."""

    prompts: Sequence[GenerationRequest]
    """One for each prompt, with the parameters of all its n completions."""
    echo: Sequence[str | None] | None = None
    """The prompts as the client wrote them (None: as token ids), if the response shall begin with them."""
    client_names: Mapping[str, str] = field(default_factory=dict)
    """Our names of fields, and the client's where they differ: for errors."""
    own_names: Sequence[Mapping[str, str]] = ()
    """The same for each of several prompts: names that differ from one prompt to another."""
    prompt_only: bool = False
    """The response holds the prompt alone. The engine still generates one token, which is left out."""
    rid: str | list[str] | None = None
    """The client's name for the batch, or one for each prompt."""
    answer: AnswerFormat = field(default_factory=AnswerFormat)
    """Of a chat: the parts that its answers may have."""

    @property
    def n(self) -> int:
        return self.prompts[0].params.n

    @property
    def max_logprobs(self) -> int:
        """The most log probabilities that the response can hold."""
        return sum(
            params.n * (params.logprobs + 1) * (params.max_tokens + (0 if params.prompt_logprobs is None else len(each.prompt)))
            for each in self.prompts
            if (params := each.params).logprobs is not None
        )

    def prompt_of(self, index: int) -> GenerationRequest:
        return self.prompts[index // self.n]

    def names(self, request_id: str) -> list[str]:
        """The name by which each completion can be aborted: its rid, else the HTTP request's `request_id`."""
        name = request_id if self.rid is None else self.rid
        each = [name] * len(self.prompts) if isinstance(name, str) else name
        return [name for name in each for _ in range(self.n)]

    def ids(self, request_id: str) -> list[str]:
        """The id of each completion in the response: its name, with a number if several share it.

        In:  rid = ["a", "b"], n = 2
        Out: ["a-0", "a-1", "b-0", "b-1"]
        """
        names = self.names(request_id)
        share = names.count(names[0])  # all names are equally frequent
        return names if share == 1 else [f"{name}-{number % share}" for number, name in enumerate(names)]


def without_output(output: GenerationOutput) -> GenerationOutput:
    """The output with nothing but what it tells about the prompt."""
    nothing, reason = None if output.logprobs is None else (), "abort" if output.finish_reason == "abort" else "length"
    return replace(
        output, text="", token_ids=(), logprobs=nothing, text_offsets=nothing, finish_reason=reason, speculation=Speculation()
    )


class RunningRequests:
    """Maps clients' names to the engine's request ids, and knows whether new requests may start.

    The engine's ids are random, so clients can't use each other's by accident. Used in the event loop's thread only.
    """

    def __init__(self, engine: EngineThread, request_timeout: float | None = None):
        """`request_timeout`: the most seconds that a request may run."""
        self.engine, self.request_timeout = engine, request_timeout
        self._engine_ids: dict[str, set[str]] = {}
        self._is_draining = False

    def drain(self) -> None:
        """Refuses new requests from now on; running ones continue."""
        self._is_draining = True

    @property
    def is_busy(self) -> bool:
        """Whether any response is unfinished, even if its request is not in the engine yet because its grammar is compiling; or the
        engine had requests after its last step."""
        stats = self.engine.stats
        return self.engine.is_healthy and (bool(self._engine_ids) or stats.running + stats.waiting > 0)

    def check_available(self) -> None:
        """Raises ApiError 503 while the server shuts down or the engine does not work."""
        self.check_open()
        if not self.engine.is_healthy:
            raise ApiError(503, "the engine is not running; the server's log says why")

    def check_open(self) -> None:
        """Raises ApiError 503 while the server shuts down. A failing engine may be tried: one success heals it."""
        if self._is_draining:
            raise ApiError(503, "the server is shutting down")

    @contextmanager
    def named(self, names: Sequence[str], engine_ids: Sequence[str], param: str | None) -> Iterator[None]:
        """Engine requests have these names, one each, as long as the context lasts.

        Several may share a name, unless it is a client's: then `param` is its field, and a name in use raises ApiError.
        """
        if param is not None and (used := [name for name in names if name in self._engine_ids]):
            raise wrong(param, f"{used[0]!r} is in use by a running request: choose another")
        for name, engine_id in zip(names, engine_ids, strict=True):
            self._engine_ids.setdefault(name, set()).add(engine_id)
        try:
            yield
        finally:
            for name, engine_id in zip(names, engine_ids, strict=True):
                self._engine_ids[name].remove(engine_id)
                if not self._engine_ids[name]:
                    del self._engine_ids[name]

    async def abort(self, names: Sequence[str]) -> int:
        """Ends all requests with these names: their clients get the text so far, with finish_reason "abort". Returns the number
        of completions. An unknown name is not an error: its request may just have ended."""
        ids = [engine_id for name in names for engine_id in self._engine_ids.get(name, ())]
        return await asyncio.wrap_future(self.engine.abort(ids))

    async def abort_all(self) -> int:
        return await asyncio.wrap_future(self.engine.abort())


async def start(running: RunningRequests, request: Request, batch: RequestBatch) -> Generation:
    """Hands the batch to the engine. It can be aborted by its names until the HTTP response is complete. A client's rid must be
    free; several requests may share an x-request-id, as proxies repeat it when they retry.

    Raises ApiError, in the client's words, or QueueFull.
    """
    running.check_open()
    client_names = batch.client_names
    if (count := batch.max_logprobs) > MAX_LOGPROBS:
        param, budget = (client_names.get(name, name) for name in ("logprobs", "max_tokens"))
        said = f"the response may need {count} log probabilities; at most {MAX_LOGPROBS} fit"
        raise wrong(f"{param}:", f"{said}: lower it or {budget}, or split the request")
    rid, names = client_names.get("rid", "rid"), batch.names(request.state.request_id)
    if isinstance(batch.rid, list) and not len(set(batch.rid)) == len(batch.rid) == len(batch.prompts):
        raise wrong(rid, f"must be one name, or a different one for each of the {len(batch.prompts)} prompts")
    timeout = running.request_timeout
    requests = [replace(each, params=copy, timeout=timeout) for each in batch.prompts for copy in each.params.copies()]
    unique = uuid.uuid4().hex
    engine_ids = [f"{unique}-{index}" for index in range(len(requests))]
    request.state.on_end.enter_context(running.named(names, engine_ids, None if batch.rid is None else rid))
    try:
        return await Generation.start(running.engine, requests, engine_ids)
    except RefusedRequest as error:
        own = batch.own_names[error.place // batch.n] if batch.own_names else {}
        raise refused(error, {**client_names, **own}) from None


async def collect(generation: Generation) -> list[GenerationOutput]:
    """The finished outputs, in the order of the requests."""
    outputs: dict[str, GenerationOutput] = {}
    with generation:
        async for update in generation:
            if update.output is not None:
                check_in_time(update.output)
                outputs[update.request_id] = update.output
    return [outputs[request_id] for request_id in generation.request_ids]


def check_in_time(output: GenerationOutput) -> None:
    """Raises ApiError 504 for a request that reached its deadline: OpenAI's API has no finish_reason for that."""
    if output.finish_reason == "timeout":
        raise ApiError(504, "the request was not finished in time: ask for fewer tokens, or try again later")
