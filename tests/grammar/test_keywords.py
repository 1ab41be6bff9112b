"""Every keyword of JSON Schema: followed, or refused by name."""

import json
from typing import Any

import jsonschema
import pytest

from jaxspec.grammar.cache import Grammars
from jaxspec.grammar.vocabulary import holds
from jaxspec.testing import TinyTokenizer
from tests.grammar.keywords import KEYWORDS, NOTHING, PROGRAMS, REFUSED, WHOLE, Keyword, fields
from tests.grammar.test_matcher import END, NO_BANS


@pytest.fixture(scope="module")
def grammars():
    made = Grammars(TinyTokenizer(), 256, (END,))
    yield made
    made.close()


def allows(grammars: Grammars, schema: Any, value: Any, *, ensure_ascii: bool = False) -> bool:
    """Whether the value may be written, and the text may end with it."""
    walker = grammars.matcher(("json_schema", json.dumps(schema)), NO_BANS)
    text = json.dumps(value, ensure_ascii=ensure_ascii).encode()
    for index, byte in enumerate(text):
        if not holds(walker.step.words, byte):
            return False
        if walker.advance([byte], None)[2]:
            return index == len(text) - 1
    return holds(walker.step.words, END)


@pytest.mark.parametrize("name", [name for name in KEYWORDS | PROGRAMS if name not in REFUSED])
def test_what_a_schema_says_is_followed(grammars, name):
    each: Keyword = (KEYWORDS | PROGRAMS)[name]
    if each.valid is not NOTHING:
        assert allows(grammars, each.schema, each.valid)
        assert validator(each.schema).is_valid(each.valid), "the table is right"
    assert each.invalid is NOTHING or not allows(grammars, each.schema, each.invalid)


def test_a_name_is_written_in_one_way(grammars):
    """With escapes it would be another one, which may have any value."""
    assert not allows(grammars, fields(é=WHOLE), {"é": None}, ensure_ascii=True)


def validator(schema: Any) -> jsonschema.protocols.Validator:
    """Of the draft that the schema is written in."""
    draft = jsonschema.Draft7Validator if "additionalItems" in schema else jsonschema.Draft202012Validator
    return jsonschema.validators.validator_for(schema, draft)(schema)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_followed_is_refused_by_name(grammars, name):
    with pytest.raises(ValueError, match=r"^json_schema can't be compiled: ") as refusal:
        grammars.matcher(("json_schema", json.dumps((KEYWORDS | PROGRAMS)[name].schema)), NO_BANS)
    assert REFUSED[name] in str(refusal.value)
