"""SGLang's native API: /generate, with text or token ids in and the cumulative text of a stream out."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from jaxspec.engine.async_engine import Generation
from jaxspec.engine.request import GenerationOutput, TokenLogprob, Update
from jaxspec.server.batch import Batch, collect, start, updates
from jaxspec.server.errors import ApiError
from jaxspec.server.generation_answers import GENERATE
from jaxspec.server.logprobs import native_logprobs, native_top
from jaxspec.server.model import ServedModel, is_single
from jaxspec.server.native_protocol import GenerateRequest
from jaxspec.server.running import RunningRequests
from jaxspec.server.sampling_fields import NATIVE_NAMES, sampling_params
from jaxspec.server.speculation import Trace, chosen_tree, sglang_details, wants_trace
from jaxspec.server.streaming import Event, EventStream, unless_disconnected

DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's."""

CLIENT_NAMES = {name: f"sampling_params.{theirs}" for name, theirs in NATIVE_NAMES.items()} | {
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
}
"""Where SGLang's clients put them."""


def native_routes(running: RunningRequests, model: ServedModel) -> APIRouter:
    """The endpoint over one engine and its model."""
    router = APIRouter()

    @router.post("/generate", responses=GENERATE)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        return await unless_disconnected(request, answer(running, model, body, request))

    return router


async def answer(running: RunningRequests, model: ServedModel, body: GenerateRequest, request: Request) -> Response:
    """Checks, tokenizes (off the event loop), generates, answers."""
    started = perf_counter()
    batch = await run_in_threadpool(generate_batch, body, model)
    form = AnswerForm(body, batch, model, batch.ids(request.state.request_id), started)
    client_names = {**CLIENT_NAMES, "prompt": "input_ids" if body.text is None else "text"}
    generation = await start(running, request, batch, client_names)
    if body.stream:
        return await EventStream.open(generation, form.chunks(generation))
    outputs = await collect(generation)
    return JSONResponse(await run_in_threadpool(form.whole, outputs))  # thousands of logprobs take a while


def generate_batch(body: GenerateRequest, model: ServedModel) -> Batch:
    """Token ids and sampling parameters of every prompt. Raises ApiError, naming the field, for what can't be served."""
    if (body.text is None) == (body.input_ids is None):
        raise ApiError(400, "give either text or input_ids", param="text")
    check_logprobs(body, model)
    param = "text" if body.input_ids is None else "input_ids"
    given: Any = body.text if body.input_ids is None else body.input_ids
    fields, budget_param = body.sampling_params, CLIENT_NAMES["max_tokens"]
    model.check_count(given, fields.n, param=param, n_param=CLIENT_NAMES["n"])
    logprobs = (body.top_logprobs_num or 0) if body.return_logprob else None
    prompts = []
    for name, ids in model.prompts(given, param):
        budget = model.budget(len(ids), fields.max_new_tokens, DEFAULT_MAX_NEW_TOKENS, param=name, budget_param=budget_param)
        if body.prompt_start is not None and body.prompt_start >= len(ids):
            message = f"logprob_start_len {body.prompt_start} is not inside {name}, which has {len(ids)} tokens"
            raise ApiError(400, message, param="logprob_start_len")
        values = {ours: getattr(fields, theirs) for ours, theirs in NATIVE_NAMES.items()} | {"max_tokens": budget}
        prompt_logprobs = None if body.prompt_start is None else logprobs
        prompts.append((ids, sampling_params(CLIENT_NAMES, **values, logprobs=logprobs, prompt_logprobs=prompt_logprobs)))
    trace = wants_trace(body.speculative, stream=body.stream, completions=len(prompts) * (fields.n or 1))
    return Batch(prompts, body.priority or 0, tree=chosen_tree(body.speculative, model), trace=trace, rid=body.rid)


def check_logprobs(body: GenerateRequest, model: ServedModel) -> None:
    """Refuses what would be ignored without return_logprob, and text without a tokenizer."""
    for name, neutral in {"logprob_start_len": -1, "top_logprobs_num": 0, "return_text_in_logprobs": False}.items():
        if not body.return_logprob and getattr(body, name) not in (None, neutral):
            raise ApiError(400, f"{name} needs return_logprob to be true", param=name)
    if body.return_text_in_logprobs and model.tokenizer is None:
        raise ApiError(400, "return_text_in_logprobs: this model has no tokenizer", param="return_text_in_logprobs")


