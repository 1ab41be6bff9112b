"""Tokens become text: whole characters only, and no stop string."""

import random
import time

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from jaxspec.testing import TinyTokenizer
from jaxspec.text.answer_reader import overlap
from jaxspec.text.detokenizer import Detokenizer
from tests.server.fakes import byte_tokenizer, sentencepiece_tokenizer


@pytest.mark.parametrize("seed", range(25))
def test_detokenizer_shows_whole_characters_and_no_stop_string(seed):
    rng = np.random.default_rng(seed)
    text = "".join(rng.choice(list("abcé漢🙂\n"), 40))
    start = int(rng.integers(0, 38))
    stops = [text[start : start + int(rng.integers(1, 4))], "zz", text[start] + "z"]
    detokenizer, shown = Detokenizer(TinyTokenizer(), stops), ""
    for token in text.encode():
        assert detokenizer.add([token]) == 1
        assert detokenizer.text.startswith(shown), "text that was shown was taken back"
        shown = detokenizer.text
        assert "\N{REPLACEMENT CHARACTER}" not in shown
        if detokenizer.matched is not None:
            break
    end = min(text.index(stop) for stop in stops if stop in text)
    assert detokenizer.text == text[:end] and detokenizer.matched in stops


def test_detokenizer_gives_back_what_it_held_and_survives_invalid_bytes():
    detokenizer = Detokenizer(TinyTokenizer(), ["def f"])
    for token in b"x = 1\ndef ":
        detokenizer.add([token])
    assert detokenizer.text == "x = 1\n"
    detokenizer.finish()
    assert detokenizer.text == "x = 1\ndef "
    broken = Detokenizer(TinyTokenizer())
    for token in b"a" + b"\xff" * 40 + b"b":
        broken.add([token])
    broken.finish()
    assert broken.text == "a" + "\N{REPLACEMENT CHARACTER}" * 40 + "b"


@pytest.mark.parametrize("alphabet", ["é", "éña", "漢", "🙂", "é漢🙂a"])
@pytest.mark.parametrize("stops", [[], ["\0"]], ids=["runs", "token by token"])
def test_bytes_in_any_order_are_what_a_decoder_makes_of_all_of_them(alphabet: str, stops: list[str]):
    """However they come, and at any time: text that was shown stays, and only what may be half a character is missing."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        data = [int(byte) for byte in rng.choice(list(alphabet.encode()), 150)]
        whole = bytes(data).decode(errors="replace")
        detokenizer, taken = Detokenizer(TinyTokenizer(), stops), 0
        while taken < len(data):
            taken += detokenizer.add(data[taken : taken + int(rng.integers(1, 7))])
            assert whole.startswith(detokenizer.text)
        detokenizer.finish()
        assert whole.startswith(detokenizer.text) and not whole[len(detokenizer.text) :].strip("\N{REPLACEMENT CHARACTER}")


@pytest.fixture(scope="module")
def sentencepiece() -> PreTrainedTokenizerFast:
    return sentencepiece_tokenizer()


@pytest.mark.parametrize("at_once", [1, 3, 5])
@pytest.mark.parametrize("text", ["🙂🙃😀😁😂🤣😃😄😅😆😇😈😉😊😋", "ខ្ញុំស្រឡាញ់ភាសាខ្មែរណាស់", "é" * 40])
def test_long_runs_of_byte_tokens_become_text(sentencepiece, text, at_once):
    tokens = [1 + byte for byte in text.encode()]
    detokenizer, shown = Detokenizer(sentencepiece), ""
    for first in range(0, len(tokens), at_once):
        detokenizer.add(tokens[first : first + at_once])
        assert detokenizer.text.startswith(shown) and text.startswith(detokenizer.text)
        shown = detokenizer.text
    detokenizer.finish()
    assert detokenizer.text == text


def test_a_completion_keeps_the_space_behind_its_prompt(sentencepiece):
    the, joined, say = (sentencepiece.convert_tokens_to_ids(word) for word in ("▁the", "the", "▁say"))
    for prompt, text in ((), "the the"), ((say,), " the the"), ((say,) * 40, " the the"):
        detokenizer = Detokenizer(sentencepiece, [" the"], min_tokens=2, with_offsets=True, prompt=prompt)
        assert detokenizer.add([the, the]) == 2 and detokenizer.matched == " the"
        assert detokenizer.text + " the" == text and detokenizer.offsets == [0, len(text) - 4]
    detokenizer = Detokenizer(sentencepiece, prompt=[say])
    detokenizer.add([joined])
    assert detokenizer.text == "the"


@pytest.mark.parametrize("skipped", [True, False])
def test_a_special_token_can_be_a_stop_string(skipped):
    """--chat-template chatml ends answers with <|im_end|>, which is not the end-of-sequence token of every model."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<|other|>"]})
    end, other = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|other|>"])
    tokens, shown = [*b"Hi<", other, *b"an", end, *b"Hi"], "" if skipped else "<|other|>"
    for include, least, text in ((False, 0, f"Hi<{shown}an"), (True, 0, f"Hi<{shown}an<|im_end|>"), (False, 9, None)):
        detokenizer = Detokenizer(tokenizer, ["<|im_end|>", "<zz"], skipped, least, include)
        if text is not None:
            assert detokenizer.add(tokens) == 7
            assert (detokenizer.matched, detokenizer.text) == ("<|im_end|>", text)
        else:
            detokenizer.add(tokens[:7])
            assert detokenizer.matched is None, "it comes before min_tokens"


