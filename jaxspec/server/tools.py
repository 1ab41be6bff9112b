"""Tools in chat requests: which calls an answer may hold, how the model learns of them, and the grammar that follows from them,
the request's own constraint and the model's thinking."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field

from jaxspec.grammar.compiling import format_of
from jaxspec.sampling_params import SamplingParams
from jaxspec.server.conversations import MAX_TOOLS, Message, ToolName
from jaxspec.server.errors import ApiError, refused, wrong
from jaxspec.server.fields import RequestModel, TemplateOptions, described_as
from jaxspec.server.model import ServedModel
from jaxspec.server.structured import Given
from jaxspec.text.answer_parser import ReasoningFormat, Thinking
from jaxspec.text.tool_formats import (
    ANY_TEXT,
    TOOL_FORMATS,
    Structure,
    ToolFormat,
    const,
    either,
    optional,
    sequence,
    tag,
    takes_tools,
)

SPACES: Structure = {"type": "regex", "pattern": r"\s{0,4}"}
"""Between the thinking and what comes after it."""

CONTINUES = "<|the answer continues here|> "
"""Put after the message that the answer continues, and cut off again. Templates that trim messages trim the space too."""


class Function(RequestModel):
    """What a tool is called, does and takes."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """The JSON schema of its arguments. None: it has none."""
    strict: bool | None = None
    """The arguments fit the schema in any case, also with tool_choice "auto"."""

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {**self.parameters, "type": "object"}  # calls have an object, whatever else the schema allows


class Tool(RequestModel):
    """OpenAI's only kind that runs at the client."""

    type: Literal["function"]
    function: Function


class FunctionName(RequestModel):
    name: ToolName


class NamedTool(RequestModel):
    """The tool that the answer must call."""

    type: Literal["function"]
    function: FunctionName


type Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS), FailFast()]
type ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool,
    described_as('"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'),
]


class ConversationFields(RequestModel):
    """What a request says about how its conversation becomes a prompt, besides the messages."""

    tools: Tools | None = None
    chat_template_kwargs: TemplateOptions | None = None
    """Variables that the model's own template reads, such as Qwen3's {"enable_thinking": false}."""
    add_generation_prompt: bool | None = None
    """False: the prompt ends with the last message."""
    continue_final_message: bool | None = None
    """The prompt ends within the last message, an assistant's, which the answer continues."""


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, in the model's format."""

    format: ToolFormat
    all: Sequence[Tool]
    """What the model learns of."""
    callable: Sequence[Function]
    must_call: bool
    """The answer consists of calls."""
    only_one: bool

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """By name."""
        return {function.name: function.schema_of_arguments for function in self.callable}

    @property
    def strict(self) -> list[str]:
        """The tools whose calls must fit their schemas, also where the model chooses to call."""
        return [each.name for each in self.callable if each.strict]

    def for_template(self) -> list[dict[str, Any]]:
        """The tools as chat templates expect them."""
        fields = {"name", "description", "parameters"}
        return [{"type": "function", "function": tool.function.model_dump(include=fields, exclude_none=True)} for tool in self.all]


def chosen_tools(
    tools: Sequence[Tool] | None, choice: str | NamedTool | None, parallel: bool | None, model: ServedModel
) -> ToolUse | None:  # fmt: skip
    """None: the answer can't call any. Raises ApiError, naming the field at fault."""
    named = choice.function.name if isinstance(choice, NamedTool) else None
    if not tools:
        if choice not in (None, "none", "auto"):
            raise wrong("tool_choice", "needs tools")
        return None
    if choice == "none":
        return None
    names = [tool.function.name for tool in tools]
    if named is not None and named not in names:
        raise wrong("tool_choice", f'names "{named}", which is none of the tools')
    if len(set(names)) < len(names):
        raise wrong("tools", "must have different names")
    functions = [tool.function for tool in tools if named in (None, tool.function.name)]
    only_one = named is not None or parallel is False
    problem, form = why_no_tools(model), model.tool_format
    if problem is not None or form is None:
        raise wrong("tools:", str(problem))
    return ToolUse(form, tools, functions, named is not None or choice == "required", only_one)


def why_no_tools(model: ServedModel) -> str | None:
    """Why the model can't call tools; None: it can."""
    form, template = model.tool_format, model.chat_template
    if template is None:
        return "this model has no chat template"
    if form is None:
        known = ", ".join(TOOL_FORMATS)
        return f"how this model writes calls is not known: start the server with --tool-call-parser, one of {known}"
    if form.instructions is None and not takes_tools(template.text):
        return "the model's chat template does not take tools: start the server with a --chat-template that does"
    return None


