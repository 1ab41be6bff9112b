"""The tool calls in an answer, in the ways that models write them. What is no call of one of the tools is content."""

import ast
import contextlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import unquote

from jaxspec.text.answer_reader import AnswerReader, Arguments, CallStart, Content, Event, MalformedCall, Reading, Unfinished

TAG, END_TAG, END_VALUE = "<tool_call>", "</tool_call>", "</parameter>"
PYTHON_TAG = "<|python_tag|>"
_ARGUMENTS = ("arguments", "parameters")
"""Members of a call in JSON."""
_DEFINITION = re.compile(r"#/(\$defs|definitions)/[^/]+")
MAX_REFERENCES = 16
"""The most steps from one definition to the next, and from a schema to one inside it."""
_STRING = re.compile(r"""'[^'\\]*(?:\\.[^'\\]*)*'?|"[^"\\]*(?:\\.[^"\\]*)*"?""", re.DOTALL)
_RAW = re.compile(r"\\.|[\x00-\x1f]", re.DOTALL)
type Types = frozenset[str]
TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_FIRST = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
_CLASSES = {dict: {"object"}, list: {"array"}, str: {"string"}, bool: {"boolean"}, type(None): {"null"}}
_NUMBERS = {"number", "integer"}
"""The types of JSON by its first character, and by the class of the value; all else are numbers."""
_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a pair, which UTF-8 can't encode."""

type Schema = Mapping[str, Any]
type Tools = Mapping[str, Schema]
"""The JSON schema of each tool's arguments, by the tool's name."""
type ToolParser = Callable[[AnswerReader, Tools], Reading[None]]
"""Reads an answer to its end."""


class Calls:
    """The calls of an answer so far."""

    def __init__(self, reader: AnswerReader, tools: Tools):
        self._reader, self._tools, self._count = reader, tools, 0
        self._types: dict[tuple[str, str], Types] = {}
        self._space: str | None = None
        """What separates the next content from the last one. None: there was none."""

    def check(self, name: str | None) -> str:
        """Raises MalformedCall if there is no such tool."""
        if name is None or name not in self._tools:
            raise MalformedCall
        return name

    def start(self, name: str) -> CallStart:
        """The next call. From here on it can't become content."""
        self._count += 1
        before = self._reader.text[self._reader.mark : self._reader.at]
        self._separate(before[: len(before) - len(before.lstrip())])
        self.end()
        return CallStart(self._count - 1, name)

    def arguments(self, text: str) -> Arguments:
        """A piece of the newest call's arguments."""
        return Arguments(self._count - 1, text)

    def end(self) -> None:
        """The call has ended, in order or not."""
        self._reader.mark = self._reader.at

    def done(self, word: str) -> Reading[None]:
        """Marks that all calls here have ended and the white space after them was read. Raises Unfinished if the text ends within
        `word`, with which further calls begin."""
        text = self._reader.text[self._reader.mark : self._reader.at]
        self._separate(text[len(text.rstrip()) :])
        self.end()
        if (yield from self._reader.take(word)):
            self._reader.at -= len(word)
        elif (rest := self._reader.text[self._reader.at :]) and word.startswith(rest):
            raise Unfinished

    def content(self, text: str) -> Content:
        """A piece of the text around calls, after the white space that surrounded the calls before it."""
        space, self._space = self._space or "", ""
        return Content(space + text)

    def given_back(self, error: MalformedCall) -> list[Event]:
        """What was read since the last event, as content. White space around calls does not count as content, nor does the rest of
        a call that was cut off."""
        reader = self._reader
        if isinstance(error, Unfinished) and self._count:
            reader.at = reader.mark = len(reader.text)
        text, reader.mark = reader.text[reader.mark : reader.at], reader.at
        if text.strip() or (text and not self._count):
            return [self.content(text)]
        self._separate(text)
        return []

    def _separate(self, space: str) -> None:
        if self._space is not None:
            self._space = space or self._space

    def properties(self, name: str) -> Schema:
        """The schemas of a tool's arguments, by name."""
        found = resolved(self._tools[name]).get("properties")
        return found if isinstance(found, Mapping) else {}

    def schema_of(self, name: str, argument: str) -> Schema:
        """The schema of one argument."""
        found = self.properties(name).get(argument)
        return found if isinstance(found, Mapping) else {}

    def types_of(self, name: str, argument: str) -> Types:
        """What one argument may be."""
        if (name, argument) not in self._types:
            self._types[name, argument] = types_of(self.schema_of(name, argument), self._tools[name], {})
        return self._types[name, argument]