def test_invalid_bytes_are_the_same_however_tokens_come():
    tokens = [260, *(1 + byte for byte in "🙂".encode() + b"\xf0"), 259, 260]
    texts = set()
    for size in (1, 5, 8):
        detokenizer = Detokenizer(sentencepiece_tokenizer())
        for start in range(0, 8, size):
            detokenizer.add(tokens[start : start + size])
        detokenizer.finish()
        texts.add(detokenizer.text)
    [text] = texts
    assert "🙂" in text


def test_half_a_character_at_the_end_of_the_prompt_stays_there():
    detokenizer = Detokenizer(TinyTokenizer(), prompt="a漢".encode()[:-1])
    for token in "漢".encode()[-1:] + b"b":
        detokenizer.add([token])
    detokenizer.finish()
    assert detokenizer.text == "\N{REPLACEMENT CHARACTER}b"


def test_detokenizer_never_shows_half_a_character_at_the_end():
    detokenizer = Detokenizer(TinyTokenizer())
    for token in "x = '漢".encode()[:-1]:
        detokenizer.add([token])
    detokenizer.finish()
    assert detokenizer.text == "x = '"


def test_stop_strings_are_found_and_held_back_as_by_comparing_all_ends():
    rng = random.Random(0)
    for _ in range(3000):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(rng.randint(1, 3))]
        text, least = "".join(rng.choices("ab", k=20)), rng.choice([0, 0, 7])
        detokenizer, size = Detokenizer(TinyTokenizer(), stops, min_tokens=least), 0
        while size < len(text) and detokenizer.matched is None:
            size += rng.randint(1, 4)
            detokenizer.add(text[len(detokenizer._tokens) : size].encode())
            read = text[: len(detokenizer._tokens)]
            ends = [end for end in range(least, len(read) + 1) if any(read[:end].endswith(stop) for stop in stops)]
            assert (detokenizer.matched is not None) == bool(ends)
            if ends:
                begin, stop = min((ends[0] - len(stop), stop) for stop in stops if read[: ends[0]].endswith(stop))
                assert (detokenizer.text, detokenizer.matched) == (read[:begin], stop)
            else:
                assert detokenizer.text == read[: len(read) - max(overlap(read, stop) for stop in stops)]


def test_long_stop_strings_cost_no_more_than_short_ones():
    def seconds(stops: list[str]) -> float:
        several = [Detokenizer(TinyTokenizer(), [*stops, str(number)]) for number in range(9)]
        for each in several:
            each.add(b"a" * 1100)
        began = time.thread_time()
        for _ in range(20):
            for each in several:
                each.add(b"a")
        return time.thread_time() - began

    short, long = ["a" * 3 + "b"] * 32, [f"{number}".join(["a" * 1000, "b"]) for number in range(32)]
    assert min(seconds(long) for _ in range(3)) < 4 * min(seconds(short) for _ in range(3))


def test_overlap():
    assert [overlap(text, "\n\ndef") for text in ("x\n\n", "x\n", "x", "\n\ndef", "")] == [2, 1, 0, 0, 0]
