"""Tokenizers of SentencePiece's BPE: those of GGUF files, and tokenizer.model, which is all that older model directories have.

Format: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""Token types. Tokens of the last two are never split into pieces; user-defined ones are part of the text."""
SPACE = "\u2581"
"""The space in tokens."""
LONGEST_TOKEN = 512
"""In characters; finding the merges of a token takes time quadratic in its length."""
LARGEST = 16 << 20
"""Bytes of a tokenizer.model. One of 256,000 tokens has 4 MB."""
BPE = 2
"""The trainer's model_type."""


class Pieces(NamedTuple):
    """A vocabulary, and how text becomes its tokens."""

    tokens: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]
    unknown: int = 0
    prefix: bool = True
    """Text begins with a space."""

    def tokenizer(self, *, once: bool = False) -> "Tokenizer":
        """Of all adjacent pieces that form a token, the pair whose token has the highest score is merged first. Runs of spaces, all
        of one score, grow from the left. Text outside the vocabulary becomes byte tokens. `once`: the prefix is not repeated after
        special tokens."""
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

        if max(map(len, self.tokens)) > LONGEST_TOKEN:
            raise ValueError(f"a token has {max(map(len, self.tokens))} characters; expected at most {LONGEST_TOKEN}")
        vocabulary = {token: number for number, token in enumerate(self.tokens)}
        rows = zip(self.tokens, self.scores, self.kinds, strict=True)
        pieces = {token: score for token, score, kind in rows if kind == NORMAL}
        if len(set(pieces.values())) == 1:
            raise ValueError("all tokens have one score, so the order of merges is unknown: expected tokenizer.model's scores")
        splits = (
            (-score, -at, -len(token), token[:at], token[at:])
            for token, score in pieces.items()
            for at in range(1, len(token))
            if token[:at] in pieces and token[at:] in pieces
        )
        merges = [(left, right) for *_, left, right in sorted(splits)]
        unknown = self.tokens[self.unknown]
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
        if once:
            scheme = "first" if self.prefix else "never"
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False)
        else:
            prepended = [normalizers.Prepend(SPACE)] if self.prefix else []
            tokenizer.normalizer = normalizers.Sequence([*prepended, normalizers.Replace(" ", SPACE)])
        stripped = [decoders.Strip(" ", 1, 0)] if self.prefix else []
        tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *stripped])
        return tokenizer


def add_tokens(tokenizer: "Tokenizer", tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Tells the tokenizer which tokens are never split."""
    from tokenizers import AddedToken

    for added, add in ((CONTROL, tokenizer.add_special_tokens), (USER_DEFINED, tokenizer.add_tokens)):
        found = [token for token, kind in zip(tokens, kinds, strict=True) if kind == added]
        add([AddedToken(token, special=added == CONTROL, normalized=False) for token in found])


def read_pieces(file: Path) -> Pieces:
    """The vocabulary of a tokenizer.model. Raises ValueError if it is damaged, or is not as Llama 2's: BPE, of text as it is."""
    if file.stat().st_size > LARGEST:
        raise ValueError(f"{file.name} has {file.stat().st_size} bytes; expected at most {LARGEST}")
    data = file.read_bytes()
    try:
        trainer, normalizer = (dict(_fields(b"".join(each for key, each in _fields(data) if key == part))) for part in (2, 3))
        pieces = (dict(_fields(each)) for key, each in _fields(data) if key == 1)
        rows = ((each[1].decode(), *struct.unpack("<f", each.get(2, bytes(4))), each.get(3, NORMAL)) for each in pieces)
        tokens, scores, kinds = zip(*rows, strict=True)
    except (ValueError, TypeError, LookupError, AttributeError, struct.error):
        raise ValueError(f"{file.name} is not a file of SentencePiece; a tokenizer.json is needed") from None
    if (trainer.get(3), normalizer.get(2, b""), normalizer.get(4)) != (BPE, b"", 0):
        raise ValueError(f"{file.name} is not SentencePiece's BPE of text as it is; a tokenizer.json is needed")
    return Pieces(tokens, scores, kinds, trainer.get(40, 0), bool(normalizer.get(3, 1)))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message in Protocol Buffers' format: numbers, and bytes, which may be messages. Raises LookupError or
    ValueError if it is damaged."""
    at = 0
    while at < len(data):
        key, at = _number(data, at)
        if key & 7 == 0:
            value, at = _number(data, at)
            yield key >> 3, value
            continue
        size, at = _number(data, at) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], at)
        if size > len(data) - at:
            raise ValueError("it ends within a field")
        yield key >> 3, data[at : at + size]
        at += size


def _number(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins there, seven bits a byte, and where it ends."""
    number = 0
    for place in range(10):
        number |= (data[at + place] & 127) << 7 * place
        if data[at + place] < 128:
            return number, at + place + 1
    raise ValueError("a number has more than ten bytes")
