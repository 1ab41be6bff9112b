"""Structural tags as grammars, and those of tool calls: what they allow is what the parsers read."""

import json
from typing import Any

import pytest

from jaxspec.grammar.compiling import compiled
from jaxspec.grammar.vocabulary import source_of
from jaxspec.testing import TinyTokenizer
from jaxspec.text.answer_parser import Answer, AnswerFormat, AnswerParser, Call
from jaxspec.text.tool_formats import TOOL_FORMATS

VOCABULARY = source_of(TinyTokenizer(), 128, (0,)).load()
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
JSON = {"type": "json_schema", "json_schema": SCHEMA}
TAGGED = {"type": "tag", "begin": "<f>", "content": JSON, "end": "</f>"}
THINK = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}


def fits(tag: dict[str, Any], text: str) -> bool:
    """Whether the whole text follows the structural tag."""
    matcher = compiled(VOCABULARY, "structural_tag", json.dumps(tag)).deep_copy()
    return all(matcher.consume_token(ord(character)) for character in text) and matcher.is_accepting()


OLD = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
Y = {"type": "grammar", "grammar": 'root ::= "y"'}
ONCE = {"type": "tags_with_separator", "tags": [TAGGED], "separator": ",", "at_least_one": True, "stop_after_first": True}
ANY, X = {"type": "any_text"}, {"type": "const_string", "value": "x"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f"], "tags": [{**TAGGED, "content": ANY}]}


def inside(*elements: dict[str, Any], kind: str = "sequence") -> dict[str, Any]:
    """A tag around the elements."""
    return {"format": {"type": "tag", "begin": "<a>", "content": {"type": kind, "elements": elements}, "end": "</a>"}}


NOT = {"type": "json_schema", "json_schema": {"properties": {"b": {"not": {}}}}}


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (OLD, ["", "x<f>{\"a\": 1}</f>y"], ["x<f y"]),
        ({"format": {"type": "const_string", "value": "a\n\"é"[:3]}}, ['a\n"'], ["", "a"]),
        ({"format": {"type": "const_string", "value": "a\x7f\x01"}}, ["a\x7f\x01"], ["a"]),
        ({"format": {"type": "any_text"}}, ["", "a\nb"], []),
        ({"format": {"type": "or", "elements": [JSON, {"type": "regex", "pattern": "[/x]+"}]}}, ['{"a": 1}', "/x"], ["", "a"]),
        ({"format": {"type": "sequence", "elements": [THINK, Y]}}, ["<think>x</think>y"], ["y"]),
        (
            {"format": {"type": "tags_with_separator", "tags": [TAGGED], "separator": ","}},
            ["", '<f>{"a": 1}</f>,<f>{"a": 2}</f>'],
            ["x", '<f>{"a": 1}</f>,'],
        ),
        ({"format": ONCE}, ['<f>{"a": 1}</f>'], ["", '<f>{"a": 1}</f>,<f>{"a": 2}</f>']),
        (
            {"format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [TAGGED], "at_least_one": True}},
            ['x<f>{"a": 1}</f>y'],
            ["x"],
        ),
        (
            {"format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [TAGGED], "stop_after_first": True}},
            ["x", 'x<f>{"a": 1}</f>'],
            ['<f>{"a": 1}</f>y'],
        ),
        (inside(X, ANY), ["<a>x</a>", "<a>xy<</a>"], ["<a>y</a>", "<a>x</a>y"]),
        (inside(X, ANY, kind="or"), ["<a>x</a>", "<a>y</a>"], ["<a>y</a>y"]),
        (inside(X, {**TAGGED, "content": ANY, "end": ""}), ["<a>x<f>y</a>"], ["<a>x</a>", "<a>x<f>y</a>y"]),
        (inside(X, TRIGGERED), ["<a>x</a>", "<a>xy<f>z</f>y</a>"], ["<a>x<f</a>", "<a>x</a>y"]),
        (inside({**TRIGGERED, "stop_after_first": True}), ["<a></a>", "<a>xy<f>z</f></a>"], ["<a>x<f>z</f>y</a>", "<a></a>y"]),
        (inside({"type": "regex", "pattern": "x.*(</a>)?"}), ["<a>x</a>", "<a>xy</b></a>"], ["<a></a>", "<a>x</a>y", "<a>x\n</a>"]),
        (inside(ONCE), ['<a><f>{"a": 1}</f></a>'], ['<a><f>{"a": 1}</f>y</a>']),
    ],
    ids=lambda value: json.dumps(value)[:40],
)  # fmt: skip
def test_formats(form: dict[str, Any], good: list[str], bad: list[str]):
    assert [fits(form, text) for text in good + bad] == [True] * len(good) + [False] * len(bad)


@pytest.mark.parametrize(
    ("tag", "said"),
    [
        ({}, "type must be one of any_text, .*at format"),
        ({"format": {"type": ["any_text"]}}, "type must be one of any_text, .*at format"),
        ({"format": {"type": "any_text", "excludes": []}}, "excludes is not supported"),
        ({"format": {"type": "or", "elements": [{"type": "tag"}]}}, "begin must be a string .at format.elements.0"),
        ({"structures": [{"begin": "<f", "schema": {}, "end": ""}], "triggers": ["g"]}, "no tag begins with the trigger 'g'"),
        ({"format": {**TAGGED, "content": NOT}}, "'<f>'.*#/properties/b"),
        (inside(ANY, X), "any_text must come last .*at format.'<a>'..content.elements.0"),
        ({"format": {"type": "sequence", "elements": [TRIGGERED, Y]}}, "triggered_tags must come last .*at format.elements.0"),
        (inside({**ONCE, "tags": [{**TAGGED, "content": ANY, "end": ""}]}), "any_text must come last"),
        ({"format": {"type": "grammar", "grammar": "start: x"}}, "format.grammar: .*unknown name"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_place(tag: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        compiled(VOCABULARY, "structural_tag", json.dumps(tag))


F = {
    "type": "object",
    "properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "k": {"enum": ["x", "y"]}},
    "required": ["s"],
    "additionalProperties": False,
}
G = {"type": "object", "properties": {"o": {"$ref": "#/$defs/o"}, "p": {}}, "$defs": {"o": {"type": "integer"}}}
CALLS = [Call("f", '{"s": "a", "k": "x"}'), Call("g", '{"o": 4}')]
TEXTS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"s": "a", "k": "x"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {"o": 4}}\n</tool_call>',
    "smollm2": '<tool_call>[{"name": "f", "arguments": {"s": "a", "k": "x"}}, {"name": "g", "arguments": {"o": 4}}]</tool_call>',
    "llama3": '{"name": "f", "parameters": {"s": "a", "k": "x"}}; {"name": "g", "parameters": {"o": 4}}',
    "pythonic": '[f(s="a", k="x"), g(o=4)]',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=s>\na\n</parameter>\n<parameter=k>\nx\n</parameter>\n</function>\n"
    "</tool_call>\n<tool_call>\n<function=g>\n<parameter=o>\n4\n</parameter>\n</function>\n</tool_call>",
    "mimo": "<tool_call>\n<function=f>\n<parameter=s>a</parameter>\n<parameter=k>x</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=g>\n<parameter=o>4</parameter>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_allowed_is_what_is_read(name: str):
    form, tools, text = TOOL_FORMATS[name], {"f": F, "g": G}, TEXTS[name]
    parser = AnswerParser(AnswerFormat(tool_parser=form.read, tools=tools))
    assert Answer.of(parser.add(text, is_last=True)) == Answer("", "", CALLS)
    calls, one = ({"format": form.structures.calls(tools, ["f"], only_one=only_one)} for only_one in (False, True))
    free, loose = ({"format": form.structures.within_text(tools, strict, only_one=False)} for strict in ("fg", "g"))
    assert fits(calls, text) and fits(free, text) and fits(free, "Hello.") and not fits(calls, "") and not fits(one, text)
    unknown, wrong = text.replace('"f"', '"h"').replace("f(", "h(").replace("=f", "=h"), text.replace("x", "z")
    missing = text.replace('"s": ', '"t": ').replace("s=", "t=").replace("=s", "=t")
    assert not any(fits(form, other) for form in (calls, free) for other in (unknown, wrong, missing))
    assert [fits(loose, other) for other in (text, wrong, missing, unknown, text.replace("4", "x"))] == [True] * 3 + [False] * 2


@pytest.mark.parametrize("name", ["llama3", "pythonic"])
def test_text_that_begins_with_the_tag_of_thinking_is_thinking(name: str):
    within = TOOL_FORMATS[name].structures.within_text({"f": F}, "f", only_one=False, thinking="<think>")
    texts = {"<think>a</think>[f()]": False, " <think>": False, "<thin": True, "": True, " x<think>": True, "<b>": True}
    assert {text: fits({"format": within}, text) for text in texts} == texts


@pytest.mark.parametrize(("name", "ending"), [("qwen3_coder", "\n"), ("mimo", "")])
def test_a_text_ends_where_the_reader_takes_it_to_end(name: str, ending: str):
    listed = {"enum": ["\nx\n\n", "y\n"]}
    schema = {"properties": {"s": {"type": "string"}, "k": listed}, "required": ["s", "k"]}
    structures = TOOL_FORMATS[name].structures
    form = {"format": structures.calls({"f": schema}, "f", only_one=True)}
    begin, rest = "<tool_call>\n<function=f>\n<parameter=s>", "<parameter=k>\n\nx\n\n\n</parameter>\n</function>\n</tool_call>"
    call = f"{begin}{ending}a%s</parameter>%s\n{rest}"
    texts = (call % ("", ""), call % ("\n", ""), call % ("", "b</parameter>"))
    assert [fits(form, text) for text in texts] == [True, True, False]
    parser = AnswerParser(AnswerFormat(tool_parser=TOOL_FORMATS[name].read, tools={"f": schema}))
    assert Answer.of(parser.add(texts[0], is_last=True)).calls == [Call("f", r'{"s": "a", "k": "\nx\n\n"}')]
    with pytest.raises(ValueError, match="have </parameter> in a value of 'k'"):
        structures.calls({"f": {"properties": {"k": {"const": "</parameter>"}}}}, "f", only_one=True)


A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/A", "$defs": {"A": A}},
        {"type": "object", "$ref": "#/definitions/A", "definitions": {"A": A}},
        {"$ref": "#/$defs/a%20b", "$defs": {"a b": {"$ref": "#/$defs/a~1b"}, "a/b": A}},
        {"properties": {"b": {"type": "integer"}, "a": {"$ref": "#/properties/b"}}, "required": ["a"], "$defs": {}},
        {
            "properties": {"a": {"$ref": "#/$defs/A"}, "b": {"type": "integer"}},
            "required": ["a"],
            "$defs": {"A": {"$ref": "#/properties/b"}},
        },
    ],
)
def test_references_reach_the_whole_schema(schema: dict[str, Any]):
    form = {"format": TOOL_FORMATS["pythonic"].structures.calls({"f": schema}, "f", only_one=True)}
    assert [fits(form, text) for text in ("[f(a=1)]", "[f()]", '[f(a="x")]')] == [True, False, False]


@pytest.mark.parametrize(
    "kids", [{"kids": {"type": "array", "items": {"$ref": "#"}}}, {"kids": {"$ref": "#/definitions/K"}}], ids=["#", "defined"]
)
def test_an_argument_can_hold_what_the_whole_schema_describes(kids: dict[str, Any]):
    schema = {**A, "properties": A["properties"] | kids, "definitions": {"K": {"type": "array", "items": {"$ref": "#"}}}}
    form = {"format": TOOL_FORMATS["pythonic"].structures.calls({"f": schema}, "f", only_one=True)}
    texts = ('[f(a=1, kids=[{"a": 2, "kids": [{"a": 3}]}])]', '[f(a=1, kids=[{"kids": []}])]', "[f(a=1, kids=[[]])]")
    assert [fits(form, text) for text in texts] == [True, False, False]


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"anyOf": [A]}, "anyOf"),
        ({"$ref": "#/$defs/B"}, "ref"),
        ({"properties": [1]}, "properties"),
        ({"properties": {"a": {}}, "required": 5}, "required"),
        ({"properties": {"a": {}}, "required": ["b"]}, "required"),
        ({"properties": {"a": {"type": "string", "enum": 5}}}, "enum of 'a'"),
        ({"minProperties": 1, "additionalProperties": True}, "minProperties"),
        ({**A, "not": {}}, "not at the top"),
        ({**A, "if": {}, "then": {"required": ["b"]}}, "if at the top"),
        ({**A, "dependentRequired": {"a": ["b"]}}, "dependentRequired at the top"),
    ],
)
@pytest.mark.parametrize("name", ["pythonic", "qwen3_coder", "mimo"])
def test_arguments_that_a_format_can_not_write_are_refused(name: str, schema: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=f"the parameters of f have .*{said}"):
        TOOL_FORMATS[name].structures.calls({"f": schema}, "f", only_one=True)
    form = {"format": TOOL_FORMATS[name].structures.calls({"f": schema, "g": G}, "g", only_one=False)}
    assert fits(form, TEXTS[name]) and fits(form, TEXTS[name].replace("k", "z")) and not fits(form, TEXTS[name].replace("4", "x"))


