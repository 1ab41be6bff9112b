"""Each token of a text has its own piece of it and its origin."""

from dataclasses import replace

import pytest

from jaxspec.engine.output import BONUS, DRAFT, PLAIN, PREFILL, Emitted, Output, traced_tokens
from jaxspec.engine.pages import PageAllocator, PrefixCache
from jaxspec.engine.request import GenerationRequest, Request, Update
from jaxspec.engine.scheduler import Scheduler
from jaxspec.engine.stats import EngineStats
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import TinyTokenizer
from jaxspec.tree_shape import TreeShape

CHAIN, NONE = TreeShape(3, 1, 4), TreeShape(num_steps=0)


def run(*emitted: tuple[str | bytes, int | None], spec: TreeShape = CHAIN, finish: str | None = None, **params):
    """The updates of a request whose cycles emit these bytes, each with a number of accepted drafts; None: a prefill."""
    counts = EngineStats(accepted_per_position=[0] * 3)
    scheduler = Scheduler(PrefixCache(PageAllocator(9, 16)), 1, 64, counts=counts)
    output = Output(scheduler, counts, lambda: 0.0)
    asked = GenerationRequest((1,), SamplingParams(**params), wants_trees=True)
    request = Request("a", asked, 0, (), replace(asked, prompt=()).detokenizer(TinyTokenizer()))
    scheduler.add(request)
    for index, (text, accepted) in enumerate(emitted):
        tokens = list(text.encode() if isinstance(text, str) else text)
        ends = finish if index == len(emitted) - 1 else None
        output.add(request, Emitted(tokens, accepted or 0, ends, [], None), None if accepted is None else spec)
    updates = output.take_updates()
    assert "".join(update.text for update in updates) == request.detokenizer.text
    lengths = [len("".join(each.text for each in updates[:i])) for i in range(len(updates))]
    assert [update.text_start for update in updates] == lengths
    return updates


def traced(*emitted: tuple[str | bytes, int | None], **options) -> list[tuple[str, str, int]]:
    return [(token.text, token.origin, token.depth) for each in run(*emitted, **options) for token in traced_tokens(each)]


def test_tokens_have_the_kind_of_how_they_came():
    assert traced(("a", None)) == [("a", PREFILL, 0)]
    assert traced(("abc", 2)) == [("a", DRAFT, 1), ("b", DRAFT, 2), ("c", BONUS, 0)]
    assert traced(("ab", 2)) == [("a", DRAFT, 1), ("b", DRAFT, 2)]  # cut by the budget before its bonus
    assert traced(("x", 0), spec=NONE) == [("x", PLAIN, 0)]


def test_a_stop_token_is_no_text_of_its_own():
    emitted = [("a", None), ("b\2", 1)]
    assert traced(*emitted, finish="stop") == [("a", PREFILL, 0), ("b", DRAFT, 1), ("", BONUS, 0)]
    assert traced(*emitted, finish="stop", include_stop_str_in_output=True)[-1] == ("\x02", BONUS, 0)


def test_half_a_character_comes_with_the_token_that_completes_it():
    first, second = "é".encode()
    assert traced((bytes([first]), None), (bytes([second]), None)) == [("", PREFILL, 0), ("é", PREFILL, 0)]


def test_what_was_held_back_comes_with_the_last_token():
    assert [text for text, _, _ in traced(("ab", 1), ("c", 0), finish="length", stop="cd")] == ["a", "b", "c"]
    assert [text for text, _, _ in traced(("ab", 1), ("cd", 1), stop="cd")] == ["a", "b", "", ""]
    assert [text for text, _, _ in traced(("abc", 1), ("x", 0), stop="cd")] == ["a", "b", "", "cx"]


def test_offsets_say_where_each_token_begins():
    updates = run(("aé", None), ("bc", 1), ("xy", 1), stop="cd", finish="length")
    assert [update.text_offsets for update in updates] == [(0, 1, 1), (2, 3), (4, 5)], "text that is held back counts"
    assert updates[-1].output.text_offsets == (0, 1, 1, 2, 3, 4, 5)
    assert run(("ab", None), ("cd", 1), stop="cd")[-1].output.text_offsets == (0, 1, 2, 3)


def test_without_a_tokenizer_there_is_no_text():
    update = Update("a", "", (97, 98), text_offsets=(0, 0))
    assert [token.text for token in traced_tokens(update)] == ["", ""]
    with pytest.raises(ValueError, match="wants_trees=True"):
        traced_tokens(Update("a", "ab", (97, 98)))
    assert traced_tokens(Update("a", "", ())) == []


def test_offsets_are_kept_if_logprobs_or_trees_are_wanted():
    for wanted in (SamplingParams(), SamplingParams(logprobs=0)):
        for wants_trees in (False, True):
            detokenizer = GenerationRequest((), wanted, wants_trees=wants_trees).detokenizer(None)
            detokenizer.add([1, 2])
            assert detokenizer.offsets_of(0, 2) == ((0, 0) if wants_trees or wanted.logprobs is not None else None)
