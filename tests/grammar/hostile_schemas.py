"""Grammars that somebody might send to harm a server: deep, huge, exponential, endless, in odd characters, and broken ones."""

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.grammar.keywords import KEYWORDS, PROGRAMS

ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**31, 2**64, 10**400, 0.5, -0.0, 1e-320, 1e308),
    *("", "x", "\ud800", "\u0000", "é😀" * 50, "(", "[a-", "(a+)+$", "#", "#/", "#/$defs/x", "http://["),
    *([], {}, [[]], [None], {"": {}}, ["a", "a"], [{}] * 40),
    *({"type": "object"}, {"$ref": "#"}, {"anyOf": []}, {"enum": []}, {"type": []}, {"not": {}}),
)
NAMES = ("a", "", "$ref", "é", "日本", "\u0000", "a/b~c%d", '"\\', "\u202eabc", "x" * 500, "\ud800", "__proto__")
PATTERNS = (
    "(a*)*b",
    "((a{1,100}){1,100}){1,100}",
    ".*.*.*.*=.*",
    "^.*(a|b).{500}(c|d).{500}$",
    "(a|aa|aaa){500}",
    "[^\\x00-\\x{10FFFF}]",
    "(?=a)b",
    "\\p{L}{200}",
    "(x+x+)+y",
    "(?i)" + "a" * 300,
    "a{100000000}",
    "x|y((a{1000}){1000}){1000}",
    "\\b\\w+\\b",
    "(" * 250 + ")" * 250,
)
RUN_ON = (
    'start: /a+/ "ab"',
    'start: "x" /(ab)*/ "abc"',
    'root ::= "x" y "ab"\ny ::= "a"+',
    "start: start",
    "start: start start | ",
    "start: a a a a\na: b b b b\nb: c c c c\nc: start? /x*/",
    'root ::= "a" root',
    "start: /(.|\\n)*/ /a*/ /a*/ start?",
    "start: %json {}",
    'start: %json {"$ref": "#"}',
    'start: "x"{1,100000}',
    'start: ("x"{1,1000}){1,1000}',
    "start[lazy]: /a*/",
    "start: <[0-9]>",
    "start: @x",
    "%ignore /( |a)*/\nstart: /a*/ /a/",
    '%llguidance {"no_forcing": false}\nstart: /a+/ "ab"',
)


class Hostile(NamedTuple):
    """A request's field and its value."""

    family: str
    field: str
    value: Any


def nested(rng: random.Random) -> Any:
    """As text, for Python could not write it."""
    begin, end = rng.choice(
        [
            ('{"type": "array", "items": ', "}"),
            ('{"type": "object", "required": ["a"], "properties": {"a": ', "}}"),
            ('{"anyOf": [{"type": "null"}, ', "]}"),
            ('{"allOf": [', "]}"),
            ('{"type": "array", "prefixItems": [', "]}"),
            ('{"const": [', "]}"),
            ('{"additionalProperties": ', "}"),
        ]
    )
    depth = rng.choice([10, 60, 120, 127, 128, 1000, 4000])
    return begin * depth + ('{"type": "null"}' if "const" not in begin else "1") + end * depth


