"""The formats of tool calls, by SGLang's and vLLM's names: how each is read, what constrained calls look like, and how tools
reach a model whose chat template has no place for them."""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from jaxspec.sampling_params import MAX_GRAMMAR
from jaxspec.text.answer_reader import MAX_NAME
from jaxspec.text.tool_parsers import (
    END_TAG,
    END_VALUE,
    PYTHON_TAG,
    TAG,
    Schema,
    ToolParser,
    Tools,
    is_text,
    read_llama3,
    read_pythonic,
    read_tagged,
    resolved,
    values_of,
)

type Structure = dict[str, Any]
"""A format of structural tags (grammar/compiling.py), as the value of `format`."""

COMBINED = (
    "$ref", "allOf", "anyOf", "oneOf", "not", "if", "minProperties", "maxProperties", "propertyNames", "dependentRequired",
    "dependentSchemas", "dependencies",
)  # fmt: skip
"""What a schema can say about several arguments at once."""
WHOLE = "whole-schema"
"""A name among the definitions of an argument's schema."""
PYTHON_NAME, XML_NAME = re.compile(r"(?!\s)[^=,()\[\]{}\"'\n]*(?<!\s)"), re.compile(rf"[^>]{{0,{MAX_NAME - 1}}}")
"""Names of arguments that are read back as they are."""
ANY_TEXT: Structure = {"type": "any_text"}


class Structures(NamedTuple):
    """What answers with calls look like."""

    call: Callable[[str, Schema | None], Structure]
    """One call, from the tool's name and the schema of its arguments; None: any. Raises ValueError for what it can't write."""
    separator: str
    around: tuple[str, str] | None = None
    """What stands before the first call and after the last."""
    opening: str | None = None
    """The characters with which calls begin, if they count at the beginning of an answer only. None: calls begin at any TAG."""

    def calls(self, tools: Tools, strict: Collection[str], *, only_one: bool) -> Structure:
        """Calls and nothing else, one or more. Where the format can't write what fits a schema, the call may have any arguments,
        but those of `strict` tools raise ValueError."""
        return self._listed([self._call(name, schema, is_strict=name in strict) for name, schema in tools.items()], only_one)

    def _call(self, name: str, schema: Schema, *, is_strict: bool) -> Structure:
        try:
            return self.call(name, schema)
        except (ValueError, RecursionError) as error:
            if not is_strict:
                return self.call(name, None)
            said = error if isinstance(error, ValueError) else "are nested too deeply"
            raise ValueError(f"the parameters of {name} {said}") from None

    def _listed(self, tags: Sequence[Structure], only_one: bool) -> Structure:
        listed: Structure = {"type": "tags_with_separator", "tags": tags, "separator": self.separator}
        listed |= {"at_least_one": True, "stop_after_first": only_one}
        return listed if self.around is None else tag(self.around[0], listed, self.around[1])

    def within_text(self, tools: Tools, strict: Collection[str], *, only_one: bool, thinking: str = "") -> Structure:
        """Any text, and calls wherever one begins. Only calls of `strict` tools must fit the schemas; raises ValueError if the
        format can't ensure that. `thinking`: a tag that the text must not begin with, as more than text would follow it."""
        fixed = {name: self._call(name, tools[name], is_strict=True) for name in strict}
        calls = self._listed([fixed.get(name) or self.call(name, None) for name in tools], only_one)
        if self.opening is not None:
            begun = [(thinking[:size], thinking[size]) for size in range(1, len(thinking))]
            others = [rf"|{re.escape(word)}([^{re.escape(end)}](.|\n)*)?" for word, end in begun]
            first = re.escape(self.opening + thinking[:1])
            return either(calls, {"type": "regex", "pattern": rf"\s*(([^\s{first}](.|\n)*)?{''.join(others)})"})
        tags = calls["tags"] if self.around is None else [calls]
        return {"type": "triggered_tags", "triggers": [TAG], "tags": tags, "stop_after_first": only_one}


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


def json_call(begin: str, end: str, key: str, name: str, schema: Schema | None) -> Structure:
    """{"name": ..., `key`: ...} between two strings."""
    arguments = of_schema({"type": "object"} if schema is None else schema)
    return tag(f'{begin}{{"name": {json.dumps(name)}, "{key}": ', arguments, "}" + end)


def python_call(name: str, schema: Schema | None) -> Structure:
    """f(a=1). Values are written as in JSON, required arguments first."""
    if schema is None:
        any_argument = sequence({"type": "regex", "pattern": r"[^=,()\[\]{}\"'\n]+="}, of_schema({}))
        return tag(f"{name}(", {"type": "tags_with_separator", "tags": [any_argument], "separator": ", "}, ")")
    written = [(tag(f"{argument}=", of_schema(part), ""), needed) for argument, part, needed in arguments_of(schema, PYTHON_NAME)]
    required = [each for each, needed in written if needed]
    others = [each for each, needed in written if not needed]
    if required:
        listed = [part for each in required for part in (const(", "), each)][1:]
        arguments = sequence(*listed, *_more(others))
    else:
        arguments = either(const(""), *([_at_least_one(others)] if others else []))
    return tag(f"{name}(", arguments, ")")


def _more(arguments: Sequence[Structure]) -> list[Structure]:
    """Any of these arguments, each after another one."""
    return [optional(sequence(const(", "), each)) for each in arguments]


