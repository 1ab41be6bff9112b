"""What may follow each node of a tree, and compiling: without an engine."""

import json
import random
import resource
import time

import numpy as np
import pytest

from jaxspec.grammar import cache, compiling, trial
from jaxspec.grammar.cache import Grammars, GrammarsBusy
from jaxspec.grammar.matcher import Bans, GrammarError, Matcher
from jaxspec.grammar.trees import TextTree, sources_of
from jaxspec.grammar.vocabulary import holds, packed, source_of
from jaxspec.server.structured import FIXED_LAYOUT
from jaxspec.testing import TinyTokenizer
from tests.grammar.cases import random_schema
from tests.server.fakes import byte_tokenizer

VOCABULARY, END = 128, 0
NO_BANS = Bans((END,))
SCHEMA = {"type": "object", "properties": {"name": {"enum": ["x", "yy"]}}, "required": ["name"], "additionalProperties": False}


@pytest.fixture(scope="module")
def grammars():
    made = Grammars(byte_tokenizer(size=VOCABULARY), VOCABULARY, (END,))
    yield made
    made.close()


def matcher(grammars: Grammars, kind: str, value: object, bans: Bans = NO_BANS) -> Matcher:
    return grammars.matcher((kind, value if isinstance(value, str) else json.dumps(value)), bans)


def tokens_of(words: np.ndarray) -> list[int]:
    return [token for token in range(VOCABULARY) if holds(words, token)]


@pytest.mark.parametrize("statm", [trial.STATM, "/nowhere/statm"], ids=["Linux", "without /proc"])
def test_a_schema_is_tried_and_measured_on_every_system(monkeypatch, statm):
    monkeypatch.setattr(trial, "STATM", statm)
    assert 2**20 < trial._used_bytes() < 2**36, "a Python process, in bytes"
    trying = trial.GrammarTrial()
    trying.reply({"vocabulary": source_of(TinyTokenizer(), VOCABULARY, (END,))._asdict()})
    reply = trying.reply({"kind": "json_schema", "text": json.dumps(SCHEMA)})
    assert reply["bytes"] >= trial.LEAST_BYTES and not reply["ended"]


def test_sets_of_tokens():
    words = packed([0, 33, 127, 500], 4)
    assert words.tolist() == [1, 2, 0, 2**31] and tokens_of(words) == [0, 33, 127]


def test_every_node_gets_the_mask_of_its_own_text(grammars):
    """That of a new matcher which has read the path to it; and the tree leaves no trace."""
    rng = random.Random(3)
    for _ in range(40):
        schema, bans = random_schema(rng), Bans((END,), bad=rng.sample(range(1, 128), rng.choice([0, 0, 9])))
        try:
            walker = matcher(grammars, "json_schema", schema, bans)
        except ValueError:
            continue  # the bans leave nothing
        text: list[int] = []
        for _ in range(rng.randrange(8)):
            allowed = [token for token in tokens_of(walker.step.words) if token != END]
            token = rng.choice(allowed or [END])
            if walker.advance([token], "stop" if token == END else None)[1] or not walker.step.words.any():
                break
            text.append(token)
        else:
            before = walker.step.words.copy()
            tokens, parents = random_tree(rng, walker, 10)
            masks = np.zeros((len(tokens), 4), np.uint32)
            empty = walker.masks(tokens, parents, masks)
            legal, _ = walker.legal(tokens[1:], [parent - 1 for parent in parents[1:]])
            for node in range(len(tokens)):
                path, at = [], node
                while at > 0:
                    path.insert(0, tokens[at])
                    at = parents[at]
                fresh = matcher(grammars, "json_schema", schema, bans)
                may = all(follow(fresh, token) for token in [*text, *path])
                assert node == 0 or legal[node - 1] == may
                if may and not fresh.step.is_end and END not in path:
                    assert masks[node].tolist() == fresh.step.words.tolist()
                    assert (node in empty) == (not fresh.step.words.any())
            assert (walker.step.words == before).all() and (masks[0] == before).all()


def follow(fresh: Matcher, token: int) -> bool:
    """Adds the token if it may follow."""
    if not holds(fresh.step.words, token):
        return False
    fresh.advance([token], "stop" if token == END else None)
    return True


