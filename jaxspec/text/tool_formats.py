"""The formats of tool calls, by SGLang's and vLLM's names: how each is read, what constrained calls look like, and how tools
reach a model whose chat template has no place for them."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jaxspec.text.tool_parsers import (
    END_TAG,
    PYTHON_TAG,
    TAG,
    Schema,
    ToolParser,
    Tools,
    is_text,
    read_llama3,
    read_pythonic,
    read_tagged,
    values_of,
)

type Structure = dict[str, Any]
"""A format of structural tags (grammar/compiling.py), as the value of `format`."""

ANY_TEXT: Structure = {"type": "any_text"}


class Structures(Protocol):
    """What answers with calls look like."""

    def calls(self, tools: Tools, *, only_one: bool) -> Structure:
        """Calls and nothing else, one or more."""

    def within_text(self, tools: Tools, *, only_one: bool) -> Structure:
        """Any text, and calls wherever one begins."""


class ToolFormat(NamedTuple):
    """One way to write tool calls."""

    read: ToolParser
    structures: Structures
    tags: tuple[str, ...]
    """Strings that must be in the text, even where they are special tokens."""
    instructions: str | None = None
    """For chat templates that don't write the tools: a text for the system message, with {tools}. None: such templates can't be
    used."""

    def message_with(self, calls: Sequence[tuple[str, Any]]) -> str:
        """The calls of an earlier turn, names and arguments, as that model would write them: with `instructions` only."""
        written = [{"name": name, "arguments": arguments} for name, arguments in calls]
        return f"{TAG}{json.dumps(written, ensure_ascii=False)}{END_TAG}"


class JsonCalls:
    """{"name": ..., "arguments": ...} for each call, tags around it or around all."""

    def __init__(self, begin: str, end: str, separator: str, key: str = "arguments", around: tuple[str, str] | None = None):
        self._begin, self._end, self._separator, self._key, self._around = begin, end, separator, key, around

    def calls(self, tools: Tools, *, only_one: bool) -> Structure:
        listed = one_or_more(self._tags(tools), self._separator, only_one=only_one)
        return listed if self._around is None else tag(self._around[0], listed, self._around[1])

    def within_text(self, tools: Tools, *, only_one: bool) -> Structure:
        tags = self._tags(tools) if self._around is None else [self.calls(tools, only_one=only_one)]
        return {"type": "triggered_tags", "triggers": [TAG], "tags": tags, "stop_after_first": only_one}

    def _tags(self, tools: Tools) -> list[Structure]:
        return [
            tag(
                f'{self._begin}{{"name": {json.dumps(name)}, "{self._key}": ',
                {"type": "json_schema", "json_schema": dict(schema)},
                "}" + self._end,
            )
            for name, schema in tools.items()
        ]


class AtStart(ABC):
    """Calls that are recognised at the beginning of an answer only."""

    def __init__(self, opening: str):
        self._opening = opening

    @abstractmethod
    def calls(self, tools: Tools, *, only_one: bool) -> Structure:
        """As in Structures."""

    def within_text(self, tools: Tools, *, only_one: bool) -> Structure:
        other = rf"\s*([^\s{re.escape(self._opening)}](.|\n)*)?"
        return either(self.calls(tools, only_one=only_one), {"type": "regex", "pattern": other})


class Llama3Calls(AtStart):
    """{"name": ..., "parameters": ...}, with semicolons between several."""

    def calls(self, tools: Tools, *, only_one: bool) -> Structure:
        return JsonCalls("", "", "; ", "parameters").calls(tools, only_one=only_one)


class PythonicCalls(AtStart):
    """[f(a=1), g(b="x")]. Values are written as in JSON, required arguments first."""

    def calls(self, tools: Tools, *, only_one: bool) -> Structure:
        tags = [tag(f"{name}(", self._arguments(schema), ")") for name, schema in tools.items()]
        return tag("[", one_or_more(tags, ", ", only_one=only_one), "]")

    def _arguments(self, schema: Schema) -> Structure:
        given = arguments_of(schema)
        written = [tag(f"{name}=", {"type": "json_schema", "json_schema": part}, "") for name, part, _ in given]
        required = [each for each, (_, _, needed) in zip(written, given, strict=True) if needed]
        others = [each for each, (_, _, needed) in zip(written, given, strict=True) if not needed]
        more = [optional(sequence(const(", "), each)) for each in others]
        if required:
            listed = [part for each in required for part in (const(", "), each)][1:]
            return sequence(*listed, *more)
        firsts = [sequence(each, *more[index + 1 :]) for index, each in enumerate(others)]
        return either(const(""), *firsts)


class XmlCalls:
    """<function=NAME> with <parameter=NAME>value</parameter> for each argument, in <tool_call>. Strings have no quotes; of their
    schemas only enum and const are followed."""

    def __init__(self, line_break: str):
        self._line_break = line_break
        """Around values."""

    def calls(self, tools: Tools, *, only_one: bool) -> Structure:
        return one_or_more(self._tags(tools), "\n", only_one=only_one)

    def within_text(self, tools: Tools, *, only_one: bool) -> Structure:
        return {"type": "triggered_tags", "triggers": [TAG], "tags": self._tags(tools), "stop_after_first": only_one}

    def _tags(self, tools: Tools) -> list[Structure]:
        return [
            tag(f"{TAG}\n<function={name}>\n", sequence(*map(self._argument, arguments_of(schema))), f"</function>\n{END_TAG}")
            for name, schema in tools.items()
        ]

    def _argument(self, given: tuple[str, Schema, bool]) -> Structure:
        name, schema, needed = given
        begin, end = f"<parameter={name}>{self._line_break}", f"{self._line_break}</parameter>\n"
        value: Structure = {"type": "json_schema", "json_schema": schema}
        if is_text(schema):
            listed = values_of(schema)
            value = ANY_TEXT if listed is None else either(*map(const, listed))
        return tag(begin, value, end) if needed else optional(tag(begin, value, end))


def arguments_of(schema: Schema) -> list[tuple[str, dict[str, Any], bool]]:
    """The name of each argument, its schema with the definitions of the whole, and whether it is required."""
    properties = schema.get("properties") or {}
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    required = schema.get("required") or ()
    parts = {name: part if isinstance(part, Mapping) else {} for name, part in properties.items()}
    return [(name, {**definitions, **part}, name in required) for name, part in parts.items()]


def const(text: str) -> Structure:
    """This text."""
    return {"type": "const_string", "value": text}


def sequence(*parts: Structure) -> Structure:
    """One after another."""
    return {"type": "sequence", "elements": list(parts) or [const("")]}


def either(*parts: Structure) -> Structure:
    """One of them."""
    return {"type": "or", "elements": list(parts)}


def optional(part: Structure) -> Structure:
    """It or nothing."""
    return either(const(""), part)


def tag(begin: str, content: Structure, end: str) -> Structure:
    """It between two strings."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def one_or_more(tags: list[Structure], separator: str, *, only_one: bool) -> Structure:
    """Some of these tags."""
    return {
        "type": "tags_with_separator", "tags": tags, "separator": separator, "at_least_one": True, "stop_after_first": only_one
    }  # fmt: skip


