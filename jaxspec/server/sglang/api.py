"""SGLang's API: /generate, with text or token ids in. Its streams repeat all text so far in every event."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic import FailFast, Field, SkipValidation, Tag

from jaxspec.engine.request import GenerationOutput, TokenLogprob, Update
from jaxspec.server.bodies import JsonBody, documented
from jaxspec.server.errors import ApiError, wrong
from jaxspec.server.fields import (
    EACH,
    MAX_INT,
    ONE,
    ListsOfTokenIds,
    LogprobCount,
    NameOrNames,
    StringOrStrings,
    TokenIds,
    described_as,
    one_or_each,
)
from jaxspec.server.logprobs import SglangEntry, sglang_logprobs, sglang_top
from jaxspec.server.model import MAX_COMPLETIONS, ServedModel, is_single
from jaxspec.server.neutral_fields import GENERATE, GENERATE_SAMPLING, neutral
from jaxspec.server.running import RequestBatch, RunningRequests
from jaxspec.server.sampling_fields import SGLANG_NAMES, SglangSamplingFields, sampling_params
from jaxspec.server.sending import ResponseModel, failures, success_or_stream
from jaxspec.server.speculation import (
    SglangSpeculation,
    SharedFields,
    SpeculativeTrace,
    requests_of,
    sglang_speculation,
    speculative_trace,
)
from jaxspec.server.streaming import ResponseBuilder, respond

DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's."""
CLIENT_NAMES = {name: f"sampling_params.{theirs}" for name, theirs in SGLANG_NAMES.items()} | {
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
}
"""Our names of fields, and where SGLang's clients put them."""

InputIds = Annotated[TokenIds | ListsOfTokenIds | None, described_as("a list of token ids or a list of lists of token ids")]


@neutral(GENERATE_SAMPLING)
class SglangSampling(SglangSamplingFields):
    """`sampling_params` of /generate."""

    max_new_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    """The most tokens to generate; 0, without stream: the prompt is cached and, with return_logprob, scored."""


type SamplingOfEach = Annotated[list[SglangSampling], Field(min_length=1, max_length=MAX_COMPLETIONS), FailFast()]
type OneOrEach = Annotated[Annotated[SglangSampling, Tag(ONE)] | Annotated[SamplingOfEach, Tag(EACH)], one_or_each]


@neutral(GENERATE)
class GenerateRequest(SharedFields):
    """POST /generate, with either text or input_ids. A list of prompts gets a list of responses."""

    text: StringOrStrings = None
    input_ids: InputIds = None
    model: str | None = None
    """Some routers add it."""
    sampling_params: OneOrEach | None = None
    """One for all prompts, or a list with one for each; n is the same in all."""
    return_logprob: bool | None = None
    top_logprobs_num: LogprobCount | None = None
    """With return_logprob: also of this many of the most likely tokens."""
    logprob_start_len: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    """With return_logprob: the first token of the prompt to report; -1: only the output is reported. In a stream, the last event
    has the prompt's."""
    return_text_in_logprobs: bool | None = None
    rid: NameOrNames = None
    """The request's name for /abort_request and meta_info.id; a list names each prompt."""

    @property
    def prompt_start(self) -> int | None:
        """The first token of the prompt to report log probabilities of; None: none is reported."""
        start = self.logprob_start_len
        return None if not self.return_logprob or start is None or start < 0 else start


class FinishReason(ResponseModel):
    type: str
    """stop, length or abort."""
    matched: str | int | None = None
    """The stop string or token."""
    length: int | None = None
    """The number of tokens, if that ended it."""


class PartialMetaInfo(ResponseModel):
    """About a completion that is still running."""

    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    output_token_logprobs: SkipValidation[list[SglangEntry]] | None = None
    """[log probability, token id, text] of each token."""
    output_top_logprobs: SkipValidation[list[list[SglangEntry] | None]] | None = None


class MetaInfo(PartialMetaInfo, SglangSpeculation):
    """About a finished completion."""

    cached_tokens: int
    e2e_latency: float
    """Seconds."""
    input_token_logprobs: SkipValidation[list[SglangEntry]] | None = None
    input_top_logprobs: SkipValidation[list[list[SglangEntry] | None]] | None = None


class GenerateEvent(ResponseModel):
    """An event of a stream: all text and tokens of a completion so far."""

    text: str
    output_ids: list[int]
    meta_info: PartialMetaInfo
    index: int | None = None
    """In a stream of several completions: the number of this one."""
    speculative_trace: SpeculativeTrace | None = None
    """With speculative.trace."""


class GenerateResponse(GenerateEvent):
    """A finished completion."""

    meta_info: MetaInfo


