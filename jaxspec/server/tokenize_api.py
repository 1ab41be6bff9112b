"""The tokenizer over HTTP, for clients that count tokens or send token ids: lm-eval, vLLM's benchmark, and others.

vLLM's and SGLang's requests are nearly the same; both are accepted.
"""

from typing import Annotated, Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends
from fastapi.responses import Response
from pydantic import FailFast, Field

from jaxspec.server.bodies import JsonBody, documented
from jaxspec.server.conversations import Messages
from jaxspec.server.errors import ApiError, wrong
from jaxspec.server.fields import MAX_INT, RequestModel, Strings, described_as
from jaxspec.server.model import ServedModel, check_unicode
from jaxspec.server.neutral_fields import TOKENIZE, neutral
from jaxspec.server.sending import ResponseModel, failures, json_response, success
from jaxspec.server.tools import ConversationFields, chosen_tools, conversation_text
from jaxspec.text.tokenizer import Tokenizer

MAX_TEXTS = 1024
"""Texts in one request, as in vLLM."""
MAX_CHARACTERS = 2**20
"""Of all texts in one request; longer than any context, for clients that truncate afterwards."""
MAX_DETOKENIZED = 2**23
"""Characters of all texts in one answer: some tokens have hundreds."""
MAX_TOKENS = 2**18
"""Token ids that one request may detokenize."""
THREADS = 2
"""The most threads for these endpoints, so that they can't delay the prompts of other requests."""

type Texts = Annotated[Strings, Field(max_length=MAX_TEXTS)]
type TokenIdList = Annotated[list[Annotated[int, Field(ge=0, le=MAX_INT)]], FailFast()]
type TokenIdLists = Annotated[list[TokenIdList], Field(max_length=MAX_TEXTS), FailFast()]
TextOrTexts = Annotated[str | Texts | None, described_as(f"a string or a list of at most {MAX_TEXTS} strings")]
IdsToDecode = Annotated[
    TokenIdList | TokenIdLists, described_as(f"a list of token ids, 0 or larger, or a list of at most {MAX_TEXTS} such lists")
]


@neutral(TOKENIZE)
class TokenizeRequest(ConversationFields):
    """POST /tokenize, with either prompt or messages."""

    model: str | None = None
    """None: the served model."""
    prompt: TextOrTexts = None
    """A list of prompts, as in SGLang, gets lists."""
    messages: Messages | None = None
    """As in /v1/chat/completions."""
    add_special_tokens: bool | None = None
    """None: the tokens that begin and end a prompt. A chat template writes its own, so messages get none."""
    return_token_strs: bool | None = None
    """vLLM's: the response has the tokens as they are in the vocabulary."""


class TokenizeResponse(ResponseModel):
    """A list of prompts gets lists."""

    tokens: list[int] | list[list[int]]
    count: int | list[int]
    max_model_len: int
    token_strs: list[str] | list[list[str]] | None


class DetokenizeRequest(RequestModel):
    """POST /detokenize."""

    model: str | None = None
    """None: the served model."""
    tokens: IdsToDecode
    """A list of lists, as in SGLang, gets a list of texts."""
    skip_special_tokens: bool | None = None
    """None: special tokens are in the text, as in vLLM; lm-eval needs the end-of-sequence token."""


class DetokenizeResponse(ResponseModel):
    """A list of lists gets lists."""

    prompt: str | list[str]
    """vLLM's name of the text."""
    text: str | list[str]
    """SGLang's name of the same."""


class TokenizerInfo(ResponseModel):
    """By the names of a tokenizer_config.json."""

    tokenizer_class: str
    model_max_length: int
    vocab_size: int
    eos_token: str | None
    bos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


def tokenize_routes(model: ServedModel, tokenizer_info: bool) -> APIRouter:
    """The endpoints over one model. `tokenizer_info`: whether /tokenizer_info exists."""
    router = APIRouter(tags=["tokenizer"])
    limiter = CapacityLimiter(THREADS)
    refused = failures(404, 415)
    tokenizing: Any = {"responses": success(TokenizeResponse) | refused, "openapi_extra": documented(TokenizeRequest)}
    detokenizing: Any = {"responses": success(DetokenizeResponse) | refused, "openapi_extra": documented(DetokenizeRequest)}

    @router.post("/tokenize", **tokenizing)
    @router.post("/v1/tokenize", **tokenizing)
    async def tokenize(body: Annotated[TokenizeRequest, Depends(JsonBody(TokenizeRequest))]) -> Response:
        """Token ids of a text, of several, or of a conversation."""
        return await run_sync(lambda: json_response(tokenize_request(body, model)), limiter=limiter)

    @router.post("/detokenize", **detokenizing)
    @router.post("/v1/detokenize", **detokenizing)
    async def detokenize(body: Annotated[DetokenizeRequest, Depends(JsonBody(DetokenizeRequest))]) -> Response:
        """The text of token ids, by vLLM's name (prompt) and SGLang's (text)."""
        return await run_sync(lambda: json_response(detokenize_request(body, model)), limiter=limiter)

    if tokenizer_info:

        @router.get("/tokenizer_info", responses=success(TokenizerInfo) | failures(404))
        async def show_tokenizer_info() -> Response:
            """Special tokens and chat template for lm-eval's remote tokenizer, by the names of a tokenizer_config.json."""
            return json_response(describe_tokenizer(model))

    return router


