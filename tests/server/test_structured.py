"""Structured output over HTTP: what the engine is asked for, and what is refused."""

import json
from typing import Any

import pytest
from pydantic import BaseModel

from jaxspec.sampling_params import SamplingParams
from jaxspec.server.structured import FIXED_LAYOUT
from tests.server.conftest import CHAT, COMPLETIONS, GENERATE, USER, Client
from tests.server.test_bad_input import refusal

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ANY_OBJECT = ("json_schema", '{"type": "object"}')
OF_SCHEMA = ("json_schema", json.dumps(SCHEMA))
IN_FIXED_LAYOUT = ("json_schema", json.dumps(FIXED_LAYOUT | SCHEMA))
TAGS = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}
OF_TAGS = ("structural_tag", json.dumps(TAGS))
WRAPPED = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
        ({"response_format": WRAPPED}, OF_SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, OF_SCHEMA),
        ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, IN_FIXED_LAYOUT),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}}, IN_FIXED_LAYOUT),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}}, OF_SCHEMA),
        ({"structured_outputs": {"disable_any_whitespace": True}, "response_format": WRAPPED}, IN_FIXED_LAYOUT),
        ({"structured_outputs": {"regex": "a*"}}, ("regex", "a*")),
        ({"response_format": {"type": "structural_tag", **TAGS}}, OF_TAGS),
        ({"structured_outputs": {"structural_tag": json.dumps(TAGS)}}, OF_TAGS),
        ({"structured_outputs": {"choice": ["a", "b"]}}, ("choice", '["a", "b"]')),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, ("grammar", 'root ::= "a"')),
        ({"guided_json": SCHEMA}, OF_SCHEMA),
        ({"guided_regex": "a*"}, ("regex", "a*")),
        ({"guided_choice": ["a"]}, ("choice", '["a"]')),
        ({"guided_grammar": 'start: "a"'}, ("grammar", 'start: "a"')),
        ({"json_schema": json.dumps(SCHEMA)}, OF_SCHEMA),
        ({"regex": "a*"}, ("regex", "a*")),
        ({"ebnf": 'root ::= "a"'}, ("grammar", 'root ::= "a"')),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_every_form_asks_the_engine_for_the_same(client: Client, fields: dict[str, Any], asked: tuple[str, str] | None):
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": USER})):
        response = client.post(path, **body, **fields)
        assert response.status_code == 200, response.text
    assert [params.constraint for params in client.engine.params] == [asked, asked]


def test_sglangs_endpoint_has_four_of_them(client: Client):
    texts = {"json_schema": json.dumps(SCHEMA), "regex": "a*", "ebnf": 'root ::= "a"', "structural_tag": json.dumps(TAGS)}
    for name, value in texts.items():
        assert client.post(GENERATE, text="x", sampling_params={name: value}).status_code == 200
    asked = [OF_SCHEMA, ("regex", "a*"), ("grammar", 'root ::= "a"'), OF_TAGS]
    assert [params.constraint for params in client.engine.params] == asked


NOT = {"type": "object", "properties": {"b": {"type": "array", "items": {"not": {}}}}}


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        (
            {"response_format": WRAPPED | {"json_schema": {"schema": NOT}}},
            "response_format.json_schema.schema",
            "#/properties/b/items",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is required"),
        ({"response_format": WRAPPED | {"type": "json_object"}}, "response_format.json_schema", "type json_object"),
        ({"response_format": WRAPPED | {"type": "text"}}, "response_format.json_schema", "type text"),
        ({"response_format": WRAPPED | {"triggers": ["<f>"]}}, "response_format.triggers", "type json_schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "type must be one of"),
        ({"structured_outputs": {"structural_tag": {"format": {"type": "tag"}}}}, "structured_outputs.structural_tag", "at format"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex", "together with response_format"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex", "one grammar"),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
            "layout",
        ),
        ({"structured_outputs": {"json": "[1", "disable_any_whitespace": True}}, "structured_outputs.json", "a JSON schema"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "a structural tag"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "1 to"),
        ({"guided_grammar": "root ::= nope"}, "guided_grammar", "nope"),
        ({"guided_json": "[1"}, "guided_json", "JSON schema"),
        ({"guided_json": {"type": "strin"}}, "guided_json", "strin (at #)"),
        ({"json_schema": {"$ref": "#/$defs/x"}}, "json_schema", "does not exist"),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_what_cannot_be_compiled_is_a_400_that_names_the_place(client: Client, fields: dict[str, Any], param: str, said: str):
    error = refusal(client.post(CHAT, messages=USER, **fields), 400)
    assert error["param"] == param and said in error["message"], error
    assert client.engine.params == []


HOSTILE = {
    "deep": '{"type": "array", "items": ' * 5000 + "{}" + "}" * 5000,
    "deep, within JSON's limits": '{"items": ' * 120 + "{}" + "}" * 120,
    "many": json.dumps({"enum": [f"{number}" * 9 for number in range(3000)]}),
    "exponential": json.dumps(
        {"$defs": {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(30)} | {"d30": {}}, "$ref": "#/$defs/d0"}
    ),
    "a loop": json.dumps({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    "a pattern": json.dumps({"type": "string", "pattern": "((a{1,100}){1,100}){1,100}"}),
    "another": json.dumps({"type": "string", "pattern": "^.*(a|b).{500}(c|d).{500}$"}),
    "half a pair": '{"const": "\\ud800"}',
    "numbers": '{"minimum": 1e999}',
}


def test_hostile_schemas_end_nothing(client: Client):
    """They are refused or served, each within seconds; the `client` fixture checks that the server lives on."""
    for name, schema in HOSTILE.items():
        response = client.post(COMPLETIONS, prompt="x", guided_json=schema)
        assert response.status_code in (200, 400), (name, response.text)


def test_a_pydantic_model_is_a_schema():
    class Answer(BaseModel):
        a: int

    kind, text = SamplingParams(json_schema=Answer).constraint
    assert kind == "json_schema" and json.loads(text) == Answer.model_json_schema()
