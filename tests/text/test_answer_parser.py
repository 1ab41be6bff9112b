"""Thinking, content and calls in answers: the same events, however the text is cut."""

import json
import random

import pytest

from jaxspec.text.answer_parser import REASONING_FORMATS, Answer, AnswerFormat, AnswerParser, Call, Thinking
from jaxspec.text.answer_reader import Event, merged
from jaxspec.text.tool_formats import TOOL_FORMATS, format_name_in
from tests.server import templates

TOOLS = {"f": {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "o": {"enum": ["x", "y"]}}}, "g": {}}
TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
TOOLS["t"] = {
    "properties": {
        "a": {"anyOf": [TEXT, {"type": "null"}]},
        "b": {"$ref": "#/$defs/Z"},
        "c": {"type": ["string", "null"]},
        "d": {"oneOf": [TEXT, {"type": "null"}]},
        "e": {"enum": ["7", None]},
        "f": {"anyOf": [{"const": 7, "type": "integer"}, {"$ref": "#/properties/b"}]},
        "g": {"allOf": [{"type": ["number", "string"]}, NUMBER]},
        "h": {"anyOf": [TEXT, {"$ref": "#/properties/h"}]},
        "i": {"anyOf": [TEXT, NUMBER]},
        **{name: {"type": ["string", "null"]} for name in "jklm"},
    },
    "$defs": {"Z": TEXT},
}
XML_VALUES = ("1.10", "10115", "[1, 2]", "None", "7", "7", "7", '{"s": "a\nb"}', "0.5", '"""D."""', "'it'", 'r"d"', '"a\nb"')
RAW = '{"s":\n' + r'"a\nb\n\\\t\u0001\u0002"}'
"""Raw control characters are escaped in strings, whether or not a backslash is before them."""
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "Just text, é, <tool_ and\n ", "Just text, é, <tool_ and\n ", []),
    (
        "hermes",
        'Hi.\n<tool_call>\n{"name": "f", "arguments": {"s": "a}\\"b", "n": [1, {"x": 2}]}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {}, "name": "g"}</tool_call>\n',
        "Hi.",
        [("f", '{"s": "a}\\"b", "n": [1, {"x": 2}]}'), ("g", "{}")],
    ),
    ("hermes", 'x \n<tool_call>no</tool_call> <tool_call>{"name": "h", "arguments": {}}</tool_call>', "=", []),
    ("hermes", '<tool_call>{"name": "' + 300 * "f" + '", "arguments": {}}</tool_call>', "=", []),
    ("hermes", '<tool_call>{"name": "g", "id": "' + 99 * 'x}\\"' + '", "arguments": {}}</tool_call>', "", [("g", "{}")]),
    ("hermes", '<tool_call>{"name": "g", "id": "was cut', "=", []),
    ("hermes", '<tool_call>{"name": "f", "arguments": "text"}</tool_call>', "=", []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "was cut', "", [("f", '{"s": "was cut')]),
    ("hermes", '<tool_call>{"name": "f", "id": 7, "arguments": {"s": 1} oops', "oops", [("f", '{"s": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s":\n"a\nb\\\n\\\\\t\x01\\\x02"}}</tool_call>', "", [("f", RAW)]),
    ("hermes", '<tool_call>{"arguments": {"s":\n"a\nb\\\n\\\\\t\x01\\\x02"}, "name": "f"}</tool_call>', "", [("f", RAW)]),
    ("qwen3", '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\nDone.', "Done.", [("g", "{}")]),
    (
        "smollm2",
        '<tool_call>[\n{"name": "f", "arguments": {"s": "é"}},\n{"name": "g"}\n]</tool_call>',
        "",
        [("f", '{"s": "é"}'), ("g", "{}")],
    ),
    ("smollm2", "<tool_call>[]</tool_call>", "", []),
    (
        "mimo",
        '<tool_call>\n<function=f>\n<parameter=s>ls "x" && pwd\n\n</parameter>\n<parameter=n>3</parameter>\n'
        "<parameter=o>x</parameter>\n<parameter=new>true</parameter>\n</function>\n</tool_call>done",
        "done",
        [("f", '{"s": "ls \\"x\\" && pwd\\n", "n": 3, "o": "x", "new": true}')],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=s>\n7\n</parameter>\n</function>\n</tool_call>",
        "",
        [("f", '{"s": "7"}')],
    ),
    ("qwen3_coder", "<tool_call>\n<function=g>\n</function>\n</tool_call>", "", [("g", "{}")]),
    ("mimo", "<tool_call>\n<function=f>\n<parameter=s>was cut", "", [("f", '{"s": "was cut')]),
    ("mimo", "<tool_call>\n<function=f>\n<par", "", [("f", "")]),
    ("mimo", "<tool_call>\n<function=f>\n<parameter=s>x</parameter>\n<parameter=was cut", "", [("f", '{"s": "x"')]),
    ("mimo", "<tool_call>\n<function=f>\n<parameter=s>x</parameter>\n</fun", "", [("f", '{"s": "x"')]),
    ("mimo", "<tool_call>\n<function=f>\n<parameter=s>x</parameter>\nno", "no", [("f", '{"s": "x"}')]),
    ("mimo", "<tool_call>\n<function=h>\n<parameter=s>x</parameter>\n</function>\n</tool_call>", "=", []),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"s": "x"}}; {"name": "g", "parameters": {}}',
        "",
        [("f", '{"s": "x"}'), ("g", "{}")],
    ),
    ("llama3", '<|python_tag|>{"type": "function", "name": "f", "parameters": {"s": "x"}}', "", [("f", '{"s": "x"}')]),
    (
        "llama3",
        'Look: <|python_tag|>{"name": "g", "parameters": {}} ok <|python_tag|>b()',
        "Look: ok <|python_tag|>b()",
        [("g", "{}")],
    ),
    ("llama3", ' {"name": "Paris", "population": 2} ', "=", []),
    ("llama3", " \n", "=", []),
    (
        "pythonic",
        "[f(s='it\\'s', n=3), g(a=True, b=None, c=[1, \"x,)\"], d=true, e={'k': 1}, h=word)]",
        "",
        [("f", '{"s": "it\'s", "n": 3}'), ("g", '{"a": true, "b": null, "c": [1, "x,)"], "d": true, "e": {"k": 1}, "h": "word"}')],
    ),
    (
        "pythonic",
        """[g(a="\\ud83d", b='\\ud83d', c=1e999, d=NaN, e=12345678901234567890.10, f=1e400)]""",
        "",
        [("g", r'{"a": "\ud83d", "b": "\ud83d", "c": "1e999", "d": "NaN", "e": 12345678901234567890.10, "f": "1e400"}')],
    ),
    ("pythonic", "[g($top=1, a b = 2)]", "", [("g", '{"$top": 1, "a b": 2}')]),
    ("pythonic", "[g()]", "", [("g", "{}")]),
    (
        "pythonic",
        """[g(a=\"\"\"print("it's, \\\\n")\n\"\"\", b=\'\'\'\'\'\', c="", d='x\ny\\'', e=[\n'\t', "\\\n"], f={"s": 'a'\n"b\n"})]""",
        "",
        [("g", r"""{"a": "print(\"it's, \\n\")\n", "b": "", "c": "", "d": "x\ny'", "e": ["\t", ""], "f": {"s": "ab\n"}}""")],
    ),
    ("pythonic", '[g(a="""was cut""', "", [("g", "")]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=t>\n"
        + "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in zip("abcdefghijklm", XML_VALUES, strict=True))
        + "</function>\n</tool_call>",
        "",
        [
            (
                "t",
                r'{"a": "1.10", "b": "10115", "c": "[1, 2]", "d": null, "e": "7", "f": 7, "g": 7, "h": {"s": "a\nb"}, "i": "0.5", '
                r'"j": "\"\"\"D.\"\"\"", "k": "\'it\'", "l": "r\"d\"", "m": "a\nb"}'.replace(r"\'", "'"),
            )
        ],
    ),
    (
        "pythonic",
        "[f('a', 3), g(), f(n=3, [1], 'y')]",
        "",
        [("f", '{"s": "a", "n": 3}'), ("g", "{}"), ("f", '{"n": 3, "s": [1], "o": "y"}')],
    ),
    ("pythonic", '[f(a="x", **{"n": 1})]', '**{"n": 1})]', [("f", '{"a": "x"}')]),
    ("pythonic", '[g("Paris")]', '"Paris")]', [("g", "{}")]),
    ("pythonic", "[f(s=3, ,)]", ",)]", [("f", '{"s": 3}')]),
    ("pythonic", '[f("x"]', "", [("f", '{"s": "x"}')]),
    ("pythonic", "[f(x==3), f([k=1, 2], 3)]", "", [("f", '{"s": "x==3"}'), ("f", '{"s": "[k=1, 2]", "n": 3}')]),
    ("pythonic", '[f("x", s="y")]', 's="y")]', [("f", '{"s": "x"}')]),
    ("pythonic", "[f('was cut", "", [("f", "")]),
    ("pythonic", "[f(3, n=was cut", "", [("f", '{"s": 3')]),
    ("pythonic", "[1, 2]", "=", []),
    ("pythonic", "[f(s='a'),\n g(),\n]\n[g()] [see]", " [see]", [("f", '{"s": "a"}'), ("g", "{}"), ("g", "{}")]),
    ("pythonic", "[f(s=3) x", "x", [("f", '{"s": 3}')]),
    ("hermes", 'a <tool_call>{"name": "g"}</tool_call>b', "a b", [("g", "{}")]),
    ("hermes", 'a<tool_call>{"name": "g"}</tool_call>\n<tool_call>no</tool_call>', "a\n<tool_call>no</tool_call>", [("g", "{}")]),
]
"""A format, an answer, its content (=: all of it), and its calls."""


