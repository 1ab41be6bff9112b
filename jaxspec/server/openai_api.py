"""OpenAI's API: /v1/models, /v1/completions and /v1/chat/completions."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from jaxspec.engine.async_engine import AsyncEngine
from jaxspec.sampling_params import SamplingParams
from jaxspec.server.batch import Batch, collect, sampling_params, start
from jaxspec.server.errors import ApiError
from jaxspec.server.model import ServedModel, is_single
from jaxspec.server.openai_protocol import ChatRequest, CompletionRequest, SamplingFields
from jaxspec.server.openai_responses import ChatCompletion, Completion, Responder
from jaxspec.server.streaming import Event, EventStream, unless_disconnected

DEFAULT_MAX_TOKENS = 16
"""OpenAI's for completions; a chat reply may fill the context."""
COMPLETION_NAMES = {"prompt_logprobs": "logprobs"}
CHAT_NAMES = {"prompt": "messages", "logprobs": "top_logprobs"}
"""Our names of fields, and those of OpenAI's clients where they differ."""


def openai_routes(engine: AsyncEngine, model: ServedModel) -> APIRouter:
    """The endpoints over one engine and its model."""
    router = APIRouter()

    @router.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [model_card(model)]})

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        model.check_name(name)
        return JSONResponse(model_card(model))

    @router.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        work = answer(engine, body, partial(Completion, model), partial(completion_batch, body, model), COMPLETION_NAMES)
        return await unless_disconnected(request, work)

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        work = answer(engine, body, partial(ChatCompletion, model), partial(chat_batch, body, model), chat_names(body))
        return await unless_disconnected(request, work)

    return router


def model_card(model: ServedModel) -> Event:
    """An entry of the model list, with the extra fields of vLLM and SGLang."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "jaxspec",
        "root": model.name,
        "max_model_len": model.context_length,
    }


async def answer(
    engine: AsyncEngine,
    body: SamplingFields,
    respond: Callable[[Batch], Responder],
    prepare: Callable[[], Batch],
    client_names: Mapping[str, str],
) -> Response:
    """Checks, tokenizes (off the event loop), generates, answers."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
    batch = await run_in_threadpool(prepare)
    responder = respond(batch)
    generation = await start(engine, responder.id, batch, client_names)
    if body.stream:
        include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return await EventStream.open(generation, responder.chunks(generation, include_usage))
    outputs = await collect(generation)
    return JSONResponse(await run_in_threadpool(responder.whole, outputs))  # thousands of logprobs take a while


def completion_batch(body: CompletionRequest, model: ServedModel) -> Batch:
    """Token ids and sampling parameters of every prompt. Raises ApiError, naming the field, for what can't be served."""
    model.check_name(body.model)
    if model.tokenizer is None:
        raise ApiError(
            400,
            "prompt: this model has no tokenizer, so there is no text to return; send token ids to /generate as input_ids",
            param="prompt",
        )
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, f"best_of is not supported yet (leave it out or send n, {body.n or 1})", param="best_of")
    if body.echo and body.logprobs is not None and body.stream:
        raise ApiError(400, "echo with logprobs can't be streamed: leave out stream, echo or logprobs", param="echo")
    model.check_count(body.prompt, body.n, param="prompt", n_param="n")
    prompts = []
    for param, ids in model.prompts(body.prompt, "prompt"):
        budget = model.budget(len(ids), body.max_tokens, DEFAULT_MAX_TOKENS, param=param, budget_param="max_tokens")
        prompt_logprobs = body.logprobs if body.echo else None
        prompts.append((ids, _params(body, COMPLETION_NAMES, budget, logprobs=body.logprobs, prompt_logprobs=prompt_logprobs)))
    given = [body.prompt] if is_single(body.prompt) else body.prompt
    texts = [prompt if isinstance(prompt, str) else None for prompt in given]
    return Batch(prompts, body.priority or 0, texts if body.echo else None)


def chat_batch(body: ChatRequest, model: ServedModel) -> Batch:
    """Token ids and sampling parameters of the conversation. Raises ApiError, naming the field, for what can't be served."""
    model.check_name(body.model)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    model.check_count("", body.n, param="messages", n_param="n")
    names = chat_names(body)
    ids = model.chat_token_ids([message.for_template() for message in body.messages], "messages")
    name = names["max_tokens"]
    budget = model.budget(len(ids), getattr(body, name), None, param="messages", budget_param=name)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return Batch([(ids, _params(body, names, budget, logprobs=logprobs))], body.priority or 0)


def chat_names(body: ChatRequest) -> dict[str, str]:
    """Also which name of the budget this client uses."""
    return CHAT_NAMES | {"max_tokens": "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"}


def _params(body: SamplingFields, client_names: Mapping[str, str], max_tokens: int, **logprobs: int | None) -> SamplingParams:
    given: dict[str, Any] = {name: getattr(body, name) for name in _SAMPLING_FIELDS}
    return sampling_params(client_names, max_tokens=max_tokens, **given, **logprobs)


_SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "seed",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
)
"""Fields that SamplingParams has by the same name."""
