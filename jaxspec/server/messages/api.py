"""Anthropic's Messages API: /v1/messages is a chat completion in other words. Its failures have their own shape (errors.py)."""

from functools import partial
from typing import Annotated, Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from jaxspec.server.bodies import JsonBody, documented
from jaxspec.server.errors import ANTHROPIC
from jaxspec.server.messages.answers import MessagesBuilder, MessagesResponse, TokenCounted
from jaxspec.server.messages.requests import CLIENT_NAMES, CountTokensRequest, MessagesRequest, as_chat, count_tokens
from jaxspec.server.model import ServedModel
from jaxspec.server.openai.requests import translated_batch
from jaxspec.server.running import RunningRequests
from jaxspec.server.sending import COMMON, AnthropicErrorResponse, failures, json_response, success, success_or_stream
from jaxspec.server.streaming import respond
from jaxspec.server.tokenize_api import THREADS

ANSWERS = success_or_stream(MessagesResponse, "each a typed event of Anthropic's", "") | failures(
    *COMMON, 404, 415, 504, shape=AnthropicErrorResponse
)
COUNTS: Any = success(TokenCounted) | failures(*COMMON, 404, 415, shape=AnthropicErrorResponse)


def messages_routes(running: RunningRequests, model: ServedModel) -> APIRouter:
    router = APIRouter()
    limiter = CapacityLimiter(THREADS)

    @router.post(ANTHROPIC, responses=ANSWERS, openapi_extra=documented(MessagesRequest))
    async def messages(body: Annotated[MessagesRequest, Depends(JsonBody(MessagesRequest))], request: Request) -> Response:
        """The next turn of a conversation."""
        chat = await request.state.run(partial(as_chat, body, model))
        prepare, build = partial(translated_batch, chat, model, CLIENT_NAMES), partial(MessagesBuilder, model, body)
        return await respond(running, request, prepare, build, stream=body.stream)

    @router.post(f"{ANTHROPIC}/count_tokens", responses=COUNTS, openapi_extra=documented(CountTokensRequest))
    async def count(body: Annotated[CountTokensRequest, Depends(JsonBody(CountTokensRequest))]) -> Response:
        """The tokens of the prompt that such a request has."""
        return json_response(TokenCounted(input_tokens=await run_sync(count_tokens, body, model, limiter=limiter)))

    return router
