"""Rewrites JSON schemas where llguidance would not do what they say, so that it does."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

OF_ONE = ("items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else")
OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
OF_MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
"""Keywords whose values are a schema, schemas by name, and a list of schemas."""

LARGEST = 2**63 - 1024  # llguidance computes with doubles and 64-bit integers: this is the last that is both
BOUNDS = (("minimum", "exclusiveMinimum", max, 1), ("maximum", "exclusiveMaximum", min, -1))
LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
DAY = f"^([0-9]{{4}}-(0[13-9]|1[0-2]|02-([01][0-9]|2[0-8]))|{LEAP_YEAR}-02-29)"
REAL = {"date": DAY, "date-time": f"{DAY}.*[tT].{{6}}[0-5]", "time": "^.{6}[0-5]"}
"""Patterns of formats in which llguidance has 29 days in each February, and 61 seconds in each minute."""
OTHERS = re.compile(r"\\.|\[\^(\]|-*)", re.DOTALL)  # where a negated set begins, or an escaped character, which begins none


def corrected(schema: Any) -> Any:
    """A schema, or a list of them, for which llguidance does what the given one says. Raises ValueError if there is none."""
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
    real, others = REAL.get(str(schema.get("format"))), made.get("allOf", [])
    if real is not None and isinstance(others, list):
        made["allOf"] = [*others, {"pattern": real}]
    json.loads(json.dumps([schema.get("const"), schema.get("enum")]), parse_int=_exact)
    return made | _bounds(schema)


def _without_null(pattern: str) -> str:
    """The pattern with U+0000 in none of its negated sets: where a set has all control characters, llguidance adds quotes and
    backslashes to it."""
    return OTHERS.sub(lambda found: found[0] if found[0][0] == "\\" else rf"{found[0]}[\x00]", pattern)


def _exact(digits: str) -> int:
    if abs(number := int(digits)) > LARGEST or float(number) != number:
        raise ValueError(f"{digits[:40]} in const or enum can't be followed, as it would be rounded: let it be a string")
    return number


def _bounds(schema: Mapping[str, Any]) -> dict[str, float]:
    """The bounds of numbers. One that no double equals becomes the next double inside; an excluded whole number next to which only
    fractions fit becomes a number just inside, as llguidance would allow the whole number."""
    made = {}
    for *names, inner, way in BOUNDS:
        for name in names:
            at = schema.get(name)
            if isinstance(at, int | float) and not isinstance(at, bool) and abs(at := inner(at, -way * LARGEST)) <= LARGEST:
                if (near := float(at)) != at:
                    at = int(near if inner(near, at) == near else math.nextafter(near, way * math.inf))
                made[name] = at
    for (included, excluded, inner, way), (*opposite, _, _) in zip(BOUNDS, BOUNDS[::-1], strict=True):
        at = made.get(included if schema.get(excluded) is True else excluded, 0.5)
        if at % 1 == 0 and any(abs(made.get(name, math.inf) - at) < 1 for name in opposite):
            beside = at + way * (abs(at) * 1e-12 or 1e-30)
            made[included] = inner(beside, made.get(included, beside))
    return made
