"""What the requests of the Responses and the Messages API share on their way to becoming a chat completion."""

from collections.abc import Mapping
from dataclasses import replace

from jaxspec.server.errors import ApiError, restated, wrong
from jaxspec.server.model import ServedModel
from jaxspec.server.openai.requests import ChatRequest, chat_batch
from jaxspec.server.running import RequestBatch


def translated_batch(chat: ChatRequest, model: ServedModel, client_names: Mapping[str, str]) -> RequestBatch:
    """The batch of a chat. Raises ApiError in the words of the client, whose names differ from the chat's."""
    if chat.speculative is not None and chat.speculative.trace:
        raise wrong("speculative.trace", "is not supported in this endpoint: use /v1/chat/completions")
    try:
        batch = chat_batch(chat, model)
    except ApiError as error:
        raise restated(error, client_names) from None
    names = {ours: client_names.get(theirs, theirs) for ours, theirs in batch.client_names.items()}
    return replace(batch, client_names={**client_names, **names})