HERMES = ToolFormat(read_tagged, JsonCalls(f"{TAG}\n", f"\n{END_TAG}", "\n"), (TAG, END_TAG))
LLAMA3 = ToolFormat(read_llama3, Llama3Calls("{"), (PYTHON_TAG,))
PYTHONIC = ToolFormat(read_pythonic, PythonicCalls("["), (PYTHON_TAG,))
QWEN3_CODER = ToolFormat(read_tagged, XmlCalls("\n"), (TAG, END_TAG))
MIMO = ToolFormat(read_tagged, XmlCalls(""), (TAG, END_TAG))
SMOLLM2 = ToolFormat(
    read_tagged,
    JsonCalls("", "", ", ", around=(f"{TAG}[", f"]{END_TAG}")),
    (TAG, END_TAG),
    """You are an expert in composing functions. You are given a question and a set of possible functions.
Based on the question, you will need to make one or more function/tool calls to achieve the purpose.
If none of the functions can be used, point it out and refuse to answer.
If the given question lacks the parameters required by the function, also point it out.

You have access to the following tools:
<tools>{tools}</tools>

The output MUST strictly adhere to the following format, and NO other text MUST be included.
The example format is as follows. Please make sure the parameter type is correct. If no function call is needed, please make the \
tool calls an empty list '[]'.
<tool_call>[
{"name": "func_name1", "arguments": {"argument1": "value1", "argument2": "value2"}},
... (more tool calls as required)
]</tool_call>""",
)
"""The prompt is that of SmolLM2's model card."""

TOOL_FORMATS = {
    "hermes": HERMES,
    "qwen25": HERMES,
    "qwen": HERMES,
    "qwen3": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "mimo": MIMO,
    "llama3": LLAMA3,
    "llama3_json": LLAMA3,
    "pythonic": PYTHONIC,
    "smollm2": SMOLLM2,
}
"""By SGLang's names and vLLM's. `smollm2` is our own: neither has one."""


def format_name_in(template: str) -> str | None:
    """The format that a chat template tells its model to use, by name; None: it does not say."""
    for name, words in _WORDS.items():
        if all(word in template for word in words):
            return name
    return None


_WORDS = {
    "qwen3_coder": ("<function=", "<parameter="),
    "hermes": (TAG,),
    "smollm2": ("named SmolLM",),
    "llama3": ('"parameters": dictionary of argument name and its value',),
    "pythonic": ("[func_name1(",),
}
"""What is in the chat templates of models that use a format; the first that fits counts."""


def takes_tools(template: str) -> bool:
    """Whether the chat template writes the tools of a request."""
    return re.search(r"\btools\b", template) is not None
