"""Checks of values from outside: types and ranges, with messages that name what is wrong. Plain Python, no JAX.

Sampling parameters are declared with them, and the attributes of config.json (config_json.py).
"""

import ast
import inspect
import itertools
import json
import math
import textwrap
from collections.abc import Container, Mapping, Sequence
from functools import cache
from numbers import Integral, Real
from typing import Any, NamedTuple, Protocol, TypeGuard

MAX_REASON = 200
"""Characters of a library's error message."""


class Check(Protocol):
    """What a value from outside must be."""

    def clean(self, name: str, value: Any) -> Any:
        """The value as Python's own types; strings, ids and biases as tuples.

        Raises ValueError, naming the parameter or its first wrong part.
        """


class Whole(NamedTuple):
    """A whole number from `least` to `most` (None: any)."""

    least: int
    most: int | None = None

    def clean(self, name: str, value: Any) -> int:
        if not is_int(value) or value < self.least or (self.most is not None and value > self.most):
            limits = f">= {self.least}" if self.most is None else f"from {self.least} to {self.most}"
            raise ValueError(f"{name} must be a whole number {limits}, got {short(value)}")
        return int(value)


class Number(NamedTuple):
    """A number from `least` to `most`; `above`: more than `least`."""

    least: float
    most: float
    above: bool = False

    def clean(self, name: str, value: Any) -> float:
        if not is_number(value) or not self.least <= value <= self.most:
            raise ValueError(f"{name} must be a number between {self.least} and {self.most}, got {short(value)}")
        if self.above and value == self.least:
            raise ValueError(f"{name} must be above {self.least}, got {short(value)}")
        return value if isinstance(value, int | float) else float(value)


class Seed(NamedTuple):
    """A whole number of 64 bits, with or without sign."""

    def clean(self, name: str, value: Any) -> int:
        if not is_int(value) or not -(2**63) <= value < 2**64:
            raise ValueError(f"{name} must be a 64-bit whole number, got {short(value)}")
        return int(value)


