"""EBNF describes just what its rules say."""

import random

import pytest

from jaxspec.grammar.compiling import compiled
from jaxspec.grammar.vocabulary import source_of
from jaxspec.testing import TinyTokenizer
from tests.grammar.parts import Recognizer, as_ebnf, random_rules

UNKNOWN = (r'"\Uffffffff"', r'"\U00110000"', r"[a-\U00110000]", r'"\uD800"', r"[\ud800]")
VOCABULARY = source_of(TinyTokenizer(), 256, (0,)).load()


def fits(grammar: str, text: str) -> bool:
    matcher = compiled(VOCABULARY, "grammar", grammar).deep_copy()
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


def test_the_recognizer_agrees():
    rng, accepted = random.Random(5), 0
    for rules in (random_rules(rng) for _ in range(60)):
        for text in ("".join(rng.choices("aaab01x", k=rng.randint(0, 4))) for _ in range(20)):
            expected = Recognizer(rules, text).accepts()
            assert fits(as_ebnf(rules), text) == expected, (as_ebnf(rules), text)
            accepted += expected
    assert accepted > 30


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('root ::= name " is " age "."\nname ::= [A-Za-z ]+\nage ::= [0-9]+', "Ann who is old is 50."),
        ('root ::= num "0"\nnum ::= [0-9]+', "120"),
        (r'root ::= "\u00e9\u0041\x42\U0001F600\\u0041" [\u00e0-\xff] [^\]^-] [\]-]', "éAB😀\\u0041é[-"),
        ('root ::= "a"\n  | x-y # "or"\n\nx-y::=start{2,}(startUp{1, 2})+\nstart ::= "b"\nstartUp ::= . ""', "bb\n"),
        ('?start: a\n!a: "::="', "::="),
    ],
)
def test_grammars(grammar, text):
    assert fits(grammar, text) and not fits(grammar, text[:-1])


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('x ::= "a"', "no rule named root"),
        ('root ::= "a"\nroot ::= "b"', "two rules named root"),
        ('root ::=\n "a" "b', r"at '\"b' \(line 2\)"),
        (r'root ::= "\d"', r"unknown escape \\d"),
        *((f"root ::= {text}", "unknown escape ..0*(ffffffff|110000|[dD]800)") for text in UNKNOWN),
        (f'root ::= "{"a" * 60_001}"', "60001 characters"),
    ],
)
def test_what_is_refused(grammar, reason):
    with pytest.raises(ValueError, match=reason):
        fits(grammar, "")