@pytest.mark.parametrize(
    ("name", "argument"), [*(("pythonic", each) for each in ("a (b)", "a,b", "a=b", "it's", "[a]", "a\nb", " a")), ("mimo", "x>y"),
                           ("qwen3_coder", 256 * "x")]
)  # fmt: skip
def test_names_that_would_not_be_read_back_are_refused(name: str, argument: str):
    schema, structures = {"type": "object", "properties": {argument: {}}}, TOOL_FORMATS[name].structures
    with pytest.raises(ValueError, match="a name that this model's format of calls can't write"):
        structures.calls({"f": schema}, "f", only_one=True)
    assert structures.calls({"f": schema}, [], only_one=True) == structures.calls({"f": {"anyOf": [{}]}}, [], only_one=True)
    form = AnswerFormat(tool_parser=TOOL_FORMATS[name].read, tools={"f": {}})
    for readable in ("$top", "a b", "é", 255 * "x"):
        xml = f"<tool_call><function=f><parameter={readable}>1</parameter></function></tool_call>"
        events = AnswerParser(form).add(f"[f({readable}=1)]" if name == "pythonic" else xml, is_last=True)
        assert json.loads(Answer.of(events).calls[0].arguments) == {readable: 1}
        structures.calls({"f": {"properties": {readable: {}}}}, "f", only_one=True)


