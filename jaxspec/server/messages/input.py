"""The conversation of the Messages API: its blocks, and the messages of a chat that they make."""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal, Self

from pydantic import FailFast, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from jaxspec.server.conversations import MAX_TOOLS, FunctionCall, Message, TextPart, ToolCall, ToolName
from jaxspec.server.errors import wrong
from jaxspec.server.fields import EACH, ONE, KindedModel, Only, RequestModel, described_as, one_or_each
from jaxspec.server.neutral_fields import each, neutral

NEEDED = {"text": "text", "tool_use": "id name input", "tool_result": "tool_use_id", "thinking": "thinking"}
ALLOWED = {
    "text": "cache_control citations",
    "tool_use": "cache_control",
    "tool_result": "cache_control content is_error",
    "thinking": "signature",
}
"""Fields of blocks, by type: those that a block must have, and others that it may have."""
PLACES = {"user": ("text", "tool_result"), "assistant": ("text", "tool_use", "thinking"), "system": ("text",)}
"""Types of blocks, by the role of their message."""


class CacheControl(RequestModel):
    """Accepted without effect: every prefix is cached as long as there is room."""

    type: Literal["ephemeral"]
    ttl: str | None = None


class TextBlock(RequestModel):
    """A piece of a text; images and documents are not supported."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[Any, Only([])] = None


type TextBlocks = Annotated[list[TextBlock], FailFast()]
type TextOrBlocks = Annotated[
    Annotated[str, described_as("a string or a list of blocks"), Tag(ONE)] | Annotated[TextBlocks, Tag(EACH)], one_or_each
]


@neutral(each("caller toolset_name"))
class InputBlock(KindedModel):
    """A piece of a message; images, documents, and calls of the server's own tools are not supported."""

    type: Literal["text", "tool_use", "tool_result", "thinking"]
    needed, allowed = NEEDED, ALLOWED
    text: str | None = None
    id: str | None = None
    name: ToolName | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: TextOrBlocks | None = None
    """What the tool said. None: nothing."""
    is_error: bool | None = None
    """Accepted without effect: the model reads the content."""
    thinking: str | None = None
    signature: str | None = None
    """Accepted without effect: thinking is not signed here."""
    cache_control: CacheControl | None = None
    citations: Annotated[Any, Only([])] = None


type Blocks = Annotated[list[InputBlock], FailFast()]
type BlocksOrText = Annotated[
    Annotated[str, described_as("a string or a list of blocks"), Tag(ONE)] | Annotated[Blocks, Tag(EACH)], one_or_each
]


class AnthropicMessage(RequestModel):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: BlocksOrText

    @model_validator(mode="after")
    def check_places(self) -> Self:
        """Only an assistant calls and thinks, and only a user has results."""
        blocks, expected = self.content if isinstance(self.content, list) else [], PLACES[self.role]
        for block in blocks:
            if block.type not in expected:
                said = f"of the role {self.role} takes blocks of the types {', '.join(expected)}, not {block.type}"
                raise PydanticCustomError("place", said)
        if sum(block.type == "tool_use" for block in blocks) > MAX_TOOLS:
            raise PydanticCustomError("calls", f"takes at most {MAX_TOOLS} blocks of the type tool_use")
        return self

    def messages(self, param: str) -> Iterator[Message]:
        """The same in a chat, where results are messages of their own. Raises ApiError, naming `param`, for a call whose input is
        nested too deeply."""
        if isinstance(self.content, str):
            yield Message(role=self.role, content=self.content)
        elif self.role == "assistant":
            yield _answer(self.content, param)
        else:
            for kind, blocks in groupby(self.content, lambda block: block.type):
                if kind == "text":
                    yield Message(role=self.role, content=parts_of(blocks))
                    continue
                for block in blocks:
                    yield Message(role="tool", content=content_of(block.content), tool_call_id=block.tool_use_id)


def _answer(blocks: Sequence[InputBlock], param: str) -> Message:
    """An assistant's message."""
    try:
        calls = [
            ToolCall(
                id=block.id, function=FunctionCall(name=block.name or "", arguments=json.dumps(block.input, ensure_ascii=False))
            )
            for block in blocks
            if block.type == "tool_use"
        ]
    except RecursionError:
        raise wrong(f"{param}:", "the input of a call is nested too deeply") from None
    thinking = "\n".join(block.thinking or "" for block in blocks if block.type == "thinking")
    content = parts_of(blocks) or (None if calls else "")
    return Message(role="assistant", tool_calls=calls or None, content=content, reasoning_content=thinking or None)


def parts_of(blocks: Iterable[InputBlock | TextBlock]) -> list[TextPart]:
    """The texts among the blocks, as parts of a chat's message."""
    return [TextPart(type="text", text=block.text or "") for block in blocks if block.type == "text"]


def content_of(given: str | Sequence[TextBlock] | None) -> str | list[TextPart]:
    """A text or its blocks as the content of a chat's message."""
    return given or "" if given is None or isinstance(given, str) else parts_of(given)


type AnthropicMessages = Annotated[list[AnthropicMessage], Field(min_length=1), FailFast()]
