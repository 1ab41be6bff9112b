"""The messages of a conversation in OpenAI's form, tool calls and their results included, and what chat templates get of them."""

import json
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from jaxspec.server.errors import wrong
from jaxspec.server.fields import RequestModel, described_as
from jaxspec.server.neutral_fields import each, neutral

MAX_TOOLS = 128
"""As in OpenAI's API; also the most calls in one message."""

type ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.\-]{1,128}$")]


class TextPart(RequestModel):
    """A part of a message; images and audio are not supported."""

    type: Literal["text"]
    text: str


type TextParts = Annotated[list[TextPart], FailFast()]


class FunctionCall(RequestModel):
    """What an earlier answer called."""

    name: ToolName
    arguments: str
    """A JSON object; empty: no arguments."""
    parsed_arguments: Any = None
    """Sent by openai-python: the arguments as its helpers parsed them. Without effect."""


class ToolCall(RequestModel):
    """A call of an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None
    """Its number in a stream. Without effect."""


type ToolCalls = Annotated[list[ToolCall], Field(max_length=MAX_TOOLS), FailFast()]


# openai-python sends these fields when a reply becomes part of the next request.
@neutral(each("refusal audio function_call") | each("annotations", []))
class Message(RequestModel):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: ToolCalls | None = None
    """Of an assistant."""
    content: Annotated[str | TextParts | None, described_as('a string or a list of {"type": "text", "text": ...} parts')] = Field(
        default=None, validate_default=True
    )
    """An assistant with tool_calls may leave it out."""
    name: str | None = None
    tool_call_id: str | None = None
    """Of a tool: the call that this is the result of."""
    reasoning_content: str | None = None
    """Of an assistant: its thinking, for templates that read it."""
    parsed: Any = None
    """Sent by openai-python: the content as its helpers parsed it. Without effect."""

    @field_validator("tool_calls")
    @classmethod
    def check_role(cls, value: Any, info: ValidationInfo) -> Any:
        """Only an assistant calls."""
        if value and info.data.get("role") != "assistant":
            raise PydanticCustomError("role", "Input should be in a message of the role assistant")
        return value

    @field_validator("content")
    @classmethod
    def check_content(cls, value: Any, info: ValidationInfo) -> Any:
        """Content may be missing only if there are calls."""
        if value is None and not info.data.get("tool_calls", True):  # not in info.data if invalid themselves
            raise PydanticCustomError("missing", "Input should be a string or a list of text parts")
        return value

    @property
    def text(self) -> str:
        """The content as one string."""
        return text_of(self.content)

    def for_template(self, param: str) -> dict[str, Any]:
        """The message as chat templates expect it. `param`: its name. Raises ApiError for arguments that are no JSON object."""
        message: dict[str, Any] = {"role": self.role, "content": self.text}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            where = f"{param}.tool_calls"
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": json_object(call.function.arguments, f"{where}.{index}.function.arguments"),
                    },
                }
                for index, call in enumerate(self.tool_calls)
            ]
        return message


type Messages = Annotated[list[Message], Field(min_length=1), FailFast()]


def text_of(given: str | list[Any] | None) -> str:
    """A text, or the texts of its parts joined by line breaks; "" for None."""
    if given is None or isinstance(given, str):
        return given or ""
    return "\n".join(part.text for part in given)


def json_object(text: str, param: str) -> dict[str, Any]:
    """A call's arguments as an object, which templates write as JSON themselves. Empty text is an empty object. Raises ApiError for
    anything else that is not a JSON object."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise wrong(param, "must be the text of a JSON object")
    return found