def huge(rng: random.Random) -> Any:
    many = rng.choice([200, 1500, 4000])
    whole = {"type": "integer"}
    return rng.choice(
        [
            {"enum": [f"{number}" * 5 for number in range(many)]},
            {"enum": [rng.getrandbits(64) for _ in range(many)]},
            {"const": "x" * 20 * many},
            {"const": list(range(many))},
            {"type": "object", "properties": {f"p{number}": whole for number in range(many)}},
            {"type": "object", "properties": {f"p{n}": whole for n in range(many)}, "required": [f"p{n}" for n in range(many)]},
            {"type": "object", "patternProperties": {f"^p{number}": whole for number in range(many // 20)}},
            {"anyOf": [{"const": f"k{number}"} for number in range(many)]},
            {"oneOf": [{"properties": {"k": {"const": n}}, "required": ["k"]} for n in range(many // 20)]},
            {"allOf": [{"properties": {f"p{n}": whole}} for n in range(many // 10)]},
            {"type": "array", "prefixItems": [whole] * many, "minItems": many},
            {"type": "string", "pattern": "|".join(f"a{number}b" for number in range(many))},
            {"title": "x" * 30 * many, "type": "null"},
        ]
    )


def exponential(rng: random.Random) -> Any:
    depth, width = rng.choice([5, 12, 30]), rng.choice([2, 3])
    keyword = rng.choice(["anyOf", "allOf", "oneOf", "prefixItems"])
    inner = {f"d{n}": {keyword: [{"$ref": f"#/$defs/d{n + 1}"}] * width} for n in range(depth)}
    if rng.random() < 0.5:
        pair = [{"properties": {f"p{n}": {"type": "integer"}}} for n in range(depth)]
        return {"allOf": [{"anyOf": [each, {"required": [f"q{n}"]}]} for n, each in enumerate(pair)]}
    return {"$ref": "#/$defs/d0", "$defs": inner | {f"d{depth}": rng.choice([{}, {"type": "null"}, {"enum": list("abcdef")}])}}


def recursive(rng: random.Random) -> Any:
    to = rng.choice(["#", "#/$defs/a", "#/$defs/b", "#/$defs/nowhere", "#/$defs", "#/%zz", "#a", "other.json#/a"])
    inner = rng.choice(
        [
            {"$ref": to},
            {"anyOf": [{"$ref": to}, {"$ref": "#/$defs/a"}]},
            {"allOf": [{"$ref": to}, {"$ref": "#/$defs/b"}]},
            {"type": "object", "properties": {"a": {"$ref": to}}, "required": ["a"], "additionalProperties": False},
            {"type": "array", "items": {"$ref": to}, "minItems": rng.choice([0, 1, 3])},
            {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": to}, "minItems": 1}]},
        ]
    )
    guided = {"x-guidance": {"whitespace_flexible": False}} if rng.random() < 0.5 else {}
    return {"$ref": "#/$defs/a", "$defs": {"a": inner, "b": {"$ref": "#/$defs/a"}}} | guided


def limits(rng: random.Random) -> Any:
    big = rng.choice([0, 1, 50, 10**4, 10**8, 2**63, 10**30, -1, 1.5, 1e300, 1e-300])
    small = rng.choice([0, 1, -(10**30), 1e-300, 7])
    return rng.choice(
        [
            {"type": "string", "minLength": big},
            {"type": "string", "minLength": big, "pattern": "^(x|ya+)$"},
            {"type": "string", "maxLength": big, "minLength": small},
            {"type": "array", "items": {"const": 1}, "minItems": big},
            {"type": "array", "items": {"type": "array", "items": {}, "maxItems": big}, "maxItems": big},
            {"type": "integer", "minimum": small, "maximum": big},
            {"type": "number", "multipleOf": big, "minimum": small, "maximum": 10**6},
            {"type": "integer", "multipleOf": big, "exclusiveMinimum": small},
            {"type": "object", "minProperties": big},
            {"type": "object", "additionalProperties": {}, "maxProperties": big},
        ]
    )


def unicode(rng: random.Random) -> Any:
    names = rng.sample(NAMES, 3)
    return rng.choice(
        [
            {"type": "object", "properties": {name: {"const": name} for name in names}, "required": names},
            {"enum": names},
            {"type": "string", "pattern": f"^[{rng.choice(['日-本', 'é-ü', '😀-🙏', chr(0) + '-' + chr(0x10FFFF)])}]{{1,4}}$"},
            {"$ref": f"#/$defs/{names[0]}", "$defs": {names[0]: {"type": "string", "maxLength": 2}}},
            {"type": "object", "patternProperties": {rng.choice(names): {}}, "additionalProperties": False},
        ]
    )


def changed(rng: random.Random) -> Any:
    """A usual schema with some places replaced."""
    schema = json.loads(json.dumps(rng.choice([*KEYWORDS.values(), *PROGRAMS.values()]).schema))
    for _ in range(rng.randint(1, 4)):
        schema = replaced(rng, schema)
    return schema if isinstance(schema, dict) else {"items": schema}


def replaced(rng: random.Random, value: Any) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(list(value))
        if rng.random() < 0.2:
            return value | rng.choice([*KEYWORDS.values()]).schema
        return value | {name: replaced(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.7:
        place = rng.randrange(len(value))
        return [*value[:place], replaced(rng, value[place]), *value[place + 1 :]]
    return rng.choice(ODD)


def guided(rng: random.Random) -> Any:
    """With what llguidance lets a schema say about space."""
    strange = {
        "whitespace_flexible": rng.choice([True, False]),
        "whitespace_pattern": rng.choice([" *", " +", "a*", ".*", "(", "", "[ \\n]{0,1000}", "x{5,}"]),
        "item_separator": rng.choice([",", " ,", "", "aa", "1"]),
        "key_separator": rng.choice([":", "  :", "", '"']),
        "coerce_one_of": True,
        "lenient": rng.choice([True, 5]),
    }
    names = rng.sample(list(strange), 2)
    base = {"type": "array", "prefixItems": [{"const": 1}, {"type": "object", "properties": {"a": {}}, "required": ["a"]}]}
    return base | {"minItems": 2, "x-guidance": {name: strange[name] for name in names}}


def pattern(rng: random.Random) -> Any:
    return {"type": "string", "pattern": rng.choice(PATTERNS)}


FAMILIES: dict[Callable[[random.Random], Any], int] = {
    changed: 8,
    nested: 2,
    huge: 2,
    exponential: 2,
    recursive: 3,
    limits: 3,
    unicode: 3,
    guided: 2,
    pattern: 1,
}


def hostile(rng: random.Random) -> Hostile:
    """Any of them."""
    if rng.random() < 0.15:
        regex = {"type": "regex", "pattern": rng.choice(PATTERNS)}
        content = rng.choice([regex, {"type": "grammar", "grammar": rng.choice(RUN_ON)}])
        tag = {"type": "tag", "begin": rng.choice(["", "x"]), "content": content, "end": rng.choice(["", "ab", " x"])}
        return rng.choice(
            [
                Hostile("regex", "regex", rng.choice(PATTERNS)),
                Hostile("grammar", "ebnf", rng.choice(RUN_ON)),
                Hostile("structural tag", "structured_outputs", {"structural_tag": json.dumps({"format": tag})}),
                Hostile("choice", "structured_outputs", {"choice": rng.choice([["x" * 3000], [""], ["\ud800"], list("ab") * 700])}),
            ]
        )
    [family] = rng.choices(list(FAMILIES), list(FAMILIES.values()))
    value = family(rng)
    return Hostile(family.__name__, "json_schema", value if isinstance(value, str) else json.dumps(value))