def random_tree(rng: random.Random, walker: Matcher, count: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of nodes, most of which may follow."""
    tokens, parents = [1], [-1]
    for _ in range(count):
        masks = np.zeros((len(tokens), 4), np.uint32)
        walker.masks(tokens, parents, masks)
        parent = rng.randrange(len(tokens))
        likely = tokens_of(masks[parent])
        tokens.append(rng.choice(likely) if likely and rng.random() < 0.8 else rng.randrange(1, 128))
        parents.append(parent)
    return tokens, parents


def test_a_text_is_cut_where_its_grammar_ends(grammars):
    walker = matcher(grammars, "regex", "ab")
    assert walker.advance([ord("a"), ord("b"), ord("c")], None) == ([ord("a"), ord("b")], "stop", True)
    walker = matcher(grammars, "regex", "a{1,3}")
    assert walker.advance([ord("a"), END], "stop") == ([ord("a"), END], "stop", False)
    assert tokens_of(walker.step.words) == [END, ord("a")]
    assert walker.advance([ord("b"), ord("a")], None) == ([], None, False)
    with pytest.raises(GrammarError, match="does not allow token 98"):
        walker.check()


def test_a_node_that_nothing_can_follow_spoils_no_other(grammars):
    """The vocabulary can't write "é": after "b" the library gives up, and never works again."""
    walker, fresh = (matcher(grammars, "regex", "x(a[cd]{2}|bé)") for _ in range(2))
    tokens, parents = [ord(letter) for letter in "xbéacd"], [-1, 0, 1, 0, 3, 4]
    tokens[2] = 1
    for each in (walker, fresh):
        each.advance([ord("x")], None)
    masks = np.zeros((len(tokens), 4), np.uint32)
    assert walker.masks(tokens, parents, masks) == [1]
    legal, _ = walker.legal(tokens[1:], [parent - 1 for parent in parents[1:]])
    assert legal == [True, False, True, True, True]
    for node, text in ((3, "a"), (4, "c")):
        fresh.advance([ord(text)], None)
        assert masks[node].tolist() == fresh.step.words.tolist()
    assert masks[0].tolist() == walker.step.words.tolist()
    assert walker.advance([ord("a"), ord("c")], None) == ([ord("a"), ord("c")], None, False)
    walker.check()


def test_a_text_ends_before_a_token_that_nothing_can_follow(grammars):
    """Whether it comes alone or with others."""
    walker = matcher(grammars, "regex", "[a-z](a|bé)")
    assert walker.advance([ord("x"), ord("b")], None) == ([ord("x")], None, False)
    with pytest.raises(GrammarError, match="can't be followed"):
        walker.check()


def test_a_token_that_ends_texts_is_no_text(grammars):
    """Here it has bytes, too: those of the character 0."""
    assert END not in tokens_of(matcher(grammars, "regex", "[^a]{2}").step.words)


def tag_of(content: dict[str, str], end: str) -> str:
    return json.dumps({"format": {"type": "tag", "begin": "x", "content": content, "end": end}})


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("grammar", 'start: "x" /a+/ "ab"'),
        ("grammar", 'root ::= "x" a "ab"\na ::= "a"+'),
        ("structural_tag", tag_of({"type": "regex", "pattern": r"\\+"}, r"\a")),
        ("structural_tag", tag_of({"type": "grammar", "grammar": "start: /a+/"}, "ab")),
    ],
)
def test_what_can_only_repeat_itself_is_not_read_ahead(grammars, kind, text):
    """After "xa" only "a" may come, again and again. llguidance would read on without an end, and hold the engine where this comes
    later than the first token. It is tried in a process that is ended after two seconds."""
    grammars.tried((kind, text)).result()


def test_long_repetitions_are_noticed_in_no_time():
    assert compiling.may_run_on("regex", "x{1000000}y{0,3}") and not compiling.may_run_on("regex", "x{90}y{0,90}")
    started = time.monotonic()
    assert compiling.may_run_on("regex", "x{999999999999999999}" * 6000)
    assert time.monotonic() - started < 0.1