@pytest.mark.parametrize("required", [[], ["a0"]])
def test_optional_arguments_may_be_left_out_in_any_way(required: list[str]):
    schema = {"properties": {f"a{number}": {"type": "integer"} for number in range(5)}, "required": required}
    form = {"format": TOOL_FORMATS["pythonic"].structures.calls({"f": schema}, "f", only_one=True)}
    for chosen in range(32):
        text = ", ".join(f"a{number}={number}" for number in range(5) if chosen >> number & 1)
        assert fits(form, f"[f({text})]") is (not required or chosen % 2 == 1)
    assert not fits(form, "[f(a0=0, a2=2, a1=1)]") and not fits(form, "[f(a0=0a1=1)]")


def test_a_call_is_not_much_longer_than_its_schema():
    part, names = {"type": "string", "description": "x" * 60}, [f"a{number}" for number in range(200)]
    form = TOOL_FORMATS["pythonic"].structures.calls({"f": {"properties": dict.fromkeys(names, part)}}, "f", only_one=True)
    assert len(json.dumps(form)) < 2**19


@pytest.mark.parametrize("name", ["pythonic", "qwen3_coder", "mimo"])
def test_definitions_are_not_repeated_without_end(name: str):
    properties = {f"a{number}": {"type": "integer"} for number in range(1000)}
    schema = {"properties": properties, "$defs": {"D": {"description": "x" * 30_000}}}
    structures = TOOL_FORMATS[name].structures
    with pytest.raises(ValueError, match="the parameters of f have more definitions than"):
        structures.calls({"f": schema}, "f", only_one=True)
    assert len(json.dumps(structures.calls({"f": schema}, [], only_one=True))) < 1000


@pytest.mark.parametrize("schema", [{}, {"type": "object"}, {"type": "object", "properties": {}}])
def test_a_tool_without_parameters_has_no_arguments(schema: dict[str, Any]):
    assert fits({"format": TOOL_FORMATS["pythonic"].structures.calls({"f": schema}, "f", only_one=True)}, "[f()]")


def test_smollm2s_earlier_calls_are_written_as_it_writes_them():
    form = TOOL_FORMATS["smollm2"]
    assert form.message_with([(call.name, json.loads(call.arguments)) for call in CALLS]) == TEXTS["smollm2"]
