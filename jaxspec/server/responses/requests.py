"""The requests of the Responses API, and their translation to a chat completion. Nothing is stored: what refers to an earlier
response is refused by name."""

from typing import Annotated, Any, Literal

from pydantic import FailFast, Field
from pydantic_core import to_json

from jaxspec.server.conversations import MAX_TOOLS, ToolName
from jaxspec.server.errors import wrong
from jaxspec.server.fields import LogprobCount, Only, RequestModel, TemplateOptions, TokenCount, described_as
from jaxspec.server.model import ServedModel
from jaxspec.server.neutral_fields import RESPONSES, each, neutral
from jaxspec.server.openai.requests import ChatRequest, OpenAIRequest, translated_batch
from jaxspec.server.responses.input import Input, messages_of
from jaxspec.server.running import RequestBatch
from jaxspec.server.structured import JsonSchemaFormat, ResponseFormat
from jaxspec.server.tools import Function, FunctionName, NamedTool, Tool
from jaxspec.text.answer_parser import Thinking

CLIENT_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
}
"""The chat's names of fields, and those of the Responses API where they differ."""
LOGPROBS = "message.output_text.logprobs"


class FunctionKind(RequestModel):
    """Tools that run at the server, such as web_search, are not supported."""

    type: Literal["function"]


@neutral(each("defer_loading async", False) | each("allowed_callers", ["direct"]) | each("output_schema"))
class FlatTool(Function, FunctionKind):
    """A tool that runs at the client."""


class FlatNamedTool(FunctionKind):
    """The tool that the answer must call."""

    name: ToolName


type FlatTools = Annotated[list[FlatTool], Field(max_length=MAX_TOOLS), FailFast()]
type FlatToolChoice = Annotated[
    Literal["none", "auto", "required"] | FlatNamedTool,
    described_as('"none", "auto", "required" or {"type": "function", "name": ...}'),
]


class TextFormat(JsonSchemaFormat):
    """What the text must follow; the schema with type json_schema."""

    type: Literal["text", "json_object", "json_schema"]


@neutral(each("verbosity", "medium"))
class TextOptions(RequestModel):
    """How the text shall be."""

    format: TextFormat | None = None


@neutral(each("summary generate_summary context", "auto") | each("mode", "standard"))
class ReasoningOptions(RequestModel):
    """How the model thinks. Its thinking comes as it is, not as a summary."""

    effort: Annotated[Any, Only("none")] = None
    """none: it does not, if its chat template can turn it off."""


class ResponsesStreamOptions(RequestModel):
    """Options of a stream."""

    include_obfuscation: bool | None = None
    """OpenAI's padding against traffic analysis. Accepted without effect: the API does not promise it."""


type Included = Annotated[
    list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]], Field(max_length=16), FailFast()
]


type MetadataKey = Annotated[str, Field(max_length=64)]
type MetadataValue = Annotated[str, Field(max_length=512)]


@neutral(RESPONSES)
class ResponsesRequest(OpenAIRequest):
    """POST /v1/responses."""

    input: Input
    """The conversation: a string, or all of its items, as nothing is stored."""
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: TokenCount | None = None
    """None: the rest of the context, or with log probabilities as many as fit into a response."""
    tools: FlatTools | None = None
    tool_choice: FlatToolChoice | None = None
    """None: auto, if there are tools."""
    parallel_tool_calls: bool | None = None
    """False: the answer has one call at most."""
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: TemplateOptions | None = None
    """Variables that the model's own template reads, such as Qwen3's {"enable_thinking": false}."""
    top_logprobs: LogprobCount | None = None
    """Log probabilities of every token and of this many of the most likely tokens, only for answers that are text alone."""
    include: Included | None = None
    """message.output_text.logprobs: the same as top_logprobs. reasoning.encrypted_content has no effect: an answer's thinking is
    readable, and can be sent back as it is."""
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    """Comes back, without effect."""
    store: bool | None = None
    """Accepted without effect: nothing is stored, and responses say so."""
    stream_options: ResponsesStreamOptions | None = None  # type: ignore[assignment]


SHARED = [name for name in OpenAIRequest.model_fields if name not in RESPONSES]
"""Fields that mean the same in a chat."""


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """The same request as a chat completion. Raises ApiError, naming the field at fault."""
    check_repeated(body)
    choice, asked = body.tool_choice, None if body.text is None else body.text.format
    if asked is not None and asked.type != "json_schema" and asked.schema_ is not None:
        raise wrong("text.format.schema", f"has no meaning with type {asked.type}: leave one out")
    return ChatRequest.model_construct(  # from fields that were checked already
        **{name: getattr(body, name) for name in SHARED},
        messages=messages_of(body.input, body.instructions),
        max_completion_tokens=body.max_output_tokens,
        tools=None if body.tools is None else [Tool(type="function", function=tool) for tool in body.tools],
        tool_choice=NamedTool(type="function", function=FunctionName(name=choice.name))
        if isinstance(choice, FlatNamedTool)
        else choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=None
        if asked is None
        else ResponseFormat(type=asked.type, json_schema=asked if asked.type == "json_schema" else None),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        chat_template_kwargs=body.chat_template_kwargs,
        logprobs=bool(body.top_logprobs) or LOGPROBS in (body.include or ()),
        top_logprobs=body.top_logprobs,
    )


def check_repeated(body: ResponsesRequest) -> None:
    """Raises ApiError for fields that the response repeats and no JSON of ours can hold."""
    repeated = ("instructions", "metadata", "user", "tools", "text")
    for name in repeated:
        try:
            to_json(getattr(body, name))
        except ValueError:
            said = "can't be repeated in the response: it is nested too deeply, or holds half of a surrogate pair"
            raise wrong(name, said) from None


def responses_batch(chat: ChatRequest, model: ServedModel) -> RequestBatch:
    """Token ids and sampling parameters. Raises ApiError, naming the field at fault."""
    batch = translated_batch(chat, model, CLIENT_NAMES)
    if chat.logprobs and (batch.answer.tool_parser is not None or batch.answer.thinking is not Thinking.NONE):
        said = "and include: an answer that may hold calls or thinking has no log probabilities here: leave them out"
        raise wrong("top_logprobs", said)
    return batch