def tokenize_request(body: TokenizeRequest, model: ServedModel) -> TokenizeResponse:
    """Raises ApiError, naming the field at fault. Slow for long texts."""
    model.check_name(body.model)
    tokenizer = tokenizer_of(model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    if body.messages is not None:
        if body.add_special_tokens:
            raise wrong("add_special_tokens", "must not be true with messages: the chat template writes the special tokens")
        use = chosen_tools(body.tools, None, None, model)
        lists = [model.chat_token_ids(conversation_text(body.messages, body, model, use))]
    else:
        given = {
            "tools": bool(body.tools),
            "chat_template_kwargs": body.chat_template_kwargs is not None,
            "add_generation_prompt": body.add_generation_prompt is False,
            "continue_final_message": bool(body.continue_final_message),
        }
        for name, is_given in given.items():
            if is_given:
                raise wrong(name, "needs messages")
        lists = _encode(tokenizer, body.prompt, body.add_special_tokens is not False)
    strings = [tokenizer.convert_ids_to_tokens(each) for each in lists] if body.return_token_strs else None
    found: dict[str, Any] = {"tokens": lists, "count": [len(each) for each in lists], "token_strs": strings}
    if not isinstance(body.prompt, list):  # there is one
        found = {name: each and each[0] for name, each in found.items()}
    return TokenizeResponse(max_model_len=model.context_length, **found)


def _encode(tokenizer: Tokenizer, given: str | list[str] | None, add_special_tokens: bool) -> list[list[int]]:
    texts = [given] if isinstance(given, str) else given or []
    if (length := sum(map(len, texts))) > MAX_CHARACTERS:
        raise wrong("prompt", f"has {length} characters; a request takes at most {MAX_CHARACTERS}")
    for text in texts:
        check_unicode(text, "prompt")
    return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]


def detokenize_request(body: DetokenizeRequest, model: ServedModel) -> DetokenizeResponse:
    """Raises ApiError, naming the field at fault."""
    model.check_name(body.model)
    tokenizer = tokenizer_of(model)
    is_list = bool(body.tokens) and isinstance(body.tokens[0], list)
    lists: list[Any] = list(body.tokens) if is_list else [body.tokens]
    if (count := sum(map(len, lists))) > MAX_TOKENS:
        raise wrong("tokens", f"holds {count} token ids; a request takes at most {MAX_TOKENS}")
    known = len(tokenizer)
    if unknown := [token for tokens in lists for token in tokens if token >= known]:
        raise wrong("tokens", f"holds {unknown[0]}; the tokenizer's ids are 0 to {known - 1}")
    texts, rest = [], MAX_DETOKENIZED
    for tokens in lists:
        texts.append(str(tokenizer.decode(tokens, skip_special_tokens=bool(body.skip_special_tokens))))
        rest -= len(texts[-1])
        if rest < 0:
            raise wrong("tokens", f"has a text of more than {MAX_DETOKENIZED} characters: split it")
    text = texts if is_list else texts[0]
    return DetokenizeResponse(prompt=text, text=text)


def describe_tokenizer(model: ServedModel) -> TokenizerInfo:
    """Only known fields: a tokenizer's own settings may contain paths."""
    tokenizer = tokenizer_of(model)
    known: dict[str, Any] = {
        "tokenizer_class": type(tokenizer).__name__,
        "model_max_length": model.context_length,
        "vocab_size": len(tokenizer),
        "eos_token": tokenizer.eos_token,
        "bos_token": tokenizer.bos_token,
        "pad_token": tokenizer.pad_token,
        "unk_token": tokenizer.unk_token,
        "chat_template": None if model.chat_template is None else model.chat_template.text,
    }
    special = {name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    return TokenizerInfo(**{**special, **known})


def tokenizer_of(model: ServedModel) -> Tokenizer:
    """Raises ApiError if there is none."""
    if model.tokenizer is None:
        raise ApiError(404, "this model has no tokenizer: send token ids to /generate as input_ids")
    return model.tokenizer