MAX_REPEATED = 50_000_000
"""Log probabilities in all events of a stream. An event of 21,000 takes the event loop 10 ms (AMD EPYC, 29 November 2026)."""
ANSWERS = success_or_stream(GenerateResponse | list[GenerateResponse], "each with the whole text so far") | failures(404, 415, 504)


def sglang_routes(running: RunningRequests, model: ServedModel) -> APIRouter:
    router = APIRouter()

    @router.put("/generate", responses=ANSWERS, openapi_extra=documented(GenerateRequest))
    @router.post("/generate", responses=ANSWERS, openapi_extra=documented(GenerateRequest))
    async def generate(body: Annotated[GenerateRequest, Depends(JsonBody(GenerateRequest))], request: Request) -> Response:
        build = partial(GenerateBuilder, model, body, request.state.request_id, perf_counter())
        return await respond(running, request, partial(generate_batch, body, model), build, stream=body.stream)

    return router


def generate_batch(body: GenerateRequest, model: ServedModel) -> RequestBatch:
    """Token ids and sampling parameters of every prompt. Raises ApiError, naming the field at fault."""
    if (body.text is None) == (body.input_ids is None):
        raise ApiError(400, "give either text or input_ids", param="text")
    model.check_name(body.model)
    check_logprobs(body, model)
    param = "text" if body.input_ids is None else "input_ids"
    given: Any = body.text if body.input_ids is None else body.input_ids
    samplings = sampling_of_each(body, given)
    first, names = samplings[0]
    model.check_count(given, first.n, param=param, n_param=names["n"])
    logprobs = (body.top_logprobs_num or 0) if body.return_logprob else None
    prompt_only = first.max_new_tokens == 0
    if prompt_only and body.stream:
        raise wrong(names["max_tokens"], "must be at least 1, or 0 without stream")
    prompts, own_names, repeated = [], [], 0
    for (name, ids), (fields, names) in zip(model.prompts(given, param), samplings, strict=True):
        if prompt_only and fields.min_new_tokens:
            raise wrong(names["min_tokens"], f"({fields.min_new_tokens}) must not be more than {names['max_tokens']} (0)")
        asked, default = (None, 1) if prompt_only else (fields.max_new_tokens, DEFAULT_MAX_NEW_TOKENS)
        budget = model.budget(len(ids), asked, default, param=name, budget_param=names["max_tokens"])
        if body.prompt_start is not None and body.prompt_start >= len(ids):
            raise wrong("logprob_start_len", f"{body.prompt_start} is not inside {name}, which has {len(ids)} tokens")
        values = {ours: getattr(fields, theirs) for ours, theirs in SGLANG_NAMES.items()} | {"max_tokens": budget}
        own_names.append({**names, "prompt": name})
        prompt_logprobs = None if body.prompt_start is None else logprobs
        prompts.append((tuple(ids), sampling_params(names, **values, logprobs=logprobs, prompt_logprobs=prompt_logprobs)))
        repeated += 0 if logprobs is None else (logprobs + 1) * (first.n or 1) * budget**2 // 2
    if body.stream and repeated > MAX_REPEATED:
        counts = f"the events of the stream would repeat {repeated} log probabilities, and at most {MAX_REPEATED} may be"
        raise wrong("return_logprob:", f"{counts}: leave out stream, or ask for fewer tokens or a smaller top_logprobs_num")
    requests = requests_of(body, model, prompts, first.n)
    return RequestBatch(requests, client_names=CLIENT_NAMES, own_names=own_names, prompt_only=prompt_only, rid=body.rid)


def sampling_of_each(body: GenerateRequest, given: Any) -> list[tuple[SglangSampling, dict[str, str]]]:
    """The sampling parameters of each prompt, and where the client put them. Raises ApiError if there is not one for each."""
    count = 1 if is_single(given) else len(given)
    if not isinstance(body.sampling_params, list):
        return [(body.sampling_params or SglangSampling(), CLIENT_NAMES)] * count
    if is_single(given) or len(body.sampling_params) != count:
        raise wrong("sampling_params", f"must be one object, or a list with one for each of {count} prompts in a list")
    first, *others = each = list(zip(body.sampling_params, map(names_at, range(count)), strict=True))
    for fields, names in others:
        if (fields.n or 1) != (first[0].n or 1):
            raise wrong(names["n"], f"must be the same as that of the first prompt, {first[0].n or 1}")
        if (fields.max_new_tokens == 0) != (first[0].max_new_tokens == 0):
            raise wrong(names["max_tokens"], "must be 0 for all prompts or for none")
    return each


