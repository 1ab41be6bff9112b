"""Structured output in requests: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`, and SGLang's
`json_schema`, `regex` and `ebnf`, and the structural tags of both. A request may use one of them."""

import contextlib
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from jaxspec.sampling_params import MAX_GRAMMAR
from jaxspec.server.errors import wrong
from jaxspec.server.fields import Only, RequestModel, Schema, StringOrStrings, described_as

type GrammarText = Annotated[str, Field(max_length=MAX_GRAMMAR)]
ANY_OBJECT = '{"type": "object"}'
FIXED_LAYOUT = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
"""As json.dumps writes it in Python: all on one line, with a space after each comma and colon. More of the text is forced."""
STRUCTURAL_TAG = {"format", "structures", "triggers"}
OF_TYPE = {"json_schema": {"json_schema"}, "structural_tag": STRUCTURAL_TAG}
"""What belongs to a type of response_format, by type."""


class JsonSchemaFormat(RequestModel):
    """OpenAI's wrapping of a schema."""

    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    """None: any JSON object."""
    strict: bool | None = None
    """Accepted without effect: the text always fits the schema."""


class ResponseFormat(RequestModel):
    """OpenAI's, and with type structural_tag SGLang's and vLLM's."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    """With type json_schema."""
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    """With type structural_tag: the first, or in its older form the other two."""


class StructuredOutputs(RequestModel):
    """vLLM's: one of the first six."""

    json_: Schema | None = Field(default=None, alias="json")
    regex: GrammarText | None = None
    choice: StringOrStrings = None
    grammar: GrammarText | None = None
    json_object: bool | None = None
    structural_tag: Annotated[str | dict[str, Any], described_as("a structural tag: an object or its text")] | None = None
    disable_any_whitespace: bool | None = None
    """True: JSON has a fixed layout (FIXED_LAYOUT)."""
    disable_additional_properties: Annotated[Any, Only(False)] = None
    disable_fallback: bool | None = None
    """Accepted without effect: there is one library."""
    whitespace_pattern: Annotated[Any, Only()] = None


class StructuredFields(RequestModel):
    """The fields of completions and chat completions, besides those that are parameters of their own."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    """vLLM's."""
    guided_json: Schema | None = None
    guided_regex: GrammarText | None = None
    guided_choice: StringOrStrings = None
    guided_grammar: GrammarText | None = None
    """vLLM's older names."""


class Given(NamedTuple):
    """A constraint of a request."""

    field: str
    """The client's field."""
    name: str
    """Our parameter."""
    value: Any


def given_constraint(body: Any) -> Given | None:
    """The constraint of an OpenAI request (StructuredFields, and the parameters json_schema, regex and ebnf). Raises ApiError if
    there are several, or half of one."""
    found = list(_given(body))
    if len(found) > 1:
        first, second = found[0].field, found[1].field
        raise wrong(second, f"can't be given together with {first}: a text follows one grammar")
    given = found[0] if found else None
    if body.structured_outputs is None or not body.structured_outputs.disable_any_whitespace:
        return given
    if given is None or given.name != "json_schema":
        field = "structured_outputs.disable_any_whitespace"
        raise wrong(field, "needs a JSON schema or json_object: it is about the layout of JSON")
    return given._replace(value=in_fixed_layout(given.value))


def _given(body: Any) -> Iterator[Given]:
    asked = body.response_format
    for name in () if asked is None else sorted({"json_schema", *STRUCTURAL_TAG} - OF_TYPE.get(asked.type, set())):
        if getattr(asked, name) is not None:
            raise wrong(f"response_format.{name}", f"has no meaning with type {asked.type}: leave one out")
    if asked is not None and asked.type == "json_object":
        yield Given("response_format", "json_schema", ANY_OBJECT)
    elif asked is not None and asked.type == "json_schema":
        if asked.json_schema is None:
            raise wrong("response_format.json_schema", "is required with type json_schema")
        schema = asked.json_schema.schema_
        yield Given("response_format.json_schema.schema", "json_schema", ANY_OBJECT if schema is None else schema)
    elif asked is not None and asked.type == "structural_tag":
        yield Given("response_format", "structural_tag", asked.model_dump(include=STRUCTURAL_TAG, exclude_none=True))
    if (outputs := body.structured_outputs) is not None:
        if outputs.json_object:
            yield Given("structured_outputs.json_object", "json_schema", ANY_OBJECT)
        yield from _present(
            Given("structured_outputs.json", "json_schema", outputs.json_),
            Given("structured_outputs.regex", "regex", outputs.regex),
            Given("structured_outputs.choice", "choice", outputs.choice),
            Given("structured_outputs.grammar", "grammar", outputs.grammar),
            Given("structured_outputs.structural_tag", "structural_tag", outputs.structural_tag),
        )
    yield from _present(
        Given("guided_json", "json_schema", body.guided_json),
        Given("guided_regex", "regex", body.guided_regex),
        Given("guided_choice", "choice", body.guided_choice),
        Given("guided_grammar", "grammar", body.guided_grammar),
        Given("json_schema", "json_schema", body.json_schema),
        Given("regex", "regex", body.regex),
        Given("ebnf", "grammar", body.ebnf),
    )


def in_fixed_layout(schema: str | dict[str, Any]) -> str | dict[str, Any]:
    """The schema with this layout, unless it asks for another. Anything else stays as it is: the engine refuses it."""
    with contextlib.suppress(ValueError, RecursionError):
        read = json.loads(schema) if isinstance(schema, str) else schema
        if isinstance(read, dict) and isinstance(own := read.get("x-guidance", {}), dict):
            return {"x-guidance": FIXED_LAYOUT["x-guidance"] | own, **{name: read[name] for name in read if name != "x-guidance"}}
    return schema


def _present(*each: Given) -> Iterator[Given]:
    return (given for given in each if given.value is not None)
