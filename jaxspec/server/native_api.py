"""SGLang's native API: /generate, with text or token ids in and the cumulative text of a stream out."""

import uuid
from collections.abc import AsyncIterator
from time import perf_counter
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from jaxspec.engine.async_engine import AsyncEngine, Generation
from jaxspec.engine.request import GenerationOutput
from jaxspec.server.errors import ApiError
from jaxspec.server.fields import ListsOfTokenIds, Strict, StringOrStrings, TokenIds, described_as, only
from jaxspec.server.model import ServedModel, is_single, sampling_params
from jaxspec.server.streaming import Event, EventStream, Prompts, collect, start, unless_disconnected

DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's."""

CLIENT_NAMES = {
    "max_tokens": "sampling_params.max_new_tokens",
    "seed": "sampling_params.sampling_seed",
    "temperature": "sampling_params.temperature",
    "stop": "sampling_params.stop",
    "stop_token_ids": "sampling_params.stop_token_ids",
}
"""Our names of sampling parameters, and where SGLang's clients put them."""

InputIds = Annotated[TokenIds | ListsOfTokenIds | None, described_as("a list of token ids or a list of lists of token ids")]


class NativeSampling(Strict):
    """`sampling_params` of /generate."""

    max_new_tokens: Annotated[int, Field(ge=1)] | None = None
    """None: 128, or what is left of the context."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    """None: 1.0."""
    sampling_seed: int | None = None
    stop: StringOrStrings = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None

    # Not supported yet.
    n: Annotated[Any, only(1)] = None
    min_new_tokens: Annotated[Any, only(0)] = None
    top_p: Annotated[Any, only(1)] = None
    top_k: Annotated[Any, only(-1)] = None
    min_p: Annotated[Any, only(0)] = None
    frequency_penalty: Annotated[Any, only(0)] = None
    presence_penalty: Annotated[Any, only(0)] = None
    repetition_penalty: Annotated[Any, only(1)] = None
    logit_bias: Annotated[Any, only({})] = None
    stop_regex: Annotated[Any, only([])] = None
    json_schema: Annotated[Any, only()] = None
    regex: Annotated[Any, only()] = None
    ebnf: Annotated[Any, only()] = None
    structural_tag: Annotated[Any, only()] = None
    spaces_between_special_tokens: Annotated[Any, only(True)] = None
    no_stop_trim: Annotated[Any, only(False)] = None


class GenerateRequest(Strict):
    """POST /generate. Either text or input_ids; lists of them get a list of answers."""

    text: StringOrStrings = None
    input_ids: InputIds = None
    sampling_params: NativeSampling = NativeSampling()
    stream: bool | None = None

    # Not supported yet.
    rid: Annotated[Any, only()] = None
    return_logprob: Annotated[Any, only(False)] = None
    logprob_start_len: Annotated[Any, only(-1)] = None
    top_logprobs_num: Annotated[Any, only(0)] = None
    token_ids_logprob: Annotated[Any, only()] = None
    return_text_in_logprobs: Annotated[Any, only(False)] = None
    return_hidden_states: Annotated[Any, only(False)] = None
    image_data: Annotated[Any, only()] = None
    audio_data: Annotated[Any, only()] = None
    video_data: Annotated[Any, only()] = None
    lora_path: Annotated[Any, only()] = None
    session_params: Annotated[Any, only()] = None
    priority: Annotated[Any, only(0)] = None


def native_routes(engine: AsyncEngine, model: ServedModel) -> APIRouter:
    """The endpoint over one engine and its model."""
    router = APIRouter()

    @router.post("/generate")
    async def generate(body: GenerateRequest, request: Request) -> Response:
        return await unless_disconnected(request, answer(engine, model, body))

    return router


async def answer(engine: AsyncEngine, model: ServedModel, body: GenerateRequest) -> Response:
    """Checks, tokenizes (off the event loop), generates, answers."""
    started = perf_counter()
    prompts, single = await run_in_threadpool(generate_prompts, body, model)
    client_names = {**CLIENT_NAMES, "prompt": "input_ids" if body.text is None else "text"}
    generation = await start(engine, uuid.uuid4().hex, prompts, client_names)
    if body.stream:
        return await EventStream.open(generation, chunks(generation, prompts, single, started))
    outputs = await collect(generation)
    answers = [result(output, started) for output in outputs]
    return JSONResponse(answers[0] if single else answers)


def generate_prompts(body: GenerateRequest, model: ServedModel) -> tuple[Prompts, bool]:
    """Token ids and sampling parameters of every prompt, and whether it is a single one. Raises ApiError, naming the field."""
    if (body.text is None) == (body.input_ids is None):
        raise ApiError(400, "give either text or input_ids", param="text")
    param = "text" if body.input_ids is None else "input_ids"
    given: Any = body.text if body.input_ids is None else body.input_ids
    fields = body.sampling_params
    result = []
    for name, ids in model.prompts(given, param):
        budget_param = CLIENT_NAMES["max_tokens"]
        params = sampling_params(
            CLIENT_NAMES,
            max_tokens=model.budget(len(ids), fields.max_new_tokens, DEFAULT_MAX_NEW_TOKENS, param=name, budget_param=budget_param),
            temperature=fields.temperature,
            seed=fields.sampling_seed,
            stop=fields.stop,
            stop_token_ids=fields.stop_token_ids,
            ignore_eos=fields.ignore_eos,
            skip_special_tokens=fields.skip_special_tokens,
        )
        result.append((ids, params))
    return result, is_single(given)


async def chunks(generation: Generation, prompts: Prompts, single: bool, started: float) -> AsyncIterator[Event]:
    """Each event carries all the text and tokens of its prompt so far, which is how SGLang streams."""
    index_of = {request_id: index for index, request_id in enumerate(generation.request_ids)}
    texts: list[str] = [""] * len(prompts)
    tokens: list[list[int]] = [[] for _ in prompts]
    async for update in generation:
        index = index_of[update.request_id]
        texts[index] += update.text
        tokens[index] += update.token_ids
        if update.output is not None:
            event = result(update.output, started)
        else:
            counts = {"prompt_tokens": len(prompts[index][0]), "completion_tokens": len(tokens[index])}
            meta = {"id": update.request_id, "finish_reason": None} | counts
            event = {"text": texts[index], "output_ids": tokens[index], "meta_info": meta}
        yield event if single else {"index": index} | event


def result(output: GenerationOutput, started: float) -> Event:
    """A finished prompt in SGLang's shape; spec_accept_length counts the tokens per verification, bonus included."""
    return {
        "text": output.text,
        "output_ids": list(output.token_ids),
        "meta_info": {
            "id": output.request_id,
            "finish_reason": finish_reason(output),
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(output.token_ids),
            "e2e_latency": round(perf_counter() - started, 6),
            "spec_verify_ct": output.speculation.verify_count,
            "spec_accept_length": round(output.speculation.accept_length, 4),
        },
    }


def finish_reason(output: GenerationOutput) -> dict[str, str | int | None]:
    """Why it ended, with what matched or the length that was reached."""
    if output.finish_reason == "stop":
        return {"type": "stop", "matched": output.matched_stop}
    if output.finish_reason == "length":
        return {"type": "length", "length": len(output.token_ids)}
    return {"type": output.finish_reason}