def names_at(index: int) -> dict[str, str]:
    """CLIENT_NAMES for one of a list of sampling parameters.

    In:  1
    Out: {"temperature": "sampling_params.1.temperature", ...}
    """
    return {ours: theirs.replace("sampling_params.", f"sampling_params.{index}.") for ours, theirs in CLIENT_NAMES.items()}


def check_logprobs(body: GenerateRequest, model: ServedModel) -> None:
    """Refuses fields that have no effect without return_logprob, and text without a tokenizer."""
    for name, nothing in {"logprob_start_len": -1, "top_logprobs_num": 0, "return_text_in_logprobs": False}.items():
        if not body.return_logprob and getattr(body, name) not in (None, nothing):
            raise wrong(name, "needs return_logprob to be true")
    if body.return_text_in_logprobs and model.tokenizer is None:
        raise wrong("return_text_in_logprobs", "must not be true: this model has no tokenizer")


@dataclass
class _Progress:
    """Everything that a stream has sent of one completion."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, update: Update) -> None:
        self.text += update.text
        self.token_ids += update.token_ids
        self.logprobs += update.logprobs or ()


class GenerateBuilder(ResponseBuilder):
    def __init__(self, model: ServedModel, body: GenerateRequest, request_id: str, started: float, batch: RequestBatch):
        """`started`: perf_counter() when the request came."""
        self._model, self._body, self._batch, self._started = model, body, batch, started
        self._ids = batch.ids(request_id)
        self._text_of: Callable[[int], str] | None = model.token_text if body.return_text_in_logprobs else None
        self._is_single = is_single(body.text if body.input_ids is None else body.input_ids) and batch.n == 1
        self._progress = [_Progress() for _ in self._ids]
        self._has_trace = batch.prompts[0].wants_trees

    def whole(self, outputs: Sequence[GenerationOutput]) -> GenerateResponse | list[GenerateResponse]:
        """A single prompt gets one response; lists of prompts, and n > 1, get a list."""
        responses = [self._finished(index, output) for index, output in enumerate(outputs)]
        return responses[0] if self._is_single else responses

    def events(self, index: int, update: Update) -> list[GenerateEvent]:
        progress = self._progress[index]
        progress.add(update)
        if update.output is not None:
            event: GenerateEvent = self._finished(index, update.output)
        else:
            meta_info = PartialMetaInfo(
                id=self._ids[index],
                finish_reason=None,
                prompt_tokens=len(self._batch.prompt_of(index).prompt),
                completion_tokens=len(progress.token_ids),
                **self._logprobs("output", progress.token_ids, progress.logprobs),
            )
            event = GenerateEvent(text=progress.text, output_ids=progress.token_ids, meta_info=meta_info)
        if self._has_trace:
            event.speculative_trace = speculative_trace(update, self._model)
        if not self._is_single:
            event.index = index
        return [event]

    def _finished(self, index: int, output: GenerationOutput) -> GenerateResponse:
        meta_info = MetaInfo(
            id=self._ids[index],
            finish_reason=finish_reason(output),
            prompt_tokens=len(output.prompt_token_ids),
            completion_tokens=len(output.token_ids),
            cached_tokens=output.cached_tokens,
            e2e_latency=round(perf_counter() - self._started, 6),
            **sglang_speculation(output.speculation).model_dump(exclude_unset=True),
            **self._input_logprobs(output),
            **self._logprobs("output", output.token_ids, output.logprobs or ()),
        )
        return GenerateResponse(text=output.text, output_ids=list(output.token_ids), meta_info=meta_info)

    def _input_logprobs(self, output: GenerationOutput) -> dict[str, Any]:
        """From logprob_start_len on. As in SGLang, the first of these tokens has no log probability, wherever it is."""
        start = self._body.prompt_start
        if start is None or output.prompt_logprobs is None:
            return self._logprobs("input", (), ())
        return self._logprobs("input", output.prompt_token_ids[start:], (None, *output.prompt_logprobs[start + 1 :]))

    def _logprobs(self, side: str, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """The fields of the "input" or "output" side that the request asked for."""
        if not self._body.return_logprob:
            return {}
        fields: dict[str, Any] = {f"{side}_token_logprobs": sglang_logprobs(token_ids, entries, self._text_of)}
        if self._body.top_logprobs_num:
            fields[f"{side}_top_logprobs"] = sglang_top(entries, self._text_of)
        return fields


def finish_reason(output: GenerationOutput) -> FinishReason:
    """Why it ended, with the stop string or token that matched, or the number of tokens."""
    if output.finish_reason == "stop":
        return FinishReason(type="stop", matched=output.matched_stop)
    if output.finish_reason == "length":
        return FinishReason(type="length", length=len(output.token_ids))
    return FinishReason(type=output.finish_reason)
