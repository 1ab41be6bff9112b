"""What users give as a prompt, text, token ids or a conversation, as token ids."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from jaxspec.checks import is_int
from jaxspec.text.chat_template import ChatTemplate
from jaxspec.text.tokenizer import Tokenizer

type Prompt = str | Sequence[int]
type Conversation = Sequence[Mapping[str, Any]]
"""Messages such as {"role": "user", "content": "Hello"}."""
BYTES = (bytes, bytearray, memoryview)
"""Sequences of whole numbers, which are no token ids."""


def encode(tokenizer: Tokenizer | None, prompt: Prompt) -> list[int]:
    """Token ids of a prompt. Raises ValueError for text if the model has no tokenizer."""
    if not isinstance(prompt, str):
        if isinstance(prompt, BYTES) or not isinstance(prompt, Iterable) or not all(map(is_int, prompt)):
            raise ValueError(f"a prompt must be a string or a list of token ids, got {prompt!r:.80}")
        return [int(token) for token in prompt]
    if tokenizer is None:
        raise ValueError("this model directory has no tokenizer: give lists of token ids instead of text")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a prompt must be valid Unicode, but its character {error.start} is half of a surrogate pair") from None
    return tokenizer.encode(prompt)


def is_list(value: Any) -> TypeGuard[Sequence]:
    """Whether it is a sequence, and neither text nor bytes."""
    return isinstance(value, Sequence) and not isinstance(value, (str, *BYTES))


class ChatEncoder:
    """Conversations as token ids, in the model's chat template, whose process starts with the first. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._template: ChatTemplate | None = None
        self._starting = threading.Lock()

    def encode(self, messages: Conversation, chat_template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of a conversation, up to where the reply begins. Raises ValueError if there is no template, or if it can't
        render the conversation."""
        if not is_list(messages) or not all(isinstance(message, Mapping) for message in messages):
            raise ValueError(f"a conversation must be a list of messages with role and content, got {messages!r:.80}")
        with self._starting:
            if self._template is None:
                self._template = ChatTemplate.of_model(self._tokenizer)
        if self._template is None or self._tokenizer is None:
            raise ValueError("the model has no chat template: use generate, with the prompt as the model expects it")
        text = self._template.render(messages, chat_template_kwargs)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def close(self) -> None:
        """Ends the template's process."""
        with self._starting:
            if self._template is not None:
                self._template.close()
