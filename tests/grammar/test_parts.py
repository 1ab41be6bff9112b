"""What the generated cases are judged by: the recognizer agrees with Python's regular expressions and follows rules that begin with
themselves; and the library takes all that is generated."""

import itertools
import random
import re

import pytest

from jaxspec.grammar import compiling
from jaxspec.grammar.vocabulary import source_of
from jaxspec.testing import TinyTokenizer
from tests.grammar.parts import OneOf, Recognizer, Row, RuleName, as_ebnf, as_lark, as_regex, random_part, random_rules


def test_the_recognizer_agrees_with_pythons_regular_expressions():
    rng, accepted = random.Random(3), 0
    for _ in range(300):
        part = random_part(rng)
        pattern = re.compile(as_regex(part))
        for text in ("".join(rng.choices("ab0x", k=rng.randint(0, 4))) for _ in range(40)):
            fits = Recognizer({"start": part}, text).accepts()
            assert fits == (pattern.fullmatch(text) is not None), (pattern, text)
            accepted += fits
    assert accepted > 50


@pytest.mark.parametrize("rule", [OneOf((Row((RuleName("start"), "c")), "d")), OneOf((Row(("d", RuleName("tail"))), "d"))])
def test_rules_may_begin_or_end_with_themselves(rule):
    rules = {"start": rule, "tail": OneOf((Row(("c", RuleName("tail"))), "c"))}
    texts = ["".join(each) for length in range(5) for each in itertools.product("cd", repeat=length)]
    assert [text for text in texts if Recognizer(rules, text).accepts()] == ["d", "dc", "dcc", "dccc"]


def test_the_library_takes_what_is_generated():
    rng, vocabulary = random.Random(4), source_of(TinyTokenizer(), 256, (0,)).load()
    refused = []
    for _ in range(100):
        rules = random_rules(rng)
        for kind, text in (("grammar", as_ebnf(rules)), ("grammar", as_lark(rules)), ("regex", as_regex(random_part(rng)))):
            try:
                compiling.compiled(vocabulary, kind, text)
            except ValueError as error:
                refused.append((kind, text, str(error)))
    assert not refused
