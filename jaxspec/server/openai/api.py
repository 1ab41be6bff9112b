"""OpenAI's API: /v1/models, /v1/completions and /v1/chat/completions."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import RedirectResponse, Response

from jaxspec.sampling_params import CONSTRAINTS
from jaxspec.server.bodies import JsonBody, documented
from jaxspec.server.model import ServedModel
from jaxspec.server.openai.chat import ChatBuilder, ChatResponse
from jaxspec.server.openai.completions import CompletionBuilder, CompletionResponse
from jaxspec.server.openai.requests import ChatRequest, CompletionRequest, chat_batch, completion_batch
from jaxspec.server.running import RunningRequests
from jaxspec.server.sending import ResponseModel, failures, json_response, success, success_or_stream
from jaxspec.server.streaming import respond
from jaxspec.server.tools import why_no_tools


class Capabilities(ResponseModel):
    """What requests may ask of the model."""

    chat: bool
    """Conversations: it has a chat template."""
    tools: bool
    """Calls of tools."""
    reasoning: bool
    """Its thinking is told from the answer."""
    structured_output: list[str]
    """Kinds of constraints that its text can be made to follow."""


class Drafts(ResponseModel):
    """Where drafts come from."""

    algorithm: str
    """As --speculative-algorithm calls it; NONE: there are none."""
    tree: str
    """levels/children/nodes; 0/1/1 is plain decoding."""
    trees: list[str]
    """All that requests may ask for."""


class ModelCard(ResponseModel):
    """An entry of the model list, with the extra fields of vLLM and SGLang (root and max_model_len) and two of our own."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    max_model_len: int
    """The context length in tokens, prompt and output together."""
    capabilities: Capabilities
    speculative: Drafts


class ModelList(ResponseModel):
    object: str
    data: list[ModelCard]


_FAILURES = failures(404, 415, 504)
COMPLETION = success_or_stream(CompletionResponse, "each a text_completion whose text continues the one before") | _FAILURES
CHAT = success_or_stream(ChatResponse, "each a chat.completion.chunk") | _FAILURES


def openai_routes(running: RunningRequests, model: ServedModel) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models", responses=success(ModelList))
    async def models() -> Response:
        return json_response(ModelList(object="list", data=[model_card(model, name) for name in model.names]))

    @router.get("/v1/models/{name:path}", responses=success(ModelCard) | failures(404))
    async def one_model(name: str, request: Request) -> Response:
        if not name:  # Starlette redirects other paths with a slash at the end
            return RedirectResponse(request.url.replace(path=request.url.path.rstrip("/")))
        if name not in model.names:
            model.refuse_name(name)
        return json_response(model_card(model, name))

    @router.post("/v1/completions", responses=COMPLETION, openapi_extra=documented(CompletionRequest))
    async def completions(body: Annotated[CompletionRequest, Depends(JsonBody(CompletionRequest))], request: Request) -> Response:
        prepare, build = partial(completion_batch, body, model), partial(CompletionBuilder, model, body)
        return await respond(running, request, prepare, build, stream=body.stream)

    @router.post("/v1/chat/completions", responses=CHAT, openapi_extra=documented(ChatRequest))
    async def chat_completions(body: Annotated[ChatRequest, Depends(JsonBody(ChatRequest))], request: Request) -> Response:
        prepare, build = partial(chat_batch, body, model), partial(ChatBuilder, model, body)
        return await respond(running, request, prepare, build, stream=body.stream)

    return router


def model_card(model: ServedModel, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        object="model",
        created=model.created,
        owned_by="jaxspec",
        root=model.path or model.name,
        max_model_len=model.context_length,
        capabilities=Capabilities(
            chat=model.chat_template is not None,
            tools=why_no_tools(model) is None,
            reasoning=model.reasoning is not None,
            structured_output=[] if model.tokenizer is None else list(CONSTRAINTS),
        ),
        speculative=Drafts(algorithm=model.algorithm, tree=str(model.tree), trees=[str(tree) for tree in model.trees]),
    )