def parsed(form: AnswerFormat, pieces: list[str]) -> list[Event]:
    parser, last = AnswerParser(form), len(pieces) - 1
    return merged([event for index, piece in enumerate(pieces) for event in parser.add(piece, is_last=index == last)])


def check_pieces(form: AnswerFormat, text: str, cuts: int = 1000) -> list[Event]:
    """The events; the same for every cut in two, for single characters, and for so many cuts into up to six pieces."""
    events, rng = parsed(form, [text]), random.Random(text)
    all_cuts = [[at] for at in range(len(text) + 1)] + [list(range(len(text)))]
    all_cuts += [sorted(rng.choices(range(len(text) + 1), k=rng.randrange(1, 6))) for _ in range(cuts)]
    for cut_at in all_cuts:
        pieces = [text[begin:end] for begin, end in zip([0, *cut_at], [*cut_at, len(text)], strict=True)]
        assert parsed(form, pieces) == events, pieces
    return events


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES, ids=lambda value: str(value)[:30])
def test_calls_are_the_same_in_any_pieces(name: str, text: str, content: str, calls: list[tuple[str, str]]):
    answer = Answer.of(check_pieces(AnswerFormat(tool_parser=TOOL_FORMATS[name].read, tools=TOOLS), text))
    assert answer == Answer(text if content == "=" else content, "", [Call(*call) for call in calls])
    for call in answer.calls:
        assert "was cut" in text or text.endswith(("<par", "</fun")) or isinstance(json.loads(call.arguments), dict)


