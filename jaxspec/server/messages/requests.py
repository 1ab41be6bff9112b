"""The requests of Anthropic's Messages API, and their translation to a chat completion."""

from typing import Annotated, Any, Literal

from pydantic import FailFast, Field

from jaxspec.server.conversations import MAX_TOOLS, Message, ToolName
from jaxspec.server.errors import ApiError, restated, wrong
from jaxspec.server.fields import RequestModel, RequestName, Schema, Strings, TemplateOptions, TokenCount, adding
from jaxspec.server.messages.input import AnthropicMessages, CacheControl, TextOrBlocks, content_of
from jaxspec.server.model import ServedModel
from jaxspec.server.neutral_fields import MESSAGES, each, neutral
from jaxspec.server.openai.requests import THINKING, ChatRequest, chat_prompt, thinking_options
from jaxspec.server.sampling_fields import OPENAI_NAMES, fields_of
from jaxspec.server.speculation import SharedFields
from jaxspec.server.structured import JsonSchemaFormat, ResponseFormat
from jaxspec.server.tools import Function, FunctionName, NamedTool, Tool

CLIENT_NAMES = {
    "messages": "messages",  # without an index: the chat has other messages, such as the system's
    "stop": "stop_sequences",
    "continue_final_message": "messages",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
}
"""The chat's names of fields, and Anthropic's where they differ."""
SAMPLING = ("top_p", "top_k", "min_p", "seed", "repetition_penalty", "min_tokens")
"""Parameters of SamplingParams that requests have by the same name: Anthropic's two, and others that a chat takes too."""


@neutral(each("type", "custom") | each("input_examples", []) | each("defer_loading", False) | each("allowed_callers", ["direct"]))
class ToolKind(RequestModel):
    """Tools that run at the server, such as web_search_20250305, are not supported."""


class AnthropicTool(ToolKind):
    """A tool that runs at the client."""

    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    """The JSON schema of its arguments."""
    strict: bool | None = None
    """The arguments fit the schema in any case, also with tool_choice "auto"."""
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    """Accepted without effect: arguments are streamed as they come."""


class AnthropicToolChoice(RequestModel):
    """Which calls the answer may hold."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    """With type tool."""
    disable_parallel_tool_use: bool | None = None
    """True: the answer has one call at most."""


@neutral(each("display", "summarized") | each("block_binding", {}))
class ThinkingOptions(RequestModel):
    """Whether the model thinks. Its thinking comes as it is, not as a summary."""

    type: Literal["enabled", "disabled", "adaptive"]
    """disabled: it does not, if its chat template can turn it off. adaptive: as the model does without this."""
    budget_tokens: TokenCount | None = None
    """With type enabled. Accepted without effect: thinking is bounded by max_tokens alone."""


class OutputFormat(RequestModel):
    """What the text must follow."""

    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


@neutral(each("effort", "high") | each("task_budget"))
class OutputOptions(RequestModel):
    """How the answer shall be."""

    format: OutputFormat | None = None


class UserData(RequestModel):
    """Accepted without effect: it identifies the client."""

    user_id: str | None = None


type AnthropicTools = Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS), FailFast()]


@neutral(MESSAGES)
class CountTokensRequest(RequestModel):
    """POST /v1/messages/count_tokens."""

    model: str | None = None
    """None: the served model."""
    messages: AnthropicMessages
    """If the last one is an assistant's, the answer continues it."""
    system: TextOrBlocks | None = None
    tools: AnthropicTools | None = None
    tool_choice: AnthropicToolChoice | None = None
    """None: auto, if there are tools."""
    thinking: ThinkingOptions | None = None
    output_config: OutputOptions | None = None
    cache_control: CacheControl | None = None
    chat_template_kwargs: TemplateOptions | None = None
    """Our own: variables that the model's own template reads."""


@adding(fields_of({name: OPENAI_NAMES[name] for name in SAMPLING}))
class MessagesRequest(SharedFields, CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: TokenCount
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    """0 is greedy. None: the model's own, else 1.0."""
    stop_sequences: Strings | None = None
    metadata: UserData | None = None
    request_id: RequestName | None = None
    """vLLM's: the request's name for /abort_request. None: its x-request-id."""
    thread: Any = None
    """A conversation that the server keeps: there are none, and the refusal makes clients send all messages."""


def as_chat(body: CountTokensRequest, model: ServedModel) -> ChatRequest:
    """The same request as a chat completion. Raises ApiError, naming the field at fault."""
    own: dict[str, Any] = {}
    if isinstance(body, MessagesRequest):
        if body.thread is not None:  # this code tells anthropic's tool_runner to go on without it
            said = "thread is not supported, as no conversation is kept here: leave it out, and send all messages"
            raise ApiError(400, said, param="thread", code="thread_unsupported_request")
        names = ("max_tokens", "temperature", "request_id", *SharedFields.model_fields, *SAMPLING)
        own = {name: getattr(body, name) for name in names} | {"stop": body.stop_sequences}
    last = body.messages[-1]
    messages = [] if not body.system else [Message(role="system", content=content_of(body.system))]
    for index, message in enumerate(body.messages):
        if message.content == [] and (message is not last or message.role != "assistant"):
            raise wrong(f"messages.{index}.content", "must hold a block: only an assistant's last message may be empty")
        messages += message.messages(f"messages.{index}")
    continues = last.role == "assistant"
    if continues and messages[-1].tool_calls:
        raise wrong("messages:", "the last one calls tools: send their results after it")
    choice, asked = body.tool_choice, None if body.output_config is None else body.output_config.format
    schema = None if asked is None else JsonSchemaFormat.model_construct(schema=asked.schema_)
    return ChatRequest.model_construct(  # from fields that were checked already
        model=body.model,
        messages=messages,
        continue_final_message=continues or None,
        tools=None if body.tools is None else [_tool(tool) for tool in body.tools],
        tool_choice=chosen(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        response_format=None if schema is None else ResponseFormat(type="json_schema", json_schema=schema),
        chat_template_kwargs=template_options(body, model) or None,
        **own,
    )


def _tool(tool: AnthropicTool) -> Tool:
    function = Function(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict)
    return Tool(type="function", function=function)


def chosen(choice: AnthropicToolChoice | None) -> str | NamedTool | None:
    """The same as a chat has it. Raises ApiError for a name that is missing or has no effect."""
    if choice is None:
        return None
    if (choice.type == "tool") != (choice.name is not None):
        raise wrong("tool_choice.name", "is needed with the type tool, and with no other")
    if choice.name is not None:
        return NamedTool(type="function", function=FunctionName(name=choice.name))
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def template_options(body: CountTokensRequest, model: ServedModel) -> dict[str, Any]:
    """The template's variables: the client's own, and those for an answer with or without thinking. Raises ApiError."""
    given, asked = body.chat_template_kwargs or {}, body.thinking
    if asked is None or asked.type == "adaptive":
        return dict(given)
    if THINKING in given:
        raise wrong("chat_template_kwargs", f"can't set {THINKING} together with thinking")
    return {**given, **thinking_options(asked.type == "enabled", model, "thinking")}


def count_tokens(body: CountTokensRequest, model: ServedModel) -> int:
    """Tokens of the prompt. Raises ApiError, naming the field at fault. Slow for long texts."""
    model.check_name(body.model)
    chat = as_chat(body, model)
    try:
        return len(chat_prompt(chat, model)[2])
    except ApiError as error:
        raise restated(error, CLIENT_NAMES) from None
