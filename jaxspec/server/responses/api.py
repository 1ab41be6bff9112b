"""OpenAI's Responses API, stateless: /v1/responses is a chat completion in other words."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from jaxspec.server.bodies import JsonBody, documented
from jaxspec.server.model import ServedModel
from jaxspec.server.responses.answers import ResponsesBuilder
from jaxspec.server.responses.objects import ResponsesResponse
from jaxspec.server.responses.requests import ResponsesRequest, as_chat, responses_batch
from jaxspec.server.running import RunningRequests
from jaxspec.server.sending import failures, success_or_stream
from jaxspec.server.streaming import respond

ANSWERS = success_or_stream(ResponsesResponse, "each a typed event of the Responses API", "") | failures(404, 415, 504)


def responses_routes(running: RunningRequests, model: ServedModel) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/responses", responses=ANSWERS, openapi_extra=documented(ResponsesRequest))
    async def responses(body: Annotated[ResponsesRequest, Depends(JsonBody(ResponsesRequest))], request: Request) -> Response:
        """Nothing is stored: the input holds the whole conversation."""
        chat = await request.state.run(partial(as_chat, body))
        prepare, build = partial(responses_batch, chat, model), partial(ResponsesBuilder, model, body)
        return await respond(running, request, prepare, build, stream=body.stream)

    return router
