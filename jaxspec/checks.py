"""Checks of values from outside: types and ranges, with messages that name what is wrong. Plain Python, no JAX.

Sampling parameters and the JSON files of model directories are declared with them.
"""

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple


class Whole(NamedTuple):
    """A whole number from `least` to `most` (None: any)."""

    least: int
    most: int | None = None

    def clean(self, name: str, value: Any) -> int:
        """The value as an int. Raises ValueError, naming the parameter."""
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
        """The value as Python's number. Raises ValueError, naming the parameter."""
        if not is_number(value) or not self.least <= value <= self.most:
            raise ValueError(f"{name} must be a number between {self.least} and {self.most}, got {short(value)}")
        if self.above and value == self.least:
            raise ValueError(f"{name} must be above {self.least}, got {short(value)}")
        return value if isinstance(value, int | float) else float(value)


class Seed(NamedTuple):
    """A whole number of 64 bits, with or without sign."""

    def clean(self, name: str, value: Any) -> int:
        """The value as an int. Raises ValueError, naming the parameter."""
        if not is_int(value) or not -(2**63) <= value < 2**64:
            raise ValueError(f"{name} must be a 64-bit whole number, got {short(value)}")
        return int(value)


class Flag(NamedTuple):
    """True or False."""

    def clean(self, name: str, value: Any) -> bool:
        """The value. Raises ValueError, naming the parameter."""
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {short(value)}")
        return value


class StringList(NamedTuple):
    """One string or several, none of them empty."""

    most: int
    longest: int
    """Characters."""

    def clean(self, name: str, value: Any) -> tuple[str, ...]:
        """The strings as a tuple. Raises ValueError, naming the parameter."""
        strings = (value,) if isinstance(value, str) else value
        if not isinstance(strings, tuple | list) or not all(isinstance(string, str) for string in strings):
            raise ValueError(f"{name} must be a string or a list of strings, got {short(value)}")
        if any(not 0 < len(string) <= self.longest for string in strings) or len(strings) > self.most:
            raise ValueError(f"{name} takes up to {self.most} strings of 1 to {self.longest} characters")
        return tuple(strings)


class IdList(NamedTuple):
    """A list of token ids."""

    least: int = 0
    """The least number of ids."""
    most: int | None = None

    def clean(self, name: str, value: Any) -> tuple[int, ...]:
        """The ids as a tuple. Raises ValueError, naming the parameter."""
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
        """Pairs of token id and number. Raises ValueError, naming the parameter."""
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
        """The value. Raises ValueError, naming the parameter."""
        if not isinstance(value, str) or len(value) > self.longest:
            raise ValueError(f"{name} must be a string of at most {self.longest} characters, got {short(value)}")
        return value


class ListOf(NamedTuple):
    """A list whose items all pass a check."""

    item: "Check"
    most: int = 10_000

    def clean(self, name: str, value: Any) -> list[Any]:
        """The cleaned items. Raises ValueError, naming the first wrong one."""
        if not isinstance(value, list) or len(value) > self.most:
            raise ValueError(f"{name} must be a list of at most {self.most} items, got {short(value)}")
        return [self.item.clean(f"{name}.{index}", each) for index, each in enumerate(value)]


class OneOrList(NamedTuple):
    """A value that passes a check, or a list of such values."""

    item: "Check"

    def clean(self, name: str, value: Any) -> Any:
        """The cleaned value or values. Raises ValueError, naming the first wrong one."""
        return ListOf(self.item).clean(name, value) if isinstance(value, list) else self.item.clean(name, value)


class Fields(NamedTuple):
    """A JSON object. The listed fields must pass their checks, be missing or, with `nulls`, be null; others may be anything."""

    checks: "Mapping[str, Check]"
    nulls: bool = True

    def clean(self, name: str, value: Any) -> dict[str, Any]:
        """The object with its fields cleaned. Raises ValueError, naming the first wrong one."""
        if not isinstance(value, dict):
            raise ValueError(f"{name} must be an object, got {short(value)}")
        known = {key: value[key] for key in self.checks if key in value and not (self.nulls and value[key] is None)}
        return value | {key: self.checks[key].clean(f"{name}: {key}", each) for key, each in known.items()}


class ObjectOf(NamedTuple):
    """A JSON object whose values all pass a check."""

    value: "Check"

    def clean(self, name: str, value: Any) -> dict[str, Any]:
        """The object with cleaned values. Raises ValueError, naming the first wrong one."""
        if not isinstance(value, dict):
            raise ValueError(f"{name} must be an object, got {short(value)}")
        return {key: self.value.clean(f"{name}: {short(key)}", each) for key, each in value.items()}


type Check = Whole | Number | Seed | Flag | StringList | IdList | Biases | Text | ListOf | OneOrList | Fields | ObjectOf


def is_int(value: Any) -> bool:
    """Whether it is a whole number, NumPy's included; bool, which Python counts as int, is not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether it is a finite number, NumPy's included."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def short(value: object) -> str:
    """A value as an error message shows it: never more than 80 characters of what a client sent."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
