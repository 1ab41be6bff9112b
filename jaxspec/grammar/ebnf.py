"""EBNF, as llama.cpp and xgrammar read it, written as Lark's, which llguidance reads.

llguidance would do so itself, but makes terminals of rules that are made of characters only, and Lark's terminals take all
they can: after `[0-9]+` no digit could follow. Here each character is a terminal of its own, so a grammar describes just what its
rules say.
"""

import json
import re
import sys

MOST_CHARACTERS = 60_000
"""In strings; llguidance ends at 65,525 symbols in all."""
_RULE = re.compile(r"^[^\S\n]*[\w-]+[^\S\n]*::=", re.MULTILINE)
_TOKEN = re.compile(
    r"""(?:\s|\#[^\n]*)+
    | (?P<rule>[\w-]+)\s*::=
    | (?P<name>[\w-]+)
    | "(?P<string>(?:[^"\\]|\\.)*)"
    | \[(?P<negated>\^?)(?P<set>(?:[^\]\\]|\\.)*)\]
    | (?P<sign>[()|*+?] | \{\s*\d+\s*(?:,\s*\d*\s*)?\})
    | (?P<any>\.)""",
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|.", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}


def as_lark(ebnf: str) -> str:
    """The same rules in Lark's syntax, with `root` as its `start`. Rules that are Lark's already, with single colons, stay as they
    are. Raises ValueError."""
    if not _RULE.search(ebnf):
        return ebnf
    names, defined, written, characters, at = {"root": "start"}, set[str](), list[str](), 0, 0
    while at < len(ebnf):
        if (token := _TOKEN.match(ebnf, at)) is None:
            raise ValueError(f"can't be read as EBNF at {ebnf[at : at + 30]!r} (line {ebnf.count('\n', 0, at) + 1})")
        at, kind = token.end(), token.lastgroup
        text = token[kind] if kind else ""
        if kind == "rule" and text in defined:
            raise ValueError(f"has two rules named {text:.80}")
        match kind:
            case "rule":
                defined.add(text)
                written.append(f"\n{names.setdefault(text, f'r{len(names)}')}:")
            case "name":
                written.append(names.setdefault(text, f"r{len(names)}"))
            case "string":
                every = [json.dumps(_character(found), ensure_ascii=False) for found in _CHARACTER.finditer(text)]
                characters += len(every)
                written.append(f"({' '.join(every) or '""'})".replace("\x7f", r"\x7f"))
            case "set":
                written.append(f"/[{token['negated']}{_CHARACTER.sub(_in_set, text)}]/")
            case "any":
                written.append(r"/(.|\n)/")
            case "sign":
                written.append("".join(text.split()))
    if missing := names.keys() - defined:
        raise ValueError(f"has no rule named {min(missing):.80}")
    if characters > MOST_CHARACTERS:
        raise ValueError(f"has {characters} characters in strings, and EBNF may have {MOST_CHARACTERS}: write it in Lark's syntax")
    return " ".join(written)


def _character(found: re.Match[str]) -> str:
    """What a character stands for, escaped or not. Raises ValueError."""
    code, named = found[1] or found[2] or found[3], found[4]
    number = int(code or "0", 16)
    is_none = number > sys.maxunicode or 0xD800 <= number < 0xE000  # beyond Unicode, or half of a surrogate pair
    if is_none or (named is not None and named.isalnum() and named not in _ESCAPED):
        raise ValueError(f"has the unknown escape {found[0]}")
    if code:
        return chr(number)
    return found[0] if named is None else _ESCAPED.get(named, named)


def _in_set(found: re.Match[str]) -> str:
    """A character as a regular expression's set has it; only a bare dash, which makes a range, stays as it is."""
    return "-" if found[0] == "-" else f"\\x{{{ord(_character(found)):x}}}"
