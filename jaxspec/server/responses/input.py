"""The input of the Responses API: its items, and the messages of a chat that they make."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import FailFast, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from jaxspec.server.conversations import MAX_TOOLS, FunctionCall, Message, ToolCall, ToolName, json_object, text_of
from jaxspec.server.errors import wrong
from jaxspec.server.fields import EACH, ONE, KindedModel, RequestModel, described_as, one_or_each
from jaxspec.server.neutral_fields import each, neutral

type Entries = Annotated[list[dict[str, Any]], FailFast()]


# openai-python sends these fields when an answer becomes part of the next request.
@neutral(each("annotations", []) | each("prompt_cache_breakpoint"))
class ItemText(RequestModel):
    """A piece of an item's text; images, files and audio are not supported."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text"]
    text: str
    logprobs: Entries | None = None
    """Of an earlier answer; they have no effect."""
    parsed: Any = None
    """Sent by openai-python: the text as its helpers parsed it. Without effect."""


type ItemTexts = Annotated[list[ItemText], FailFast()]
type TextOrTexts = Annotated[
    Annotated[str, described_as("a string or a list of texts"), Tag(ONE)] | Annotated[ItemTexts, Tag(EACH)], one_or_each
]


NEEDED = {
    "message": "role content",
    "function_call": "call_id name arguments",
    "function_call_output": "call_id output",
    "reasoning": "",
}
ALLOWED = {
    "message": "id status",
    "function_call": "id status parsed_arguments async async_",
    "function_call_output": "id status name",
    "reasoning": "id status content summary",
}
"""Fields of items, by type: those that an item must have, and others that it may have."""


@neutral(each("phase namespace caller encrypted_content") | each("async async_", False))  # openai-python says both
class InputItem(KindedModel):
    """A message, a call of an earlier answer, its result, or the thinking of an earlier answer."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    needed, allowed = NEEDED, ALLOWED
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: TextOrTexts | None = None
    """Of thinking: a list of reasoning_text."""
    call_id: str | None = None
    name: ToolName | None = None
    arguments: str | None = None
    """The text of a JSON object; empty: no arguments."""
    parsed_arguments: Any = None
    """Sent by openai-python: the arguments as its helpers parsed them. Without effect."""
    output: TextOrTexts | None = None
    summary: ItemTexts | None = None
    """Stands for the thinking if there is no content."""
    id: str | None = None
    status: str | None = None
    """Without effect, as the id: nothing is stored."""

    @model_validator(mode="after")
    def check_texts(self) -> Self:
        """A thinking item holds no message, and a message item holds no thinking."""
        expected = ("reasoning_text", "summary_text") if self.type == "reasoning" else ("input_text", "output_text")
        for name, given in (("content", self.content), ("output", self.output), ("summary", self.summary)):
            for text in given if isinstance(given, list) else ():
                if text.type not in expected:
                    said = f"of the type {self.type} takes {' or '.join(expected)} in {name}, not {text.type}"
                    raise PydanticCustomError("text", said)
        return self


type Items = Annotated[list[InputItem], Field(min_length=1), FailFast()]
type Input = Annotated[
    Annotated[str, described_as("a string or a list of items"), Tag(ONE)] | Annotated[Items, Tag(EACH)], one_or_each
]


class Turn:
    """An assistant's turn: thinking, then texts and calls, each of which may be missing."""

    def __init__(self) -> None:
        self._newest = ""
        self._thinking: list[str] = []
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []

    def fits(self, item: InputItem) -> bool:
        """Whether the item can be a part of it: an answer thinks first, and two messages in a row are two answers."""
        if item.type == "message":
            return self._newest != "message"
        return item.type == "function_call" or self._newest in ("", "reasoning")

    def add(self, item: InputItem, param: str) -> None:
        """Raises ApiError for arguments that are no JSON object, and for too many calls."""
        self._newest = item.type
        if item.type == "reasoning":
            self._thinking.append(text_of(item.content or item.summary or ""))
        elif item.type == "message":
            self._texts.append(text_of(item.content))
        else:
            json_object(item.arguments or "", f"{param}.arguments")
            if len(self._calls) == MAX_TOOLS:
                raise wrong(param, f"is the call number {MAX_TOOLS + 1} of a turn; at most {MAX_TOOLS} fit")
            function = FunctionCall(name=item.name or "", arguments=item.arguments or "")
            self._calls.append(ToolCall(id=item.call_id, function=function))

    def messages(self) -> Iterator[Message]:
        """The message, if there is anything in it."""
        if self._newest:
            thinking = "\n".join(self._thinking) or None
            content = None if self._calls and not self._texts else "\n".join(self._texts)
            yield Message(role="assistant", tool_calls=self._calls or None, content=content, reasoning_content=thinking)


def messages_of(given: str | Sequence[InputItem], instructions: str | None) -> list[Message]:
    """The chat: the instructions as a system message, then the input, with an assistant's items joined as one answer has them.
    Raises ApiError, naming the item at fault."""
    found = [] if instructions is None else [Message(role="system", content=instructions)]
    if isinstance(given, str):
        return [*found, Message(role="user", content=given)]
    turn = Turn()
    for index, item in enumerate(given):
        is_answer = item.role == "assistant" or item.type in ("function_call", "reasoning")
        if not (is_answer and turn.fits(item)):
            found += turn.messages()
            turn = Turn()
        if is_answer:
            turn.add(item, f"input.{index}")
        elif item.type == "function_call_output":
            found.append(Message(role="tool", content=text_of(item.output), tool_call_id=item.call_id, name=item.name))
        elif item.role is not None:
            found.append(Message(role=item.role, content=text_of(item.content)))
    return [*found, *turn.messages()]
