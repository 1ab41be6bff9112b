"""OpenAI's API: /v1/models, /v1/completions and /v1/chat/completions."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from jaxspec.sampling_params import SamplingParams
from jaxspec.server.batch import Batch, collect, start
from jaxspec.server.errors import ApiError
from jaxspec.server.generation_answers import CHAT, COMPLETION, MODEL, MODELS
from jaxspec.server.model import ServedModel, is_single
from jaxspec.server.openai_protocol import ChatRequest, CompletionRequest, OpenAIRequest
from jaxspec.server.openai_responses import ChatCompletion, Completion, Responder
from jaxspec.server.running import RunningRequests
from jaxspec.server.sampling_fields import OPENAI_NAMES, sampling_params
from jaxspec.server.speculation import chosen_tree, wants_trace
from jaxspec.server.streaming import Event, EventStream, unless_disconnected

DEFAULT_MAX_TOKENS = 16
"""OpenAI's for completions; a chat reply may fill the context."""
COMPLETION_NAMES = {"prompt_logprobs": "logprobs", "rid": "request_id"}
CHAT_NAMES = {"prompt": "messages", "logprobs": "top_logprobs", "rid": "request_id"}
"""Our names of fields, and those of OpenAI's clients where they differ."""


def openai_routes(running: RunningRequests, model: ServedModel) -> APIRouter:
    """The endpoints over one engine and its model."""
    router = APIRouter()

    @router.get("/v1/models", responses=MODELS)
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [model_card(model)]})

    @router.get("/v1/models/{name:path}", responses=MODEL)
    async def one_model(name: str) -> Response:
        model.check_name(name)
        return JSONResponse(model_card(model))

    @router.post("/v1/completions", responses=COMPLETION)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        respond, prepare = partial(Completion, model, body), partial(completion_batch, body, model)
        return await unless_disconnected(request, answer(running, request, body, respond, prepare, COMPLETION_NAMES))

    @router.post("/v1/chat/completions", responses=CHAT)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        respond, prepare = partial(ChatCompletion, model, body), partial(chat_batch, body, model)
        return await unless_disconnected(request, answer(running, request, body, respond, prepare, chat_names(body)))

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
    running: RunningRequests,
    request: Request,
    body: OpenAIRequest,
    respond: Callable[[Batch], Responder],
    prepare: Callable[[], Batch],
    client_names: Mapping[str, str],
) -> Response:
    """Checks, tokenizes (off the event loop), generates, answers."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
    batch = await run_in_threadpool(prepare)
    responder = respond(batch)
    generation = await start(running, request, batch, client_names)
    if body.stream:
        return await EventStream.open(generation, responder.chunks(generation))
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
    prompt_only = body.max_tokens == 0
    if prompt_only and (not body.echo or body.stream):
        raise ApiError(400, "max_tokens must be at least 1, or 0 with echo and without stream", param="max_tokens")
    model.check_count(body.prompt, body.n, param="prompt", n_param="n")
    prompts = []
    for param, ids in model.prompts(body.prompt, "prompt"):
        wanted = 1 if prompt_only else body.max_tokens
        budget = model.budget(len(ids), wanted, DEFAULT_MAX_TOKENS, param=param, budget_param="max_tokens")
        prompt_logprobs = body.logprobs if body.echo else None
        prompts.append((ids, _params(body, COMPLETION_NAMES, budget, logprobs=body.logprobs, prompt_logprobs=prompt_logprobs)))
    given = [body.prompt] if is_single(body.prompt) else body.prompt
    texts = [prompt if isinstance(prompt, str) else None for prompt in given]
    return _batch(body, model, prompts, texts=texts if body.echo else None, prompt_only=prompt_only)


def chat_batch(body: ChatRequest, model: ServedModel) -> Batch:
    """Token ids and sampling parameters of the conversation. Raises ApiError, naming the field, for what can't be served."""
    model.check_name(body.model)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    model.check_count("", body.n, param="messages", n_param="n")
    names = chat_names(body)
    messages = [message.for_template() for message in body.messages]
    ids = model.chat_token_ids(messages, "messages", body.chat_template_kwargs)
    name = names["max_tokens"]
    budget = model.budget(len(ids), getattr(body, name), None, param="messages", budget_param=name)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _batch(body, model, [(ids, _params(body, names, budget, logprobs=logprobs))])


def _batch(body: OpenAIRequest, model: ServedModel, prompts: Sequence[tuple[list[int], SamplingParams]], **more: Any) -> Batch:
    """The prompts with what both kinds of requests say about them."""
    trace = wants_trace(body.speculative, stream=body.stream, completions=len(prompts) * (body.n or 1))
    tree = chosen_tree(body.speculative, model)
    return Batch(prompts, body.priority or 0, tree=tree, trace=trace, rid=body.request_id, **more)


def chat_names(body: ChatRequest) -> dict[str, str]:
    """Also which name of the budget this client uses."""
    return CHAT_NAMES | {"max_tokens": "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"}


def _params(body: OpenAIRequest, client_names: Mapping[str, str], max_tokens: int, **logprobs: int | None) -> SamplingParams:
    given: dict[str, Any] = {ours: getattr(body, theirs) for ours, theirs in OPENAI_NAMES.items()}
    given["include_stop_str_in_output"] = body.include_stop_str_in_output or body.no_stop_trim
    return sampling_params(client_names, max_tokens=max_tokens, **given, **logprobs)
