"""A schema for every keyword of JSON Schema (draft 2020-12, and some of older drafts), as tests and programs use it,
with a value that fits and one that does not. They were written for this project."""

from typing import Any, NamedTuple


class Keyword(NamedTuple):
    """One use of a keyword."""

    schema: Any
    valid: Any
    invalid: Any
    """NOTHING: every value fits."""


NOTHING = object()


def of(valid: Any, invalid: Any = NOTHING, /, **schema: Any) -> Keyword:
    """`schema`: keywords; S stands for $, as in Sref."""
    return Keyword({(f"${name[1:]}" if name[0] == "S" else name): value for name, value in schema.items()}, valid, invalid)


def fields(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


WHOLE, TEXT, NULL = {"type": "integer"}, {"type": "string"}, {"type": "null"}
NODE = {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "v": WHOLE}, "additionalProperties": False}}
KEYWORDS = {
    "type": of(1.5, "x", type="number"),
    "type, several": of(None, 1, type=["string", "null"]),
    "type, integers written as numbers": of(3, 1.5, type="integer"),
    "enum": of("b", "c", enum=["a", "b", 3, None]),
    "enum, unicode": of("日本 é 😀", "e", enum=["日本 é 😀", '"\\/\n\t\u0000', ""]),
    "enum, values of all types": of({"a": [1, None]}, {"a": [1]}, enum=[{"a": [1, None]}, [], False, 0.5]),
    "const": of([1, {"a": "é"}], [1], const=[1, {"a": "é"}]),
    "const, of 64 bits": of([2**53 + 2], [2**53 + 1], const=[2**53 + 2]),
    "const, rounded": of(2**53 + 1, NOTHING, const=2**53 + 1),
    "const, 1.0 and true": of(True, 1, const=True),
    "minLength, maxLength": of("日本", "x", type="string", minLength=2, maxLength=3),
    "pattern": of("a-1", "1", type="string", pattern="^[a-z]-[0-9]$"),
    "pattern, not anchored": of("xxaby", "ba", type="string", pattern="ab"),
    "pattern, all characters but some": of("[a-", '[a"', type="string", pattern=r'^\[[^-"][^]"\\]$'),
    "pattern, control characters": of("\1\v\2", "\2", type="string", pattern=r"^\x01\v\u0002$"),
    "minimum, maximum": of(-3, 8, type="integer", minimum=-3, maximum=7),
    "minimum, of numbers": of(2.25, 2, type="number", minimum=2.25, maximum=2.75),
    "minimum, maximum, of 64 bits": of(2**53 + 2, 2**53 + 4, type="integer", minimum=2**53 + 1, maximum=2**53 + 3),
    "minimum, maximum, all of 64 bits": of(-(2**62), -(2**63), type="integer", minimum=-(2**63), maximum=2**63 - 1),
    "exclusiveMinimum, exclusiveMaximum, of fractions": of(0.25, 0, type="number", exclusiveMinimum=0, maximum=0.5),
    "exclusiveMinimum, exclusiveMaximum": of(1, 0, type="integer", exclusiveMinimum=0, exclusiveMaximum=5),
    "multipleOf": of(14, 15, type="integer", multipleOf=7, minimum=0, maximum=99),
    "multipleOf, of numbers": of(0.25, 0.3, type="number", multipleOf=0.25, minimum=0, maximum=9),
    "items": of([1, 2], ["x"], type="array", items=WHOLE),
    "items, false": of([], [1], type="array", items=False),
    "items, nested": of([[[1]]], [[1]], type="array", items={"type": "array", "items": {"type": "array", "items": WHOLE}}),
    "prefixItems": of([1, "x"], ["x", 1], type="array", prefixItems=[WHOLE, TEXT], items=False),
    "prefixItems and items": of([1, None, None], [1, 2], type="array", prefixItems=[WHOLE], items=NULL),
    "additionalItems": of([1, None], ["x"], items=[WHOLE], additionalItems=NULL, type="array"),
    "minItems, maxItems": of([1, 2], [1], type="array", items=WHOLE, minItems=2, maxItems=3),
    "contains": of([1, "x"], [1], type="array", contains=TEXT),
    "minContains, maxContains": of(["x"], ["x", "y"], type="array", contains=TEXT, minContains=1, maxContains=1),
    "uniqueItems": of([1, 2], [1, 1], type="array", items=WHOLE, uniqueItems=True),
    "properties": of({"a": 1, "b": None}, {"a": "x"}, **fields(a=WHOLE, b=NULL)),
    "properties, strange names": of({'"\\': 1, "": 2, "é😀": 3}, {"": "x"}, **fields(**{'"\\': WHOLE, "": WHOLE, "é😀": WHOLE})),
    "properties, names of keywords": of({"$ref": 1, "type": 2}, {"$ref": "x"}, **fields(**{"$ref": WHOLE, "type": WHOLE})),
    "required": of({"a": 1}, {}, **fields(a=WHOLE), required=["a"]),
    "required, not described": of({"a": "x"}, {}, type="object", required=["a"]),
    "additionalProperties, false": of({"a": 1}, {"b": 1}, **fields(a=WHOLE), additionalProperties=False),
    "additionalProperties": of({"a": 1, "x": None}, {"x": 1}, **fields(a=WHOLE), additionalProperties=NULL),
    "patternProperties": of(
        {"xa": 1}, {"xa": "x"}, type="object", patternProperties={"^x[ab]$": WHOLE}, additionalProperties=False
    ),
    "patternProperties, all but one": of({"a": 1}, {'"': 1}, patternProperties={'^[^"]$': {}}, additionalProperties=False),
    "patternProperties and properties": of({"a": "t", "x1": 1}, {"x1": "t"}, **fields(a=TEXT), patternProperties={"^x": WHOLE}),
    "propertyNames": of({"ab": 1}, {"b": 1}, type="object", propertyNames={"pattern": "^a"}),
    "minProperties, maxProperties": of({"a": 1}, {}, type="object", additionalProperties=WHOLE, minProperties=1, maxProperties=2),
    "dependentRequired": of({"a": 1, "b": 2}, {"a": 1}, **fields(a=WHOLE, b=WHOLE), dependentRequired={"a": ["b"]}),
    "dependentSchemas": of({"a": 1, "b": 2}, {"a": 1}, **fields(a=WHOLE), dependentSchemas={"a": {"required": ["b"]}}),
    "dependencies": of({"a": 1, "b": 2}, {"a": 1}, **fields(a=WHOLE), dependencies={"a": ["b"]}),
    "unevaluatedProperties": of({"a": 1}, {"b": 1}, allOf=[fields(a=WHOLE)], unevaluatedProperties=False, type="object"),
    "unevaluatedItems": of([1], [1, 2], type="array", prefixItems=[WHOLE], unevaluatedItems=False),
    "allOf": of({"a": 1, "b": 2}, {"a": 1}, allOf=[{**fields(a=WHOLE), "required": ["a"]}, {**fields(b=WHOLE), "required": ["b"]}]),
    "allOf, of one type": of(5, 3, allOf=[{"type": "integer", "minimum": 4}, {"maximum": 6}]),
    "allOf, a contradiction": of(NOTHING, 1, allOf=[WHOLE, TEXT]),
    "anyOf": of("x", None, anyOf=[WHOLE, TEXT]),
    "anyOf, beside properties": of(
        {"a": 1, "b": 2}, {}, **fields(a=WHOLE, b=WHOLE), anyOf=[{"required": ["a"]}, {"required": ["b"]}]
    ),
    "oneOf, apart": of(None, 1.5, oneOf=[WHOLE, NULL]),
    "oneOf, told by a const": of(
        {"kind": "b", "n": 1},
        {"kind": "a", "n": 1},
        oneOf=[
            {**fields(kind={"const": "a"}), "required": ["kind"], "additionalProperties": False},
            {**fields(kind={"const": "b"}, n=WHOLE), "required": ["kind", "n"], "additionalProperties": False},
        ],
    ),
    "oneOf, both may fit": of("x", 3, oneOf=[{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 5}]),
    "not": of(1, "x", **{"not": TEXT}),
    "if, then, else": of({"a": 1, "b": 1}, {"a": 1}, **fields(a=WHOLE), **{"if": {"required": ["a"]}, "then": {"required": ["b"]}}),
    "$ref": of([1], ["x"], type="array", items={"$ref": "#/$defs/whole"}, Sdefs={"whole": WHOLE}),
    "$ref, definitions": of({"a": 1}, {"a": "x"}, **fields(a={"$ref": "#/definitions/w"}), definitions={"w": WHOLE}),
    "$ref, to the root": of({"a": {"a": {}}}, {"a": 1}, **fields(a={"$ref": "#"}), additionalProperties=False),
    "$ref, recursive": of({"next": {"v": 1}}, {"next": 1}, Sref="#/$defs/node", Sdefs=NODE),
    "$ref, to a property": of({"a": 1, "b": 2}, {"b": "x"}, **fields(a=WHOLE, b={"$ref": "#/properties/a"})),
    "$ref, escaped": of(1, "x", Sref="#/$defs/a~1b%20~0", Sdefs={"a/b ~": WHOLE}),
    "$ref, beside keywords": of(5, 3, Sref="#/$defs/w", minimum=4, Sdefs={"w": WHOLE}),
    "$ref, of another document": of(1, NOTHING, Sref="https://example.com/schema.json"),
    "$ref, to itself": of(1, NOTHING, Sref="#"),
    "$id": of(1, "x", Sid="https://example.com/a.json", type="integer"),
    "$anchor": of(1, "x", Sref="#w", Sdefs={"w": {"$anchor": "w", "type": "integer"}}),
    "$dynamicRef": of(
        [1], ["x"], type="array", items={"$dynamicRef": "#w"}, Sdefs={"w": {"$dynamicAnchor": "w", "type": "integer"}}
    ),
    "$schema": of(1, "x", Sschema="https://json-schema.org/draft/2020-12/schema", type="integer"),
    "$schema, draft 7": of(1, "x", Sschema="http://json-schema.org/draft-07/schema#", type="integer"),
    "$schema, draft 4": of(
        1, NOTHING, Sschema="http://json-schema.org/draft-04/schema#", type="integer", minimum=0, exclusiveMinimum=True
    ),
    "$vocabulary": of(1, "x", Svocabulary={"https://json-schema.org/draft/2020-12/vocab/core": True}, type="integer"),
    "$comment, title, description": of(1, "x", Scomment="c", title="t", description="d", type="integer", deprecated=True),
    "default, examples": of(1, "x", type="integer", default=5, examples=[1, 2], readOnly=True, writeOnly=False),
    "contentMediaType, contentEncoding": of(
        "e30=", 1, type="string", contentMediaType="application/json", contentEncoding="base64"
    ),
    "contentSchema": of("{}", 1, type="string", contentMediaType="application/json", contentSchema={"type": "object"}),
    "an unknown keyword": of(1, "x", type="integer", **{"x-kubernetes-int-or-string": True, "unit": "cm"}),
    "true and false": of({"a": [1]}, {"b": 1}, **fields(a=True, b=False)),
    "nothing": of({"a": [1]}, NOTHING),
    "format: date": of("2000-02-29", "1900-02-29", type=["string", "null"], format="date", allOf=[{"maxLength": 10}]),
    "format: date-time": of("2024-02-29t10:00:00.5Z", "2023-02-29T10:00:00Z", type="string", format="date-time"),
    "format: time": of("10:00:59Z", "10:00:60Z", type="string", format="time"),
    "format: duration": of("P1D", "x", type="string", format="duration"),
    "format: email": of("a@example.com", "x", type="string", format="email"),
    "format: hostname": of("example.com", "a b", type="string", format="hostname"),
    "format: ipv4": of("10.0.0.1", "x", type="string", format="ipv4"),
    "format: ipv6": of("::1", "x", type="string", format="ipv6"),
    "format: uuid": of("01234567-89ab-cdef-0123-456789abcdef", "x", type="string", format="uuid"),
    "format: uri": of("https://example.com/a", "x", type="string", format="uri"),
    "format: json-pointer": of("/a", "a", type="string", format="json-pointer"),
    "format: regex": of("a+", "(", type="string", format="regex"),
    "format: idn-email": of("a@b", 1, type="string", format="idn-email"),
    "format: iri": of("https://b", 1, type="string", format="iri"),
    "format: uri-reference": of("/a", 1, type="string", format="uri-reference"),
    "format: uri-template": of("/{a}", 1, type="string", format="uri-template"),
    "format: relative-json-pointer": of("1/a", 1, type="string", format="relative-json-pointer"),
    "format: int32": of(1, "x", type="integer", format="int32"),
    "format: of a program's own": of("x", 1, type="string", format="color"),
}

