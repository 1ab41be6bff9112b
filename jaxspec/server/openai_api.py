"""OpenAI's API: /v1/models, /v1/completions and /v1/chat/completions."""

from collections.abc import Callable, Mapping
from functools import partial

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from jaxspec.engine.async_engine import AsyncEngine
from jaxspec.sampling_params import SamplingParams
from jaxspec.server.errors import ApiError
from jaxspec.server.model import ServedModel, sampling_params
from jaxspec.server.openai_protocol import ChatRequest, CompletionRequest, SamplingFields
from jaxspec.server.openai_responses import ChatCompletion, Completion, Responder
from jaxspec.server.streaming import Event, EventStream, Prompts, collect, start, unless_disconnected

DEFAULT_MAX_TOKENS = 16
"""OpenAI's for completions; a chat reply may fill the context."""


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
        work = answer(engine, body, Completion(model), partial(completion_prompts, body, model), {})
        return await unless_disconnected(request, work)

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        work = answer(engine, body, ChatCompletion(model), partial(chat_prompts, body, model), {"prompt": "messages"})
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
    engine: AsyncEngine, body: SamplingFields, responder: Responder, prepare: Callable[[], Prompts], client_names: Mapping[str, str]
) -> Response:
    """Checks, tokenizes (off the event loop), generates, answers."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
    generation = await start(engine, responder.id, await run_in_threadpool(prepare), client_names)
    if body.stream:
        include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return await EventStream.open(generation, responder.chunks(generation, include_usage))
    return JSONResponse(responder.whole(await collect(generation)))


def completion_prompts(body: CompletionRequest, model: ServedModel) -> Prompts:
    """Token ids and sampling parameters of every prompt. Raises ApiError, naming the field, for what can't be served."""
    model.check_name(body.model)
    if model.tokenizer is None:
        raise ApiError(
            400,
            "prompt: this model has no tokenizer, so there is no text to return; send token ids to /generate as input_ids",
            param="prompt",
        )
    result = []
    for param, ids in model.prompts(body.prompt, "prompt"):
        budget = model.budget(len(ids), body.max_tokens, DEFAULT_MAX_TOKENS, param=param, budget_param="max_tokens")
        result.append((ids, _params(body, budget)))
    return result


def chat_prompts(body: ChatRequest, model: ServedModel) -> Prompts:
    """Token ids and sampling parameters of the conversation. Raises ApiError, naming the field, for what can't be served."""
    model.check_name(body.model)
    ids = model.chat_token_ids([message.for_template() for message in body.messages], "messages")
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    budget = model.budget(len(ids), getattr(body, name), None, param="messages", budget_param=name)
    return [(ids, _params(body, budget))]


def _params(body: SamplingFields, max_tokens: int) -> SamplingParams:
    return sampling_params(
        {},
        max_tokens=max_tokens,
        temperature=body.temperature,
        seed=body.seed,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        skip_special_tokens=body.skip_special_tokens,
    )