CALL = '<tool_call>{"name": "g"}</tool_call>'
THOUGHTS = [
    ("<think>\nhm <b>\n</think>\n\nYes.\n", Thinking.POSSIBLE, "hm <b>", "Yes.\n", 0),
    ("hm</think>\nYes", Thinking.OPEN, "hm", "Yes", 0),
    ("\n<think>it was cut </thi", Thinking.OPEN, "it was cut </thi", "", 0),
    (" no <think>x</think>", Thinking.POSSIBLE, "", " no <think>x</think>", 0),
    ("hm</think>", Thinking.NONE, "", "hm</think>", 0),
    (f"<think>\n\n</think>\n\n{CALL}", Thinking.POSSIBLE, "", "", 1),
    (f"<think>{CALL}</think>{CALL}", Thinking.POSSIBLE, CALL, "", 1),
]


@pytest.mark.parametrize(("text", "thinking", "reasoning", "content", "calls"), THOUGHTS)
def test_thinking_is_the_same_in_any_pieces(text: str, thinking: Thinking, reasoning: str, content: str, calls: int):
    form = AnswerFormat(REASONING_FORMATS["qwen3"], thinking, tool_parser=TOOL_FORMATS["qwen3"].read, tools=TOOLS)
    answer = Answer.of(check_pieces(form, text))
    assert (answer.reasoning, answer.content, len(answer.calls)) == (reasoning, content, calls)
    together = Answer.of(check_pieces(AnswerFormat(form.reasoning, thinking, is_separate=False), text))
    assert together == Answer(text, "", [])


