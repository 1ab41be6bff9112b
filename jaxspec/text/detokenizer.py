"""Tokens to text, as they are generated: never half a character, never a stop string. Plain Python, no JAX."""

from collections.abc import Sequence
from typing import Any, Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MIN_CONTEXT, _MAX_CONTEXT = 10, 24  # tokens that are decoded again: the text of a token depends on those just before it
_MAX_HELD_TOKENS = 8  # a character has at most 4 bytes: beyond this most of the bytes are invalid, not incomplete
_MAX_HALF = 3  # the last bytes may still become a character; decoders show up to this many replacement characters for them


class Decoder(Protocol):
    """The tokenizer method that we use; transformers' tokenizers have it."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> Any:
        """The text of the tokens, a str."""


class Detokenizer:
    """The text of one request as it grows.

    `text` is the text that may be shown: complete characters, up to where a stop string might begin. `matched` is the stop
    string that was found, if any; the text then ends before it, or with it if `include_stop`.
    """

    def __init__(
        self,
        tokenizer: Decoder | None,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        include_stop: bool = False,
        with_offsets: bool = False,
        prompt: Sequence[int] = (),
    ):
        """Args:
        prompt: what the text continues. A SentencePiece tokenizer leaves out a text's first space, but not one after a prompt.
        min_tokens: stop strings that end before this token don't count.
        with_offsets: keep `offsets`. It takes longer, as tokens are then decoded one by one.
        """
        self.text = ""
        self.offsets: list[int] = []
        """Where the text of each token begins, in characters. Text that is held back counts."""
        self.matched: str | None = None
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        self._stops = [StopString(string) for string in stop]
        self._min_tokens, self._include_stop, self.with_offsets = min_tokens, include_stop, with_offsets
        self._tokens = list(prompt[-_MAX_CONTEXT:])  # the end of the prompt, then all tokens
        self._context = 0  # first token that is decoded again for context
        self._prompt = self._decoded = len(self._tokens)  # tokens whose text is in _held or text already, or in the prompt
        self._before = None if self._tokens else ""  # the text of the tokens from _context to _decoded; None: not decoded
        self._unsure = 0  # characters at the end of _before that were not used: the next tokens may change them
        self._after = ""  # the text of all tokens from _context on
        self._held = ""  # decoded, but could be the beginning of a stop string

    def add(self, tokens: Sequence[int], *, ends_with_stop: bool = False) -> int:
        """Adds the next tokens, up to the one whose text completes a stop string; returns how many were added.

        `ends_with_stop`: the last one is a stop token, which adds no text unless `include_stop`.
        """
        has_text = len(tokens) if self._tokenizer is not None else 0
        if has_text and ends_with_stop and not self._include_stop:
            has_text -= 1
        if not (self._stops or self.with_offsets) and self._add_run(tokens[:has_text]):
            return len(tokens)
        for index, token in enumerate(tokens):
            if self.with_offsets:
                self.offsets.append(len(self.text) + len(self._held))
            if index < has_text:
                self._add_token(token)
            if self.matched is not None:
                return index + 1
        return len(tokens)

    def offsets_of(self, first: int, count: int) -> tuple[int, ...] | None:
        """The offsets of `count` tokens starting at `first`; None without `with_offsets`."""
        return tuple(self.offsets[first : first + count]) if self.with_offsets else None

    def _add_run(self, tokens: Sequence[int]) -> bool:
        """Adds the tokens at once, which is faster. Returns False and adds nothing if their text has half a character or invalid
        bytes: how these are shown depends on the tokens that are decoded with them."""
        if not tokens:
            return True
        self._tokens += tokens
        new = self._new_text()
        if _REPLACEMENT in new:
            del self._tokens[len(self._tokens) - len(tokens) :]
            return False
        self._show(new)
        return True

    def _add_token(self, token: int) -> None:
        self._tokens.append(token)
        if self._stops and (special := self._special_stop(token)) is not None:
            self.finish()
            if self.matched is None:
                self.matched = special
                self.text += special if self._include_stop else ""
            return
        new = self._new_text()
        if not new.endswith(_REPLACEMENT):
            self._show(new)
        elif len(self._tokens) - self._decoded >= _MAX_HELD_TOKENS:
            self._show(new, unsure=min(_MAX_HALF, len(new) - len(new.rstrip(_REPLACEMENT))))

    def _special_stop(self, token: int) -> str | None:
        """The stop string that this special token spells, if any. Skipped special tokens add no text in which it could be found."""
        if self._tokenizer is None or not (self._stops and self._skip_special_tokens and self._counts):
            return None
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        is_stop = any(each.string == text for each in self._stops)
        return text if is_stop and not self._tokenizer.decode([token], skip_special_tokens=True) else None

    @property
    def _counts(self) -> bool:
        """Whether stop strings count yet."""
        return len(self._tokens) - self._prompt >= self._min_tokens

    def finish(self) -> None:
        """After the last token: shows the text that was held back, but not half a character."""
        if self._tokenizer is not None and self.matched is None:
            self._show(self._new_text().rstrip(_REPLACEMENT))
            self.text += self._held
            self._held = ""

    def _new_text(self) -> str:
        """The text that the tokens after _decoded add."""
        before = self._before
        if before is None or self._decoded - self._context > _MAX_CONTEXT:
            before = self._before = self._shorten_context()
        self._after = self._decode(self._tokens[self._context :])
        return self._after[len(before) - self._unsure :]

    def _shorten_context(self) -> str:
        """Moves _context forward to where a character begins, and returns the text from there to _decoded. Decoded from
        the middle of one, a run of SentencePiece's byte tokens, however long, would be replacement characters only."""
        nearest = max(self._decoded - _MIN_CONTEXT, self._context)
        for start in range(nearest, max(self._decoded - _MAX_CONTEXT, self._context) - 1, -1):
            text = self._decode(self._tokens[start : self._decoded])
            if not text.startswith(_REPLACEMENT):
                break
        else:
            start, text = nearest, self._decode(self._tokens[nearest : self._decoded])  # none begins there: the bytes are invalid
        if self._before is None and text.endswith(_REPLACEMENT):
            start, text = self._decoded, ""  # the prompt ends with half a character, which the text does not complete
        self._context = start
        return text

    def _decode(self, tokens: list[int]) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special_tokens)

    def _show(self, new: str, unsure: int = 0) -> None:
        """Adds new text without its last `unsure` characters, and holds back an end that may begin a stop string."""
        self._decoded, self._before, self._unsure = len(self._tokens), self._after, unsure
        before, new = len(self._held), new[: len(new) - unsure]
        self._held += new
        found = []
        for each in self._stops:
            if (end := each.read(new, ends=self._counts)) is not None:
                found.append((before + end - len(each.string), each.string))
        if found:
            position, self.matched = min(found)
            end = position + (len(self.matched) if self._include_stop else 0)
            self.text, self._held = self.text + self._held[:end], ""
            return
        shown = len(self._held) - max([each.begun for each in self._stops], default=0)
        self.text, self._held = self.text + self._held[:shown], self._held[shown:]


class StopString:
    """A stop string, and how much of it a text ends with. The time to read depends on the text's length, not the string's
    (Knuth, Morris, Pratt)."""

    def __init__(self, string: str):
        self.string = string
        self.begun = 0
        """How many of its first characters the text ends with."""
        self._shorter = [0]
        """For each of its prefixes that the text has reached: the length of the longest shorter prefix that it ends with."""

    def read(self, text: str, *, ends: bool) -> int | None:
        """Reads on. Returns where in `text` the string is complete, if that `ends` the text, which is then read no further.

        In:  "ab", after "aa", of the string "aab"
        Out: 2
        """
        if not self.begun and self.string[0] not in text:
            return None
        for index, character in enumerate(text):
            self.begun = self._after(self.begun, character)
            if self.begun == len(self._shorter) + 1:
                self._shorter.append(self._after(self._shorter[-1], character))
            if self.begun == len(self.string):
                if ends:
                    return index + 1
                self.begun = self._shorter[-1]
        return None

    def _after(self, begun: int, character: str) -> int:
        while begun and self.string[begun] != character:
            begun = self._shorter[begun - 1]
        return begun + (self.string[begun] == character)