def conversation_text(
    messages: Sequence[Message], asked: ConversationFields, model: ServedModel, use: ToolUse | None
) -> str:  # fmt: skip
    """The conversation in the model's template, with the tools. Raises ApiError, naming the field at fault."""
    continues = bool(asked.continue_final_message)
    if continues and asked.add_generation_prompt:
        message = "add_generation_prompt and continue_final_message can't both be true"
        raise ApiError(400, message, param="continue_final_message")
    if continues and (messages[-1].role != "assistant" or messages[-1].tool_calls):
        raise wrong("continue_final_message", "needs a last message of the role assistant, without tool_calls")
    found = with_instructions([each.for_template(f"messages.{index}") for index, each in enumerate(messages)], use, model)
    if continues:
        found[-1] = {**found[-1], "content": found[-1]["content"] + CONTINUES}
    text = model.chat_text(
        found,
        asked.chat_template_kwargs,
        tools=None if use is None else use.for_template(),
        add_generation_prompt=asked.add_generation_prompt is not False and not continues,
    )
    if not continues:
        return text
    before, mark, behind = text.rpartition(CONTINUES.strip())
    if not mark:
        raise wrong("continue_final_message:", "the model's chat template leaves out the end of the last message")
    return before if behind.startswith(" ") else before.rstrip()


def with_instructions(messages: Sequence[Mapping[str, Any]], use: ToolUse | None, model: ServedModel) -> list[Mapping[str, Any]]:
    """For a chat template that has no place for tools: the messages with the tools in the system message and calls in the content.
    Else the messages as they are. Raises ApiError for calls that would be lost."""
    form, found = model.tool_format, list(messages)
    if model.chat_template is None:
        return found
    template = model.chat_template.without_tools if use is None else model.chat_template.text
    if takes_tools(template):
        return found
    for index, message in enumerate(found):
        if "tool_calls" in message and "tool_calls" not in template:
            if form is None or form.instructions is None:
                param = f"messages.{index}.tool_calls"
                raise wrong(f"{param}:", "the model's chat template does not write calls")
            calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            found[index] = {**rest, "content": message["content"] + form.message_with(calls)}
    if use is not None and use.format.instructions is not None:
        try:
            functions = json.dumps([each["function"] for each in use.for_template()], ensure_ascii=False)
        except RecursionError:
            raise wrong("tools:", "they are nested too deeply") from None
        told = use.format.instructions.replace("{tools}", functions)
        if found[0]["role"] in ("system", "developer"):
            found[0] = {**found[0], "content": f"{found[0]['content']}\n\n{told}"}
        else:
            found.insert(0, {"role": "system", "content": told})
    return found


def constraint_for(
    use: ToolUse | None, given: Given | None, reasoning: ReasoningFormat | None, thinking: Thinking
) -> Given | None:  # fmt: skip
    """What the whole answer must follow: its calls and its constraint, after the thinking. None: anything. Raises ApiError."""
    try:
        if use is not None and (use.must_call or given is not None):
            body, field = use.format.structures.calls(use.schemas, use.strict, only_one=use.only_one), "tools"
            if given is not None and not use.must_call:
                body, field = either(body, _structure_of(given)), given.field
        elif given is not None:
            if thinking is Thinking.NONE:
                return given
            body, field = _structure_of(given), given.field
        elif use is not None and use.strict:
            begin = reasoning.begin if reasoning is not None and thinking is Thinking.POSSIBLE else ""
            within_text, field = use.format.structures.within_text, "tools"
            body = within_text(use.schemas, use.strict, only_one=use.only_one, thinking=begin)
        else:
            return None
    except ValueError as error:
        raise wrong("tools:", str(error)) from None
    return Given(field, "structural_tag", {"format": _behind_thinking(body, reasoning, thinking)})


def _structure_of(given: Given) -> Structure:
    """A request's own constraint as a part of a larger one. Raises ApiError."""
    try:
        constraint = SamplingParams(**{given.name: given.value}).constraint
        assert constraint is not None
        kind, text = constraint
        if kind == "structural_tag":
            if not isinstance(form := format_of(json.loads(text)), dict):
                raise ValueError("structural_tag must have a format, an object")
            return form
    except ValueError as error:
        raise refused(error, {given.name: given.field}) from None
    if kind == "json_schema":
        return {"type": kind, "json_schema": json.loads(text)}
    if kind == "choice":
        return either(*map(const, json.loads(text)))
    return {"type": kind, {"regex": "pattern", "grammar": "grammar"}[kind]: text}


def _behind_thinking(body: Structure, reasoning: ReasoningFormat | None, thinking: Thinking) -> Structure:
    if reasoning is None or thinking is Thinking.NONE:
        return body
    if thinking is Thinking.OPEN:
        return sequence(tag("", ANY_TEXT, reasoning.end), SPACES, body)
    return sequence(optional(sequence(tag(reasoning.begin, ANY_TEXT, reasoning.end), SPACES)), body)