def read_tagged(reader: AnswerReader, tools: Tools) -> Reading[None]:
    """<tool_call> and </tool_call> around a call in JSON (Hermes, Qwen), a list of them (SmolLM2), or <function=...> (MiMo)."""
    calls = Calls(reader, tools)
    while (yield from reader.until(TAG, calls.content)):
        try:
            yield from reader.spaces()
            if (yield from reader.peek()) == "<":
                yield from _read_xml_call(reader, calls)
            else:
                yield from _read_json_calls(reader, calls)
            yield from reader.spaces()
            yield from reader.expect(END_TAG)
            yield from reader.spaces()
            yield from calls.done(TAG)
        except MalformedCall as error:
            yield from calls.given_back(error)


def read_llama3(reader: AnswerReader, tools: Tools) -> Reading[None]:
    """Calls in JSON at the beginning of the answer, or after <|python_tag|>, with semicolons between them."""
    yield from _read_at_start(reader, Calls(reader, tools), "{", _read_json_calls)


def read_pythonic(reader: AnswerReader, tools: Tools) -> Reading[None]:
    """A list of Python calls at the beginning of the answer, or after <|python_tag|>: [f(a=1), g(b="x")]."""
    yield from _read_at_start(reader, Calls(reader, tools), "[", _read_python_calls)


def _read_at_start(
    reader: AnswerReader, calls: Calls, opening: str, read: Callable[[AnswerReader, Calls], Reading[None]]
) -> Reading[None]:
    while True:
        try:
            yield from reader.spaces()
            yield from reader.take(PYTHON_TAG)
            yield from reader.spaces()
            if (first := (yield from reader.peek())) != opening:
                raise MalformedCall if first else Unfinished
            while (yield from reader.peek()) == opening:
                yield from read(reader, calls)
                calls.end()
                yield from reader.spaces()
            yield from calls.done(PYTHON_TAG)
        except MalformedCall as error:
            yield from calls.given_back(error)
        if not (yield from reader.until(PYTHON_TAG, calls.content)):
            return
        reader.at -= len(PYTHON_TAG)


def _read_json_calls(reader: AnswerReader, calls: Calls) -> Reading[None]:
    """Calls in JSON, one or several, with [ , ; ] around and between them. Raises MalformedCall at what is none."""
    in_list = yield from reader.take("[")
    yield from reader.spaces()
    while not (in_list and (yield from reader.take("]"))):
        yield from _read_json_call(reader, calls)
        calls.end()
        yield from reader.spaces()
        if not (yield from reader.take(",")):
            yield from reader.take(";")
        yield from reader.spaces()
        if not in_list and (yield from reader.peek()) != "{":
            return


def _read_json_call(reader: AnswerReader, calls: Calls) -> Reading[None]:
    """{"name": ..., "arguments": {...}}, in any order. Raises MalformedCall, unless the call has begun."""
    name, arguments, has_begun = None, "{}", False
    try:
        yield from reader.expect("{")
        while True:
            yield from reader.spaces()
            key = yield from reader.string()
            yield from reader.spaces()
            yield from reader.expect(":")
            yield from reader.spaces()
            if key == "name" and name is None:
                name = calls.check((yield from reader.string()))
            elif key in _ARGUMENTS and not has_begun:
                if (first := (yield from reader.peek())) != "{":
                    raise MalformedCall if first else Unfinished
                if name is None:
                    arguments = yield from reader.braces(None)
                else:
                    has_begun = True
                    yield calls.start(name)
                    yield from reader.braces(calls.arguments)
            else:
                yield from reader.value()
            yield from reader.spaces()
            if not (yield from reader.take(",")):
                break
        yield from reader.expect("}")
        if not has_begun:
            yield calls.start(calls.check(name))
            yield calls.arguments(arguments)
    except MalformedCall as error:
        if not has_begun or isinstance(error, Unfinished):
            raise


