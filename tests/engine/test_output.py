"""Each token of a text has its own piece of it and its origin."""

from jaxspec.config import SpecConfig
from jaxspec.engine.output import BONUS, DRAFT, PLAIN, PREFILL, TokenTrace
from jaxspec.engine.request import GenerationOutput, Speculation, Timing, Update, Verification
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import TinyTokenizer

CHAIN, NONE = SpecConfig(3, 1, 4), SpecConfig(num_steps=0)


def update(text: str, accepted: int | None, output: GenerationOutput | None = None, spec: SpecConfig = CHAIN) -> Update:
    """Its tokens are the bytes of the text; None: from a prefill."""
    verification = None if accepted is None else Verification(spec, accepted)
    return Update("a", text, tuple(text.encode()), output, verification=verification)


def finished(matched: int | str | None) -> GenerationOutput:
    return GenerationOutput("a", (1,), "abcd", (97,) * 4, "length", matched, Speculation(), Timing(0.0, 0.0, 1.0))


def traced(*updates: Update, **params) -> list[tuple[str, str, int]]:
    trace = TokenTrace(TinyTokenizer(), SamplingParams(**params))
    return [(token.text, token.origin, token.depth) for each in updates for token in trace.add(each)]


def test_tokens_have_the_kind_of_how_they_came():
    assert traced(update("a", None)) == [("a", PREFILL, 0)]
    assert traced(update("abc", 2)) == [("a", DRAFT, 1), ("b", DRAFT, 2), ("c", BONUS, 0)]
    assert traced(update("ab", 2)) == [("a", DRAFT, 1), ("b", DRAFT, 2)]  # cut by the budget before its bonus
    assert traced(update("x", 0, spec=NONE)) == [("x", PLAIN, 0)]


def test_a_stop_token_is_no_text_of_its_own():
    stopped = Update("a", "b", (ord("b"), 2), finished(2), verification=Verification(CHAIN, 1))
    assert traced(update("a", None), stopped) == [("a", PREFILL, 0), ("b", DRAFT, 1), ("", BONUS, 0)]
    assert traced(update("a", None), stopped, include_stop_str_in_output=True)[-1] == ("\x02", BONUS, 0)


def test_half_a_character_comes_with_the_token_that_completes_it():
    first, second = "é".encode()
    assert traced(Update("a", "", (first,)), Update("a", "é", (second,))) == [("", PREFILL, 0), ("é", PREFILL, 0)]


def test_what_was_held_back_comes_with_the_last_token():
    texts = [text for text, _, _ in traced(update("ab", 1), update("c", 0, finished(None)), stop="cd")]
    assert texts == ["a", "b", "c"]
    texts = [text for text, _, _ in traced(update("ab", 1), update("cd", 1, finished("cd")), stop="cd")]
    assert texts == ["a", "b", "", ""]


def test_without_a_tokenizer_there_is_no_text():
    assert [token.text for token in TokenTrace(None, SamplingParams()).add(update("ab", 1))] == ["", ""]