def _at_least_one(arguments: Sequence[Structure]) -> Structure:
    """Splits into halves, so that each of n arguments is written about log n times."""
    if len(arguments) == 1:
        return arguments[0]
    first, second = arguments[: len(arguments) // 2], arguments[len(arguments) // 2 :]
    return either(sequence(_at_least_one(first), *_more(second)), _at_least_one(second))


def xml_call(line_break: str, name: str, schema: Schema | None) -> Structure:
    """<function=NAME> with <parameter=NAME>value</parameter> for each argument, in <tool_call>. Strings have no quotes; in
    their schemas only enum and const count. `line_break`: around values."""
    opening, closing = f"{TAG}\n<function={name}>\n", f"</function>\n{END_TAG}"
    if schema is None:
        begin: Structure = {"type": "regex", "pattern": r"<parameter=[^<>\n]+>"}
        any_argument = sequence(begin, tag("", ANY_TEXT, END_VALUE), const("\n"))
        return tag(opening, {"type": "tags_with_separator", "tags": [any_argument], "separator": ""}, closing)
    arguments = []
    for argument, part, needed in arguments_of(schema, XML_NAME):
        value, end = of_schema(part), f"{line_break}{END_VALUE}"
        if is_text(part):
            listed = values_of(part)
            if any(END_VALUE in each for each in listed or ()):
                raise ValueError(f"have {END_VALUE} in a value of {argument!r:.60}, which this model's format of calls can't write")
            value = ANY_TEXT if listed is None else either(*(const(_kept(each, line_break)) for each in listed))
            end = END_VALUE if listed is None else end  # where the reader takes it to end
        written = sequence(tag(f"<parameter={argument}>{line_break}", value, end), const("\n"))
        arguments.append(written if needed else optional(written))
    return tag(opening, sequence(*arguments), closing)


def _kept(text: str, line_break: str) -> str:
    """The text, in line breaks if it would lose its own: the reader removes one on each side."""
    return text if line_break or text == text.strip("\n") else f"\n{text}\n"


def arguments_of(schema: Schema, readable: re.Pattern[str]) -> list[tuple[str, dict[str, Any], bool]]:
    """The name of each argument, its schema with all definitions, and whether it is required. Raises ValueError for what a format
    that writes arguments one by one can't follow, and for names that are not `readable`."""
    schema = resolved(schema)
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if found := [name for name in COMBINED if schema.get(name) not in (None, 0, [])]:
        raise ValueError(f"have {found[0]} at the top, which this model's format of calls can't follow")
    if not isinstance(properties, Mapping):
        raise ValueError("have properties that are no object")
    if not isinstance(required, list) or not all(isinstance(name, str) and name in properties for name in required):
        raise ValueError("have a list of required names that must be names of properties")
    if unread := [name for name in properties if not readable.fullmatch(name)]:
        raise ValueError(f"have the property {unread[0]!r:.80}, a name that this model's format of calls can't write")
    parts = {name: part if isinstance(part, Mapping) else {} for name, part in properties.items()}
    for name, part in parts.items():
        if not isinstance(values_of(part), list | None):
            raise ValueError(f"have an enum of {name!r:.60} that is not a list")
    whole = {**schema, "properties": parts}
    moved = _moved(whole)
    definitions = {name: moved.pop(name) for name in ("$defs", "definitions") if name in moved}
    if {**moved, **definitions} != whole and isinstance(named := definitions.get("$defs", {}), Mapping):
        definitions["$defs"] = {**named, WHOLE: moved}
    if len(parts) * len(json.dumps(definitions)) > MAX_GRAMMAR:
        raise ValueError("have more definitions than this model's format of calls can repeat for each argument")
    needed = set(required)
    return [(name, {**definitions, **part}, name in needed) for name, part in moved["properties"].items()]


def _moved(part: Any) -> Any:
    """A part of a schema whose references to the whole, except to its definitions, lead to the copy in an argument's own schema."""
    if isinstance(part, Mapping):
        if isinstance(ref := part.get("$ref"), str) and re.match(r"#(/(?!(\$|%24)defs/|definitions/)|\Z)", ref):
            part = {**part, "$ref": f"#/$defs/{WHOLE}{ref[1:]}"}
        return {name: _moved(value) for name, value in part.items()}
    return [_moved(each) for each in part] if isinstance(part, list) else part


def const(text: str) -> Structure:
    return {"type": "const_string", "value": text}


def sequence(*parts: Structure) -> Structure:
    return {"type": "sequence", "elements": list(parts) or [const("")]}


def either(*parts: Structure) -> Structure:
    return {"type": "or", "elements": list(parts)}


def optional(part: Structure) -> Structure:
    return either(const(""), part)


def tag(begin: str, content: Structure, end: str) -> Structure:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def of_schema(schema: Schema) -> Structure:
    """JSON that fits the schema."""
    return {"type": "json_schema", "json_schema": dict(schema)}


HERMES = ToolFormat(read_tagged, Structures(partial(json_call, f"{TAG}\n", f"\n{END_TAG}", "arguments"), "\n"), (TAG, END_TAG))
LLAMA3 = ToolFormat(read_llama3, Structures(partial(json_call, "", "", "parameters"), "; ", opening="{"), (PYTHON_TAG,))
PYTHONIC = ToolFormat(read_pythonic, Structures(python_call, ", ", ("[", "]"), opening="["), (PYTHON_TAG,))
QWEN3_CODER = ToolFormat(read_tagged, Structures(partial(xml_call, "\n"), "\n"), (TAG, END_TAG))
MIMO = ToolFormat(read_tagged, Structures(partial(xml_call, ""), "\n"), (TAG, END_TAG))
SMOLLM2 = ToolFormat(
    read_tagged,
    Structures(partial(json_call, "", "", "arguments"), ", ", (f"{TAG}[", f"]{END_TAG}")),
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
