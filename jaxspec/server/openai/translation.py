"""What the requests of the Responses and the Messages API share on their way to becoming a chat completion."""

from collections.abc import Mapping

from jaxspec.server.errors import ApiError, restated, wrong
from jaxspec.server.model import ServedModel
from jaxspec.server.openai.requests import ChatRequest, chat_batch, chat_names
from jaxspec.server.running import RequestBatch


def translated_batch(chat: ChatRequest, model: ServedModel, client_names: Mapping[str, str]) -> RequestBatch:
    """The batch of a chat. Raises ApiError in the words of the client, whose names differ from the chat's."""
    if chat.speculative is not None and chat.speculative.trace:
        raise wrong("speculative.trace", "is not supported in this endpoint: use /v1/chat/completions")
    try:
        return chat_batch(chat, model)
    except ApiError as error:
        raise restated(error, client_names) from None


def translated_names(chat: ChatRequest, client_names: Mapping[str, str]) -> dict[str, str]:
    """Our names of fields, and those of the client, whose names differ from the chat's. Raises ApiError for several constraints."""
    try:
        names = chat_names(chat)
    except ApiError as error:
        raise restated(error, client_names) from None
    return {**client_names, **{ours: client_names.get(theirs, theirs) for ours, theirs in names.items()}}
