"""Tokens to text, a token at a time: never half a character, never a stop string. Plain Python, no JAX."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_HELD_TOKENS = 8  # a character has at most 4 bytes: beyond this the bytes are invalid, not incomplete


@runtime_checkable
class Decoder(Protocol):
    """What a tokenizer must offer; transformers' tokenizers do."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> Any:
        """The text of the tokens, a str."""


class Detokenizer:
    """The text of one request as it grows.

    `text` is what may be shown: complete characters, up to where a stop string might begin. `matched` is the stop
    string that was found, if one was; text then ends before it.
    """

    def __init__(self, tokenizer: Decoder | None, stop: Sequence[str] = (), skip_special_tokens: bool = True):
        self.text = ""
        self.matched: str | None = None
        self._tokenizer, self._stop, self._skip_special_tokens = tokenizer, tuple(stop), skip_special_tokens
        self._tokens: list[int] = []
        self._context = 0  # first token that is decoded again for context
        self._decoded = 0  # tokens whose text is in _held or text already
        self._held = ""  # decoded, but could be the beginning of a stop string

    def add(self, token: int) -> bool:
        """Takes one token; True if its text completes a stop string."""
        if self._tokenizer is None:
            return False
        self._tokens.append(token)
        new = self._new_text()
        half = new.endswith(_REPLACEMENT) and len(self._tokens) - self._decoded < _MAX_HELD_TOKENS
        return False if half else self._take(new)

    def finish(self) -> None:
        """No more tokens come: shows what was held back, but not half a character."""
        if self._tokenizer is not None and self.matched is None:
            self._take(self._new_text().rstrip(_REPLACEMENT))
            self.text += self._held
            self._held = ""

    def _new_text(self) -> str:
        """The text that the tokens after _decoded add to those before."""
        assert self._tokenizer is not None
        before, after = (
            self._tokenizer.decode(self._tokens[self._context : end], skip_special_tokens=self._skip_special_tokens)
            for end in (self._decoded, len(self._tokens))
        )
        return after[len(before) :]

    def _take(self, new: str) -> bool:
        self._context, self._decoded = self._decoded, len(self._tokens)
        self._held += new
        found = [(self._held.find(string), string) for string in self._stop if string in self._held]
        if found:
            position, self.matched = min(found)
            self.text, self._held = self.text + self._held[:position], ""
            return True
        keep = max((overlap(self._held, string) for string in self._stop), default=0)
        shown = len(self._held) - keep
        self.text, self._held = self.text + self._held[:shown], self._held[shown:]
        return False


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`.

    In:  "return x\\n\\n", "\\n\\ndef"
    Out: 2
    """
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
