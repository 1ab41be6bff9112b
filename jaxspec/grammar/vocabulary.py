"""A model's vocabulary as grammars see it."""

import json
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import llguidance
import numpy as np
from numpy.typing import NDArray

from jaxspec.grammar.compiling import VocabularySource
from jaxspec.text.answer_parser import REASONING_FORMATS
from jaxspec.text.tool_parsers import END_TAG, TAG

type Words = NDArray[np.uint32]
"""A set of tokens: bit i % 32 of word i // 32 stands for token i."""
TAGS = {TAG, END_TAG, *(tag for each in REASONING_FORMATS.values() for tag in (each.begin, each.end))}
"""Text even where they are special tokens."""


@runtime_checkable
class FastTokenizer(Protocol):
    """A tokenizer of the tokenizers library, as transformers wraps it."""

    backend_tokenizer: Any


def source_of(tokenizer: Any, size: int, ends: Sequence[int]) -> VocabularySource:
    """What to load the vocabulary of a model with `size` tokens from. `ends`: its end-of-sequence tokens.

    Raises ValueError if the tokenizer can't tell the bytes of its tokens.
    """
    if not isinstance(tokenizer, FastTokenizer):
        raise ValueError("a grammar needs a tokenizer of the tokenizers library (tokenizer.json), and this model has none")
    written = tokenizer.backend_tokenizer.to_str()
    if written == "byte":
        return VocabularySource(written, size, list(ends), {}, {})
    form, tags, special = json.loads(written), dict[str, int](), dict[str, int]()
    names = dict[str, str]()
    for added in form["added_tokens"]:
        name, token = added["content"], added["id"]
        is_special = token in ends or (added["special"] and name not in TAGS)
        if is_special or (name.startswith("<") and name.endswith(">")):
            (special if is_special else tags)[name] = token
            added["content"] = names[name] = f"\ufdd0{token}"  # a noncharacter, which no text has, comes first
            added |= {"special": False, "normalized": False}
    model = form["model"]
    if isinstance(vocabulary := model["vocab"], dict):
        model["vocab"] = {names.get(word, word): token for word, token in vocabulary.items()}
    else:  # of a Unigram model
        model["vocab"] = [[names.get(word, word), score] for word, score in vocabulary]
    if "merges" in model:
        pairs = (pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"])
        model["merges"] = [pair for pair in pairs if names.keys().isdisjoint([*pair, "".join(pair)])]
    if "unk_token" in model:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    return VocabularySource(json.dumps(form), size, list(ends), tags, special)


class Vocabulary:
    """The loaded vocabulary."""

    def __init__(self, source: VocabularySource):
        self.size, self.words = source.size, -(-source.size // 32)
        self.tokenizer: llguidance.LLTokenizer = source.load()
        self.text = ~packed([*self.tokenizer.eos_tokens, *source.ends], self.words) & packed(range(self.size), self.words)
        """The tokens that a text consists of: all but those that end it, even where one has bytes, too."""
        self.library_words = -(-self.tokenizer.vocab_size // 32)
        """The size of llguidance's masks."""


def packed(tokens: Sequence[int], words: int) -> Words:
    """A set of tokens; those that the words have no bit for are left out.

    In:  [0, 33], 2 words
    Out: [1, 2]
    """
    bits = np.zeros(32 * words, bool)
    bits[[token for token in tokens if 0 <= token < len(bits)]] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


def holds(words: Words, token: int) -> bool:
    return 0 <= token < 32 * len(words) and bool(words[token // 32] >> np.uint32(token % 32) & 1)