class Flag(NamedTuple):
    """True or False."""

    def clean(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {short(value)}")
        return value


class StringList(NamedTuple):
    """One string or several, none of them empty."""

    most: int
    longest: int
    """Characters."""
    least: int = 0
    """The least number of strings."""

    def clean(self, name: str, value: Any) -> tuple[str, ...]:
        strings = (value,) if isinstance(value, str) else value
        if not isinstance(strings, tuple | list) or not all(isinstance(string, str) for string in strings):
            raise ValueError(f"{name} must be a string or a list of strings, got {short(value)}")
        if any(not 0 < len(string) <= self.longest for string in strings) or not self.least <= len(strings) <= self.most:
            fewest = "up to" if not self.least else f"{self.least} to"
            raise ValueError(f"{name} takes {fewest} {self.most} strings of 1 to {self.longest} characters")
        return tuple(strings)


class IdList(NamedTuple):
    """A list of token ids."""

    least: int = 0
    """The least number of ids."""
    most: int | None = None

    def clean(self, name: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, tuple | list) or not all(is_int(token) and token >= 0 for token in value):
            raise ValueError(f"{name} must be a list of token ids, got {short(value)}")
        if self.most is not None and len(value) > self.most:
            raise ValueError(f"{name} takes up to {self.most} ids, got {len(value)}")
        if len(value) < self.least:
            raise ValueError(f"{name} must not be empty: no token could be drawn; leave it out to allow all")
        return tuple(map(int, value))


class Biases(NamedTuple):
    """Numbers between -limit and limit by token id."""

    limit: float
    most: int

    def clean(self, name: str, value: Any) -> tuple[tuple[int, float], ...]:
        pairs = tuple(value.items()) if isinstance(value, Mapping) else value
        if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise ValueError(f"{name} must map token ids to numbers, got {short(value)}")
        if len(pairs) > self.most:
            raise ValueError(f"{name} takes up to {self.most} tokens, got {len(pairs)}")
        for token, bias in pairs:
            if not is_int(token) or token < 0 or not is_number(bias) or not -self.limit <= bias <= self.limit:
                raise ValueError(
                    f"{name} must map token ids to numbers between {-self.limit} and {self.limit}, got {short({token: bias})}"
                )
        return tuple((int(token), bias if isinstance(bias, int | float) else float(bias)) for token, bias in pairs)


class Text(NamedTuple):
    """A string."""

    longest: int = 1000
    """Characters."""

    def clean(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or len(value) > self.longest:
            raise ValueError(f"{name} must be a string of at most {self.longest} characters, got {short(value)}")
        return value


class JsonSchema(NamedTuple):
    """A JSON schema: an object, its text, or a Pydantic model."""

    longest: int
    """Characters of its text."""
    what: str = "a JSON schema"

    def clean(self, name: str, value: Any) -> str:
        """Its text."""
        if isinstance(value, type):
            from pydantic import BaseModel  # a tenth of a second

            if issubclass(value, BaseModel):
                value = value.model_json_schema()
        try:
            schema = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            schema = None
        if not isinstance(schema, Mapping):
            raise ValueError(f"{name} must be {self.what}, an object, got {short(value)}")
        try:
            text, parts = "", json.JSONEncoder(ensure_ascii=False, allow_nan=False).iterencode(dict(schema))
            while len(text) <= self.longest and (part := next(parts, "")):  # with an object repeated, all may not fit the memory
                text += part
            text.encode()
        except (TypeError, ValueError, RecursionError) as error:  # such as an infinite number, or half of a surrogate pair
            raise ValueError(f"{name} can't be written as JSON: {error!s:.{MAX_REASON}}") from None
        if len(text) > self.longest:
            raise ValueError(f"{name} has more than {self.longest} characters")
        return text


class ListOf(NamedTuple):
    """A list whose items all pass a check."""

    item: Check
    most: int = 10_000

    def clean(self, name: str, value: Any) -> list[Any]:
        if not isinstance(value, list) or len(value) > self.most:
            raise ValueError(f"{name} must be a list of at most {self.most} items, got {short(value)}")
        return [self.item.clean(f"{name}.{index}", each) for index, each in enumerate(value)]


class OrNull(NamedTuple):
    """A value that passes a check, or null."""

    value: Check

    def clean(self, name: str, value: Any) -> Any:
        return None if value is None else self.value.clean(name, value)


class OneOrList(NamedTuple):
    """A value that passes a check, or a list of such values."""

    item: Check

    def clean(self, name: str, value: Any) -> Any:
        return ListOf(self.item).clean(name, value) if isinstance(value, list) else self.item.clean(name, value)


class Fields(NamedTuple):
    """A JSON object. The listed fields must pass their checks, be missing or, as far as `nulls` allows, be null; others may be
    anything."""

    checks: Mapping[str, Check]
    nulls: Container[str] | None = None
    """The fields that may be null. None: all."""

    def clean(self, name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError(f"{name} must be an object, got {short(value)}")
        null = {key for key in value if value[key] is None and (self.nulls is None or key in self.nulls)}
        known = {key: value[key] for key in self.checks if key in value and key not in null}
        return value | {key: self.checks[key].clean(f"{name}: {key}", each) for key, each in known.items()}


class ObjectOf(NamedTuple):
    """A JSON object whose values all pass a check."""

    value: Check

    def clean(self, name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError(f"{name} must be an object, got {short(value)}")
        return {key: self.value.clean(f"{name}: {short(key)}", each) for key, each in value.items()}


def is_int(value: Any) -> TypeGuard[int]:
    """Whether it is a whole number, NumPy's included; bool, which Python counts as int, is not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether it is a finite number, NumPy's included."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def require_least(settings: object, least: Mapping[str, int]) -> None:
    """Raises ValueError if one of these fields is below its bound. None passes."""
    for name, bound in least.items():
        if (value := vars(settings)[name]) is not None and value < bound:
            raise ValueError(f"{name} must be at least {bound}, got {value}")


def require_one_of(settings: object, known: Mapping[str, Sequence[str]]) -> None:
    """Raises ValueError if one of these fields is none of the values that are known for it."""
    for name, values in known.items():
        if vars(settings)[name] not in values:
            raise ValueError(f"{name} must be one of {', '.join(values)}, got {vars(settings)[name]!r:.80}")


def short(value: object) -> str:
    """A value as an error message shows it: never more than 80 characters of what a client sent."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def reason_of(error: BaseException | None) -> str:
    """The kind of an error, and the first line of what it says."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), ''):.300}"


@cache
def docstrings(config: Any) -> Mapping[str, str]:
    """The docstrings below the fields of a dataclass, each on one line."""
    (body,) = (node.body for node in ast.parse(textwrap.dedent(inspect.getsource(config))).body if isinstance(node, ast.ClassDef))
    found = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return found