def _read_python_calls(reader: AnswerReader, calls: Calls) -> Reading[None]:
    """[f(a=1), g(b="x")]. Raises MalformedCall at what is none."""
    yield from reader.expect("[")
    while True:
        yield from reader.spaces()
        name = yield from reader.word()
        yield from reader.expect("(")
        yield calls.start(calls.check(name))
        yield from _read_python_arguments(reader, calls, calls.properties(name))
        calls.end()
        yield from reader.spaces()
        has_more = yield from reader.take(",")
        yield from reader.spaces()
        if (yield from reader.take("]")):
            return
        if not has_more:
            yield from reader.expect("]")


def _read_python_arguments(reader: AnswerReader, calls: Calls, names: Iterable[str]) -> Reading[None]:
    """`names`: for values without a name, in order. Arguments end before a value without a name left for it, or a repeated name."""
    opening, taken = "{", set[str]()
    yield from reader.spaces()
    while not (yield from reader.take(")")):
        start, word = reader.at, (yield from reader.argument())
        has_name = not word.startswith(("[", "{")) and (yield from reader.take("=")) and (yield from reader.peek()) != "="
        if not has_name:
            reader.at = start
        name = word if has_name else next((each for each in names if each not in taken), None)
        source = yield from reader.python_value()
        if name is None or name in taken or (not has_name and (not source or source.startswith("*"))):
            reader.at = start
            break
        taken.add(name)
        yield calls.arguments(f"{opening}{json.dumps(name)}: {python_to_json(source)}")
        opening = ", "
        yield from reader.take(",")
        yield from reader.spaces()
    yield calls.arguments("}" if opening == ", " else "{}")


def python_to_json(source: str) -> str:
    """JSON as it is, or a Python literal as JSON; anything else, or what JSON can't express, as a string. Control characters in
    strings, which neither language allows, count as escaped."""
    escaped = _with_escapes(source)
    for text in (source, escaped):
        with contextlib.suppress(ValueError, RecursionError):
            json.loads(text, parse_int=str, parse_float=_check_finite, parse_constant=_check_finite)
            return text
    for text in (source, escaped):
        with contextlib.suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            value = ast.literal_eval(text)
            written = json.dumps(value, ensure_ascii=False, allow_nan=False)
            return json.dumps(value) if _SURROGATE.search(written) else written
    return json.dumps(source, ensure_ascii=False)


def _with_escapes(source: str) -> str:
    """With the control characters in its strings escaped."""
    return _STRING.sub(lambda string: _RAW.sub(_escape, string[0]), source)


def _escape(found: re.Match[str]) -> str:
    return found[0] if found[0].startswith("\\") else _escaped(found[0])


def _check_finite(number: str) -> None:
    if not math.isfinite(float(number)):
        raise ValueError


def _read_xml_call(reader: AnswerReader, calls: Calls) -> Reading[None]:
    """<function=NAME>, <parameter=NAME>value</parameter> for each argument, </function>. Raises MalformedCall before it begins."""
    yield from reader.expect("<function=")
    name = calls.check((yield from reader.name_until(">")))
    yield calls.start(name)
    opening, is_unfinished = "{", False
    yield from reader.spaces()
    try:
        while (yield from reader.take("<parameter=")):
            argument = yield from reader.name_until(">")
            yield calls.arguments(f"{opening}{json.dumps(argument, ensure_ascii=False)}: ")
            opening = ", "
            yield from _read_xml_value(reader, calls, name, argument)
            yield from reader.spaces()
        yield from reader.expect("</function>")
    except MalformedCall as error:
        rest = reader.text[reader.at :]
        is_unfinished = isinstance(error, Unfinished) or "<parameter=".startswith(rest)
    if is_unfinished:
        reader.at = len(reader.text)
    else:
        yield calls.arguments("}" if opening == ", " else "{}")
    calls.end()


