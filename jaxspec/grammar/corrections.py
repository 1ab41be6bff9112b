"""JSON schemas for which llguidance does what the given ones say, where it does something else."""

import re
from typing import Any

OF_ONE = ("items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else")
OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
OF_MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
"""Keywords whose values are a schema, schemas by name, and a list of schemas."""

OTHERS = re.compile(r"\\.|\[\^(\]|-*)", re.DOTALL)  # where the set of all characters but some begins; what is escaped does not


def corrected(schema: Any) -> Any:
    """A schema, or a list of them, for which llguidance does what the given one says."""
    if isinstance(schema, list):
        return list(map(corrected, schema))
    if not isinstance(schema, dict):
        return schema
    made = {name: corrected(value) if name in OF_ONE + OF_MANY else value for name, value in schema.items()}
    for name in OF_NAMES:
        if isinstance(parts := schema.get(name), dict):
            key = _without_null if name == "patternProperties" else str
            made[name] = {key(of): corrected(part) for of, part in parts.items()}
    if isinstance(pattern := schema.get("pattern"), str):
        made["pattern"] = _without_null(pattern)
    return made


def _without_null(pattern: str) -> str:
    """The pattern with U+0000 in none of its negated sets: where a set has all control characters, llguidance adds quotes and
    backslashes to it."""
    return OTHERS.sub(lambda found: found[0] if found[0][0] == "\\" else rf"{found[0]}[\x00]", pattern)