@dataclass
class _Growing:
    """What a stream has brought so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, update: Update) -> None:
        self.text += update.text
        self.token_ids += update.token_ids
        self.logprobs += update.logprobs or ()


class AnswerForm:
    """Makes SGLang's answer to one HTTP request."""

    def __init__(self, body: GenerateRequest, batch: Batch, model: ServedModel, ids: Sequence[str], started: float):
        """`ids`: what each completion is called."""
        self._body, self._batch, self._model, self._ids, self._started = body, batch, model, ids, started
        self._text_of: Callable[[int], str] | None = model.token_text if body.return_text_in_logprobs else None
        self._is_single = is_single(body.text if body.input_ids is None else body.input_ids) and batch.n == 1

    def whole(self, outputs: list[GenerationOutput]) -> Event | list[Event]:
        """A single prompt gets one answer; lists of prompts, and n > 1, get a list."""
        answers = [self.result(index, output) for index, output in enumerate(outputs)]
        return answers[0] if self._is_single else answers

    async def chunks(self, generation: Generation) -> AsyncIterator[Event]:
        """Each event carries all the text and tokens of its completion so far, which is how SGLang streams."""
        index_of = {request_id: index for index, request_id in enumerate(generation.request_ids)}
        growing = [_Growing() for _ in index_of]
        trace = Trace(self._model, self._batch.prompts[0][1]) if self._batch.trace else None
        async for update in updates(generation):
            index = index_of[update.request_id]
            so_far = growing[index]
            so_far.add(update)
            if update.output is not None:
                event = self.result(index, update.output)
            else:
                counts = {"prompt_tokens": len(self._batch.prompt_of(index)[0]), "completion_tokens": len(so_far.token_ids)}
                meta = {"id": self._ids[index], "finish_reason": None} | counts
                meta |= self._output_logprobs(so_far.token_ids, so_far.logprobs)
                event = {"text": so_far.text, "output_ids": so_far.token_ids, "meta_info": meta}
            if trace is not None:
                event["speculative_trace"] = trace.add(update)
            yield event if self._is_single else {"index": index} | event

    def result(self, index: int, output: GenerationOutput) -> Event:
        """A finished completion; spec_accept_length counts the tokens per verification, bonus included."""
        meta = {
            "id": self._ids[index],
            "finish_reason": finish_reason(output),
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(output.token_ids),
            "cached_tokens": output.cached_tokens,
            "e2e_latency": round(perf_counter() - self._started, 6),
            **sglang_details(output.speculation),
        }
        logprobs = self._input_logprobs(output) | self._output_logprobs(output.token_ids, output.logprobs or ())
        return {"text": output.text, "output_ids": list(output.token_ids), "meta_info": meta | logprobs}

    def _output_logprobs(self, token_ids: Sequence[int], entries: Sequence[TokenLogprob]) -> Event:
        return self._logprobs("output", token_ids, entries)

    def _input_logprobs(self, output: GenerationOutput) -> Event:
        """From logprob_start_len on. SGLang gives the first of these tokens no logprob, wherever it is."""
        start = self._body.prompt_start
        if start is None or output.prompt_logprobs is None:
            return self._logprobs("input", (), ())
        return self._logprobs("input", output.prompt_token_ids[start:], (None, *output.prompt_logprobs[start + 1 :]))

    def _logprobs(self, side: str, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None]) -> Event:
        if not self._body.return_logprob:
            return {}
        shown: Event = {f"{side}_token_logprobs": native_logprobs(token_ids, entries, self._text_of)}
        if self._body.top_logprobs_num:
            shown[f"{side}_top_logprobs"] = native_top(entries, self._text_of)
        return shown


def finish_reason(output: GenerationOutput) -> dict[str, str | int | None]:
    """Why it ended, with what matched or the length that was reached."""
    if output.finish_reason == "stop":
        return {"type": "stop", "matched": output.matched_stop}
    if output.finish_reason == "length":
        return {"type": "length", "length": len(output.token_ids)}
    return {"type": output.finish_reason}
