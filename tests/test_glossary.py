"""The glossary and the code use the same words."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORDS = (ROOT / "docs/glossary.md").read_text()
REPLACED_WORDS = {
    "wanted": "target tokens",
    "law": "distribution",
    "coins": "uniforms",
    "cut": "truncate",
    "leaning": "threshold acceptance",
    "postponed": "lag",
    "intake": "limits",
    "suspects": "blamed",
    "native": "sglang",
    "whoever": "the noun itself",
    "its": "the noun itself",
    "their": "the noun itself",
}
"""Words that were names once, and what we say now."""


def names(path: Path) -> set[str]:
    """Identifiers of a file: variables, attributes, functions, classes, parameters."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
    return found


@cache
def all_names() -> dict[Path, set[str]]:
    """Those of every file of the package."""
    return {path.relative_to(ROOT): names(path) for path in (ROOT / "jaxspec").rglob("*.py")}


def test_every_word_of_the_glossary_is_a_name_in_the_code():
    named = re.findall(r"^- \*\*.+\*\* \(`(\w+)`\): .+$", WORDS, re.MULTILINE)
    assert len(named) >= 45 and len(named) == WORDS.count("\n- ")
    assert not set(named) - set().union(*all_names().values())


def test_no_word_has_two_meanings():
    words = re.findall(r"^- \*\*(.+)\*\* ", WORDS, re.MULTILINE)
    assert words and len(words) == len(set(words)) and not set(words) & set(REPLACED_WORDS)


@pytest.mark.parametrize("word", REPLACED_WORDS)
def test_replaced_words_are_not_names(word):
    def parts(name: str) -> list[str]:
        return [part.lower() for part in re.findall(r"[A-Z]?[a-z]+", name)]

    assert not {(str(path), name) for path, found in all_names().items() for name in found if word in parts(name)}


def test_drafters_catch_up_and_pages_are_published():
    in_engine = (all_names()[Path(f"jaxspec/engine/{name}.py")] for name in ("pages", "scheduler"))
    pages = set().union(*in_engine)
    assert "publish" in pages and not [name for name in pages if "catch_up" in name]
