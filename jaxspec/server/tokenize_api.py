"""The tokenizer over HTTP, for clients that count tokens or send token ids: lm-eval, vLLM's benchmark, and others."""

from typing import Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from jaxspec.server.answers import DetokenizeAnswer, TokenizeAnswer, TokenizerInfo, answers, errors
from jaxspec.server.errors import ApiError
from jaxspec.server.model import ServedModel, refuse_half_characters
from jaxspec.server.tokenize_protocol import DetokenizeRequest, TokenizeRequest
from jaxspec.tokenizer import Tokenizer

MAX_CHARACTERS = 2**20
"""Of the texts of one request, together; longer than any context, for clients that cut afterwards."""
MAX_TOKENS = 2**20
"""To be detokenized by one request."""
THREADS = 2
"""That these endpoints work in, so that they can't delay the prompts of /generate and its kind."""


def tokenize_routes(model: ServedModel, tokenizer_info: bool) -> APIRouter:
    """The endpoints over one model; without a tokenizer they say so. `tokenizer_info`: whether there is /tokenizer_info."""
    router = APIRouter(tags=["tokenizer"])
    limiter = CapacityLimiter(THREADS)

    @router.post("/tokenize", responses=answers(TokenizeAnswer) | errors(404, 415))
    @router.post("/v1/tokenize", responses=answers(TokenizeAnswer) | errors(404, 415))
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a text, of several, or of a conversation."""
        return JSONResponse(await run_sync(tokenized, body, model, limiter=limiter))

    @router.post("/detokenize", responses=answers(DetokenizeAnswer) | errors(404, 415))
    @router.post("/v1/detokenize", responses=answers(DetokenizeAnswer) | errors(404, 415))
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids, by vLLM's name (prompt) and SGLang's (text)."""
        return JSONResponse(await run_sync(detokenized, body, model, limiter=limiter))

    if tokenizer_info:

        @router.get("/tokenizer_info", responses=answers(TokenizerInfo) | errors(404))
        async def show_tokenizer_info() -> Response:
            """What lm-eval's remote tokenizer asks for, by the names of a tokenizer_config.json."""
            return JSONResponse(information(model))

    return router


def tokenized(body: TokenizeRequest, model: ServedModel) -> dict[str, Any]:
    """The answer to /tokenize. Slow for long texts."""
    model.check_name(body.model)
    tokenizer = tokenizer_of(model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    if body.messages is not None:
        if body.add_special_tokens:
            raise ApiError(400, "add_special_tokens: the chat template writes those of messages", param="add_special_tokens")
        messages = [message.for_template() for message in body.messages]
        tokens: Any = model.chat_token_ids(messages, "messages", body.chat_template_kwargs)
    else:
        if body.chat_template_kwargs is not None:
            raise ApiError(400, "chat_template_kwargs has no use without messages", param="chat_template_kwargs")
        tokens = _encoded(tokenizer, body.prompt, body.add_special_tokens is not False)
    is_list = isinstance(body.prompt, list)
    answer = {
        "tokens": tokens,
        "count": [len(each) for each in tokens] if is_list else len(tokens),
        "max_model_len": model.context_length,
        "token_strs": None,
    }
    if body.return_token_strs:
        strings = tokenizer.convert_ids_to_tokens
        answer["token_strs"] = [strings(each) for each in tokens] if is_list else strings(tokens)
    return answer


def _encoded(tokenizer: Tokenizer, given: str | list[str] | None, add_special_tokens: bool) -> list[int] | list[list[int]]:
    texts = [given] if isinstance(given, str) else given or []
    if (length := sum(map(len, texts))) > MAX_CHARACTERS:
        raise ApiError(400, f"prompt has {length} characters; at most {MAX_CHARACTERS} are tokenized at once", param="prompt")
    for text in texts:
        refuse_half_characters(text, "prompt")
    ids = [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]
    return ids[0] if isinstance(given, str) else ids


def detokenized(body: DetokenizeRequest, model: ServedModel) -> dict[str, Any]:
    """The answer to /detokenize."""
    model.check_name(body.model)
    tokenizer = tokenizer_of(model)
    is_list = bool(body.tokens) and isinstance(body.tokens[0], list)
    lists: list[Any] = list(body.tokens) if is_list else [body.tokens]
    if (count := sum(map(len, lists))) > MAX_TOKENS:
        raise ApiError(400, f"tokens holds {count} token ids; at most {MAX_TOKENS} are detokenized at once", param="tokens")
    known = len(tokenizer)
    if unknown := [token for tokens in lists for token in tokens if token >= known]:
        raise ApiError(400, f"tokens holds {unknown[0]}; the tokenizer's ids are 0 to {known - 1}", param="tokens")
    texts = [str(tokenizer.decode(tokens, skip_special_tokens=bool(body.skip_special_tokens))) for tokens in lists]
    text = texts if is_list else texts[0]
    return {"prompt": text, "text": text}


def information(model: ServedModel) -> dict[str, Any]:
    """Field by field: a tokenizer's own settings may hold paths."""
    tokenizer = tokenizer_of(model)
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "model_max_length": model.context_length,
        "vocab_size": len(tokenizer),
        **{name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)},
        "eos_token": tokenizer.eos_token,
        "bos_token": tokenizer.bos_token,
        "pad_token": tokenizer.pad_token,
        "unk_token": tokenizer.unk_token,
        "chat_template": None if model.chat_template is None else model.chat_template.text,
    }


def tokenizer_of(model: ServedModel) -> Tokenizer:
    """Raises ApiError if there is none."""
    if model.tokenizer is None:
        raise ApiError(404, "this model has no tokenizer: send token ids to /generate as input_ids")
    return model.tokenizer