def test_space_that_can_only_repeat_itself_is_not_read_ahead():
    """As above, but only later: after a number and two spaces."""
    guided = {"whitespace_pattern": " +", "item_separator": " ,"}
    assert compiling.may_run_on("json_schema", json.dumps({"x-guidance": guided}))
    assert not any(
        compiling.may_run_on("json_schema", json.dumps(each))
        for each in ({"x-guidance": {"whitespace_flexible": False}}, FIXED_LAYOUT)
    )
    parts = {r"\s*x": False, r"(.|\n)*": False, r"\\s*": True, "[a]*": True, "a{2,}": True, "a{2}": False}
    assert {each: compiling.may_run_on("regex", each, is_part=True) for each in parts} == parts


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json_schema", {"const": "x" * 10_000}),
        ("json_schema", {"type": "array", "items": {"const": 1}, "minItems": 10**6, "x-guidance": {"whitespace_flexible": False}}),
        ("regex", "xx{1000000}"),
        ("regex", "(x{1000}){1000}"),
        ("choice", ["x" * 10_000]),
        ("structural_tag", {"format": {"type": "const_string", "value": "x" * 10_000}}),
    ],
)
def test_very_long_texts_are_not_read_ahead(grammars, kind, value):
    """It would take longer than the mask, again for every node."""
    assert matcher(grammars, kind, value).legal([ord("x")], [-1])[1] in ({-1: []}, {-1: [], 0: []})


def test_what_must_follow_is_drafted(grammars):
    walker = matcher(grammars, "regex", "(x|hello)[0-9]")
    legal, forced = walker.legal([ord("h"), ord("x"), ord("y")], [-1, -1, -1])
    assert legal == [True, True, False] and bytes(forced[0]) == b"ello" and not forced[-1] and 1 not in forced
    tree = TextTree([ord("h"), ord("x"), ord("e")], [-1, -1, 0], [-1.0, -0.5, -9.0], forced)
    tree.add_forced(3)
    tokens, parents, picked, added = tree.best(7, 5)
    assert (bytes(tokens[1:].tolist()), parents.tolist(), added) == (b"hxel", [-1, 0, 0, 1, 3], 1)
    assert sources_of(picked, np.array([1, 2, 3]), 5).tolist() == [0, 1, 2, 3, 0], "what was forced has none"
    assert sources_of(np.array([1, 4]), np.array([3, 2, 1]), 4).tolist() == [0, 2, 0, 0]


def test_a_schema_that_is_nested_too_deeply_is_refused(grammars):
    """What else can't be compiled: test_keywords.py, and over HTTP tests/server/test_structured.py."""
    with pytest.raises(ValueError, match=r"nested|recursion"):
        grammars.tried(("json_schema", '{"items": ' * 900 + "{}" + "}" * 900)).result()


def test_a_process_that_takes_too_long_is_replaced(grammars, monkeypatch):
    monkeypatch.setattr(cache, "TRIAL_SECONDS", 0.0)
    with pytest.raises(ValueError, match="more than 0 seconds"):
        grammars.tried(("regex", "slow")).result()
    monkeypatch.undo()
    assert grammars.tried(("regex", "slow")).result().bytes > 0
    assert grammars.tried(("regex", "slow")).done(), "it is kept"


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="other processes' limits can be read on Linux only")
def test_a_trial_has_no_more_stack_than_the_thread_that_compiles_afterwards(grammars):
    grammars.tried(("regex", "stack")).result()
    assert resource.prlimit(grammars._process._process.pid, resource.RLIMIT_STACK)[0] == trial.MAX_STACK


def test_kept_grammars_are_bounded(grammars):
    few = Grammars(TinyTokenizer(), VOCABULARY, (END,), most_bytes=1_200_000)
    for number in range(20):
        few.matcher(("regex", f"a{{{number + 1}}}"), Bans((END,)))
    assert 800_000 < few.kept_bytes <= 1_200_000
    few.close()


def test_grammars_of_requests_are_held_and_bounded(grammars, monkeypatch):
    few = Grammars(TinyTokenizer(), VOCABULARY, (END,), most_bytes=1)
    constraints = [("regex", f"a{{{number + 1}}}") for number in range(3)]
    held = [few.tried(each).result() for each in constraints]
    assert [few.tried(each).result() for each in constraints] == held, "though only the last one is kept"
    monkeypatch.setattr(cache, "compiled", None)  # nothing is compiled from here on
    matcher = few.matcher(constraints[0], Bans((END,)))
    monkeypatch.setattr(cache, "MOST_HELD", sum(each.bytes for each in held) - 1)
    with pytest.raises(GrammarsBusy, match="grammars of unfinished requests take"):
        few.tried(("regex", "b"))
    assert few.tried(constraints[0]).done()
    del held
    assert few.tried(constraints[0]).done(), "by the matcher"
    assert not few.tried(constraints[1]).done()
    few.close()
    assert matcher.step.words.any()


def test_a_model_without_a_tokenizer_refuses_grammars():
    with pytest.raises(ValueError, match=r"^regex needs a tokenizer"):
        Grammars(None, VOCABULARY, ()).tried(("regex", "a")).result()