PROGRAMS = {
    "Kubernetes": of(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "labels": {"app": "x"}}},
        {"kind": "Node"},
        **fields(
            apiVersion={"type": ["string", "null"]},
            kind={"type": ["string", "null"], "enum": ["Pod"]},
            metadata={"$ref": "#/definitions/meta"},
        ),
        definitions={"meta": fields(name=TEXT, labels={"type": ["object", "null"], "additionalProperties": TEXT})},
        required=["metadata"],
        **{"x-kubernetes-group-version-kind": [{"group": "", "kind": "Pod", "version": "v1"}]},
    ),
    "Snowplow": of(
        {"targetUrl": "https://b", "elementId": None},
        {"elementId": None, "more": 1},
        Sschema="http://iglucentral.com/schemas/com.snowplowanalytics.self-desc/schema/jsonschema/1-0-0#",
        self={"vendor": "com.example", "name": "link_click", "format": "jsonschema", "version": "1-0-1"},
        **fields(targetUrl={"type": "string", "format": "uri", "maxLength": 60}, elementId={"type": ["string", "null"]}),
        required=["targetUrl"],
        additionalProperties=False,
    ),
    "a function": of(
        {"name": "f", "arguments": {"city": "x", "unit": "c"}},
        {"name": "g"},
        **fields(name={"const": "f"}, arguments={**fields(city=TEXT, unit={"enum": ["c", "f"]}), "required": ["city"]}),
        required=["name", "arguments"],
        additionalProperties=False,
    ),
    "a schema of a store": of(
        {"version": "1.2.0", "scripts": {"build": "x"}, "files": ["a"]},
        {"version": "x"},
        id="https://json.schemastore.org/package",
        **fields(
            version={"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
            scripts={"type": "object", "additionalProperties": TEXT},
            files={"type": "array", "items": TEXT},
            private={"type": "boolean", "default": False},
        ),
        patternProperties={"^_": {"description": "private"}},
    ),
    "Pydantic, a union": of(
        {"pet": {"kind": "cat", "lives": 9}},
        {"pet": {"kind": "cow"}},
        Sdefs={
            "Cat": {**fields(kind={"const": "cat", "title": "Kind"}, lives={**WHOLE, "default": 9}), "required": ["kind"]},
            "Dog": {**fields(kind={"const": "dog"}, name={"anyOf": [TEXT, NULL], "default": None}), "required": ["kind"]},
        },
        **fields(
            pet={
                "discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}, "propertyName": "kind"},
                "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
            }
        ),
        required=["pet"],
        title="Owner",
    ),
    "OpenAI, strict": of(
        {"steps": [{"explanation": "x", "output": None}]},
        {"steps": [{}]},
        **fields(
            steps={
                "type": "array",
                "items": {
                    **fields(explanation=TEXT, output={"anyOf": [TEXT, NULL]}),
                    "required": ["explanation", "output"],
                    "additionalProperties": False,
                },
            }
        ),
        required=["steps"],
        additionalProperties=False,
    ),
    "a tree of interface elements": of(
        {"type": "div", "children": [{"type": "button", "children": []}]},
        {"type": "x"},
        **fields(type={"enum": ["div", "button"]}, children={"type": "array", "items": {"$ref": "#"}}),
        required=["type", "children"],
        additionalProperties=False,
    ),
}
"""In the shapes of the sources of JSONSchemaBench and of what programs generate."""

REFUSED = {
    "const, rounded": "9007199254740993 in const or enum",
    "contains": "contains",
    "minContains, maxContains": "minContains",
    "uniqueItems": "uniqueItems",
    "propertyNames": "propertyNames",
    "dependentRequired": "dependentRequired",
    "dependentSchemas": "dependentSchemas",
    "dependencies": "dependencies",
    "unevaluatedProperties": "unevaluatedProperties",
    "unevaluatedItems": "unevaluatedItems",
    "allOf, a contradiction": "Unsatisfiable",
    "oneOf, both may fit": "oneOf",
    "not": "not",
    "if, then, else": "if",
    "$ref, of another document": "https://example.com/schema.json",
    "$ref, to itself": "NoExtension",
    "$dynamicRef": "$dynamicRef",
    **{
        f"format: {name}": "Unknown format"
        for name in ("json-pointer", "regex", "idn-email", "iri", "uri-reference", "uri-template", "relative-json-pointer")
    },
    "format: of a program's own": "Unknown format: color",
    "Snowplow": "self-desc",  # the URL in $schema is one that it does not know
}
"""What the library can't follow, and what its refusal names."""