def _read_xml_value(reader: AnswerReader, calls: Calls, name: str, argument: str) -> Reading[None]:
    """A value between tags, without one line break on each side. A string may lack its quotes where the schema leaves no doubt."""
    yield from reader.take("\n")
    if is_text(calls.schema_of(name, argument)):
        yield calls.arguments('"')
        if (yield from reader.until(END_VALUE, lambda piece: calls.arguments(_escaped(piece)), _without_line_break)):
            yield calls.arguments('"')
        return
    start = reader.at
    while (end := reader.text.find(END_VALUE, start)) < 0:
        if not (yield from reader.more()):
            raise Unfinished
    reader.at = end + len(END_VALUE)
    source, types = _without_line_break(reader.text[start:end]), calls.types_of(name, argument)
    written = python_to_json(source)
    kind = _FIRST.get(written.lstrip()[0]) or ("integer" if float(written).is_integer() else "number")
    is_read = kind in types and (kind != "string" or written in (source, _with_escapes(source)))  # as a string only if it is JSON's
    yield calls.arguments(written if is_read or "string" not in types else json.dumps(source, ensure_ascii=False))


def _escaped(text: str) -> str:
    """As it stands in a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _without_line_break(text: str) -> str:
    return text.removesuffix("\n")


def resolved(schema: Schema) -> Schema:
    """The schema, with a reference at its top to a definition replaced by that definition's members, repeatedly."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(ref := schema.get("$ref"), str) or not _DEFINITION.fullmatch(unquote(ref)):
            return schema
        if not isinstance(found := _pointed_at(schema, ref), Mapping):
            return schema
        schema = {**{name: value for name, value in schema.items() if name != "$ref"}, **found}
    return schema


def _pointed_at(schema: Schema, ref: str) -> Any:
    """What a reference within the schema means. None: there is nothing."""
    found: Any = schema
    for step in unquote(ref).split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def types_of(part: Any, whole: Schema, known: dict[str, Types], depth: int = MAX_REFERENCES) -> Types:
    """The JSON types that a part of the schema allows, perhaps with others. `known`: the types of references so far."""
    if not isinstance(part, Mapping) or not depth:
        return TYPES
    asked, listed = part.get("type"), values_of(part)
    found = TYPES.intersection(each for each in (asked if isinstance(asked, list) else [asked]) if isinstance(each, str)) or TYPES
    found |= _NUMBERS if "number" in found else set()
    if isinstance(listed, list):
        found &= {kind for each in listed for kind in _CLASSES.get(type(each), _NUMBERS)}
    if isinstance(ref := part.get("$ref"), str) and ref.startswith("#"):
        if ref not in known:
            known[ref] = TYPES  # as it may refer to itself
            known[ref] = types_of(_pointed_at(whole, ref), whole, known, depth - 1)
        found &= known[ref]
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := part.get(name), list) and parts:
            each = [types_of(inner, whole, known, depth - 1) for inner in parts]
            found &= frozenset.intersection(*each) if name == "allOf" else frozenset.union(*each)
    return found


def values_of(schema: Schema) -> Any:
    """The values that enum or const list. None: the schema has neither."""
    return schema.get("enum", [schema["const"]] if "const" in schema else None)


def is_text(schema: Schema) -> bool:
    """Whether all values that fit the schema are strings, which tags hold without quotes."""
    listed = values_of(schema)
    if isinstance(listed, list):
        return all(isinstance(each, str) for each in listed)
    return schema.get("type") == "string"
