"""Prompts as a chat model expects them, rendered as the server does it."""

from collections.abc import Sequence

from jaxspec.llm import LLM, Prompt
from jaxspec.server.chat_template import ChatTemplate
from jaxspec.server.errors import ApiError


def chat_tokens(llm: LLM, messages: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of conversations, each of one user's message, in the model's chat template and up to where the reply begins.

    Raises ValueError if the model has no template or it refuses a message, or a message is no text.
    """
    template = ChatTemplate.of_model(llm.tokenizer)
    if template is None or llm.tokenizer is None:
        raise ValueError("the model has no chat template: leave out --chat")
    if not all(isinstance(message, str) for message in messages):
        raise ValueError("--chat takes prompts of text, and one of them is token ids")
    with template:
        try:
            texts = [template.render([{"role": "user", "content": str(message)}]) for message in messages]
        except ApiError as error:
            raise ValueError(str(error)) from None
    return [llm.tokenizer.encode(text, add_special_tokens=False) for text in texts]
