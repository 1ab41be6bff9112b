"""Random regular expressions and small grammars, how they are written, and which texts they describe, without the library."""

import json
import random
import re
from collections.abc import Mapping
from typing import NamedTuple


class Chars(NamedTuple):
    """One of some characters, or any other one."""

    chars: str
    is_negated: bool = False


class RuleName(NamedTuple):
    """The text of a rule of the same grammar."""

    name: str


class Row(NamedTuple):
    """Parts, one after the other."""

    parts: "tuple[Part, ...]"


class OneOf(NamedTuple):
    """Any of some parts."""

    parts: "tuple[Part, ...]"


class Repeated(NamedTuple):
    """A part, so many times; None: any number."""

    part: "Part"
    least: int
    most: int | None


type Part = str | Chars | RuleName | Row | OneOf | Repeated
"""str: just this."""

TEXTS = ("a", "b", "ab", "abc", "x", "-", "(", ")", '"', "\\", " ", ",", ".", "0", "+", "\n", "/", "é", "B", "*")
SETS = ("abc", "0123456789", "xyzXYZ", "_a", "ab01")
TIMES = ((0, 1), (0, 1), (0, None), (1, None), (2, 3), (0, 2), (1, 3), (2, 2))
NAMES = ("start", "item", "tail")


def random_part(rng: random.Random, names: tuple[str, ...] = (), depth: int = 0) -> Part:
    """`names`: of the rules that it may hold. No repetition is directly in another: in EBNF the library loses their brackets."""
    kinds = ["text", "text", "chars"] + ["repeated", "row", "row", "one of"] * (depth < 3) + ["rule"] * bool(names and depth)
    match rng.choice(kinds) if depth else "row":
        case "chars":
            return Chars(rng.choice(SETS), rng.random() < 0.1)
        case "repeated":
            part = random_part(rng, names, depth + 1)
            return Repeated(part.part if isinstance(part, Repeated) else part, *rng.choice(TIMES))
        case "row":
            return Row(tuple(random_part(rng, names, depth + 1) for _ in range(rng.randint(2, 3))))
        case "one of":
            return OneOf(tuple(random_part(rng, names, depth + 1) for _ in range(rng.randint(2, 3))))
        case "rule":
            return RuleName(rng.choice(names))
    return rng.choice(TEXTS)


def random_rules(rng: random.Random) -> dict[str, Part]:
    """Rules that may hold one another, and themselves. Each has a way out."""
    return {name: OneOf((random_part(rng, NAMES), random_part(rng, depth=2))) for name in NAMES}


def as_regex(part: Part) -> str:
    """In the common part of Rust's and Python's syntax."""
    match part:
        case Chars(chars, is_negated):
            return f"[{'^' * is_negated}{chars}]"
        case Row(parts):
            return "".join(map(as_regex, parts))
        case OneOf(parts):
            return f"({'|'.join(map(as_regex, parts))})"
        case Repeated(each, least, most):
            return f"({as_regex(each)}){times(least, most)}"
    return re.escape(str(part)).replace("\\\n", "\\n").replace("\\ ", " ")


def times(least: int, most: int | None) -> str:
    """The shortest way to write it."""
    short = {(0, 1): "?", (0, None): "*", (1, None): "+"}.get((least, most))
    return short or f"{{{least},{'' if most is None else most}}}"


def as_lark(rules: Mapping[str, Part]) -> str:
    """Lark's syntax."""
    return "\n".join(f"{name}: {rule_text(part, '/')}" for name, part in rules.items())


def as_ebnf(rules: Mapping[str, Part]) -> str:
    """The syntax of llama.cpp."""
    named = re.compile(r"\bstart\b")
    return "\n".join(named.sub("root", f"{name} ::= {rule_text(part, '')}") for name, part in rules.items())


def rule_text(part: Part, around_chars: str) -> str:
    match part:
        case Chars():
            return f"{around_chars}{as_regex(part)}{around_chars}"
        case RuleName(name):
            return name
        case Row(parts):
            return " ".join(rule_text(each, around_chars) for each in parts)
        case OneOf(parts):
            return f"({' | '.join(rule_text(each, around_chars) for each in parts)})"
        case Repeated(each, least, most):
            return f"({rule_text(each, around_chars)}){times(least, most)}"
    return json.dumps(part, ensure_ascii=False)


class Recognizer:
    """Says whether rules describe a text. What is known of each rule and place grows until nothing is new: rules may recur."""

    def __init__(self, rules: Mapping[str, Part], text: str):
        self._rules, self._text = rules, text
        self._known: dict[tuple[str, int], set[int]] = {}

    def accepts(self) -> bool:
        """Whether the text is one of the first rule's."""
        whole, before = self._ends(RuleName(next(iter(self._rules))), 0), -1
        while (size := sum(map(len, self._known.values())) + len(self._known)) != before:
            before = size
            for name, at in list(self._known):
                self._known[name, at] |= self._ends(self._rules[name], at)
        return len(self._text) in whole

    def _ends(self, part: Part, at: int) -> set[int]:
        """Where the part may end that begins here."""
        match part:
            case str():
                return {at + len(part)} if self._text.startswith(part, at) else set()
            case Chars(chars, is_negated):
                return {at + 1} if at < len(self._text) and (self._text[at] in chars) != is_negated else set()
            case RuleName(name):
                return self._known.setdefault((name, at), set())
            case OneOf(parts):
                return set().union(*(self._ends(each, at) for each in parts))
            case Row(parts):
                places = {at}
                for each in parts:
                    places = self._behind(each, places)
                return places
            case Repeated(each, least, most):
                places, found = {at}, {at} if least == 0 else set()
                for count in range(1, 1 + (max(least, len(self._text)) if most is None else most)):
                    places = self._behind(each, places)
                    if count >= least:
                        found |= places
                return found
        raise TypeError(f"{part} is no part")

    def _behind(self, part: Part, places: set[int]) -> set[int]:
        return set().union(*(self._ends(part, place) for place in places))