@pytest.mark.parametrize("name", ["hermes", "llama3", "pythonic"])
def test_thinking_in_the_content_is_there_once(name: str):
    read = TOOL_FORMATS[name].read
    form = AnswerFormat(REASONING_FORMATS["qwen3"], Thinking.OPEN, is_separate=False, tool_parser=read, tools=TOOLS)
    for text in ("hm</think>\n\nHello", "\n<think>\nhm</think>", "<think>it was cut </thi"):
        assert Answer.of(check_pieces(form, text)) == Answer(text, "", [])
    assert Answer.of(check_pieces(form, f"hm</think>{WHOLE[name]}")) == Answer("hm</think>", "", 2 * [Call("g", "{}")])


WHOLE = {
    "hermes": '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
    "smollm2": '<tool_call>[{"name": "g"}, {"name": "g", "id": 7, "arguments": {}, "of": "ab"}]</tool_call>',
    "llama3": '{"name": "g", "parameters": {}}; {"name": "g"}',
    "pythonic": "[g(), g()]<|python_tag|>",
    "mimo": 2 * "<tool_call>\n<function=g>\n</function>\n</tool_call>\n",
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_left_of_calls_that_were_cut_off_is_no_content(name: str):
    text, form = WHOLE[name], AnswerFormat(tool_parser=TOOL_FORMATS[name].read, tools=TOOLS)
    answers = [Answer.of(check_pieces(form, text[:end], cuts=0)) for end in range(len(text) + 1)]
    assert {answer.content for answer in answers if answer.calls} == {""} and len(answers[-1].calls) == 2


def test_events_come_as_early_as_they_can():
    parser = AnswerParser(AnswerFormat(tool_parser=TOOL_FORMATS["hermes"].read, tools=TOOLS))
    pieces = ["Hel", "lo <", "b>", '<tool_call>{"name": "f', '", "arguments": {"', 's": ', '"a', 'b"}}', "</tool_call>"]
    texts = [[event[-1] for event in parser.add(piece)] for piece in pieces]
    assert texts == [["Hel"], ["lo"], [" <b>"], [], ["f", '{"'], ['s": '], ['"a'], ['b"}'], []]


def test_further_calls_can_be_left_out():
    form = AnswerFormat(tool_parser=TOOL_FORMATS["hermes"].read, tools=TOOLS, only_one_call=True)
    assert Answer.of(check_pieces(form, CALL + CALL)).calls == [Call("g", "{}")]


def test_a_template_tells_its_format():
    told = {name: format_name_in(template) for name, template in templates.WELL_KNOWN.items()}
    assert told["ChatML"] is told["Llama 2"] is None
    assert format_name_in("... <tool_call>\n<function=example>\n<parameter=a> ...") == "qwen3_coder"
    assert format_name_in("... within <tool_call></tool_call> XML tags ...") == "hermes"
    assert format_name_in('{"name": function name, "parameters": dictionary of argument name and its value}') == "llama3"
    assert format_name_in("a helpful AI assistant named SmolLM, trained by Hugging Face") == "smollm2"


@pytest.mark.parametrize(
    ("prompt", "possible", "forced"),
    [
        ("user\nassistant\n", Thinking.POSSIBLE, Thinking.OPEN),
        ("assistant\n<think>\n", Thinking.OPEN, Thinking.OPEN),
        ("assistant\n<think>\n\n</think>\n\n", Thinking.NONE, Thinking.NONE),
    ],
)
def test_the_prompt_says_whether_the_answer_thinks(prompt: str, possible: Thinking, forced: Thinking):
    assert REASONING_FORMATS["qwen3"].after(prompt) is possible
    assert REASONING_FORMATS["deepseek-r1"].after(prompt) is forced


def test_a_continued_answer_thinks_on():
    form = REASONING_FORMATS["deepseek-r1"]
    assert [form.within(text) for text in ("<think>a", "<think>a</think>b", "b")] == [Thinking.OPEN, Thinking.NONE, Thinking.NONE]
