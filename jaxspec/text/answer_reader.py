"""Reading an answer whose text comes in pieces: what its parsers are made of.

A parser is a generator: it yields events, and None where it needs more text. So it reads like one for the whole text, and what it
finds does not depend on how the text was cut.
"""

import json
import re
from collections.abc import Callable, Generator
from typing import NamedTuple

MAX_NAME = 256
"""Characters of the names of tools and arguments."""
_SPACES = re.compile(r"\s*")
_WORD = re.compile(r"[\w.\-]*")
_ARGUMENT = re.compile(r"[^=,()\"'\n]*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_LITERAL = re.compile(r"[-+.\w]*")


class Content(NamedTuple):
    """A piece of what the answer says."""

    text: str


class Reasoning(NamedTuple):
    """A piece of the thinking before it."""

    text: str


class CallStart(NamedTuple):
    """A tool call begins. Its arguments follow."""

    call: int
    """Its number in the answer, from 0."""
    name: str


class Arguments(NamedTuple):
    """A piece of a call's arguments, a JSON object."""

    call: int
    text: str


type Event = Content | Reasoning | CallStart | Arguments
type Reading[T] = Generator[Event | None, None, T]
type MakeEvent = Callable[[str], Event]


class MalformedCall(Exception):
    """What looked like a tool call is none: it is text."""


class Unfinished(MalformedCall):
    """The answer ends within what looks like a call."""


class AnswerReader:
    """The text so far, and how much of it was read."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        """All text before this place was read."""
        self.mark = 0
        """All text before this place has become events."""
        self.has_ended = False
        """No more text will come."""

    def more(self) -> Reading[bool]:
        """Waits for more text; False: there is none."""
        before = len(self.text)
        while len(self.text) == before and not self.has_ended:
            yield None
        return len(self.text) > before

    def peek(self) -> Reading[str]:
        """The next character; "" at the end."""
        if self.at == len(self.text):
            yield from self.more()
        return self.text[self.at : self.at + 1]

    def take(self, word: str) -> Reading[bool]:
        """Reads this word, if it is what comes next."""
        while True:
            found = self.text[self.at : self.at + len(word)]
            if found == word:
                self.at += len(word)
                return True
            if not word.startswith(found) or not (yield from self.more()):
                return False

    def expect(self, word: str) -> Reading[None]:
        """Reads this word. Raises MalformedCall if something else comes next."""
        if not (yield from self.take(word)):
            raise Unfinished if word.startswith(self.text[self.at :]) else MalformedCall

    def spaces(self) -> Reading[None]:
        """Reads white space."""
        yield from self._run(_SPACES)

    def word(self) -> Reading[str]:
        """Reads a name of letters, digits and _ . -"""
        return (yield from self._run(_WORD))

    def argument(self) -> Reading[str]:
        """Reads the name of an argument, which may be any of a schema's, such as $top, to the sign after it."""
        return (yield from self._run(_ARGUMENT)).strip()

    def _run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Reads all that matches the pattern, which must also match every beginning of a match."""
        start = self.at
        while True:
            found = pattern.match(self.text, self.at)
            assert found is not None
            self.at = found.end()
            if self.at < len(self.text) or not (yield from self.more()):
                return self.text[start : self.at]

    def until(self, word: str | None, make: MakeEvent, trim: Callable[[str], str] = str.rstrip) -> Reading[bool]:
        """Reads up to a word and past it, and yields the text before it. True if the word was found; else that was all the text.

        `trim`: strips what is not a part of the text before the word, such as white space. The mark then stays before it.
        """
        while True:
            found = -1 if word is None else self.text.find(word, self.at)
            piece = self.text[self.at : None if found < 0 else found]
            if word is not None and not (found < 0 and self.has_ended):
                piece = trim(piece if found >= 0 else piece[: len(piece) - overlap(piece, word)])
            self.at += len(piece)
            self.mark = self.at
            if piece:
                yield make(piece)
            if word is not None and found >= 0:
                self.at = found + len(word)
                return True
            if self.has_ended and self.at == len(self.text):
                return False
            yield from self.more()

    def name_until(self, word: str) -> Reading[str]:
        """Reads a short text and the word after it. Raises MalformedCall."""
        start = self.at
        while (end := self.text.find(word, start, start + MAX_NAME)) < 0:
            if (is_long := len(self.text) - start >= MAX_NAME) or not (yield from self.more()):
                raise MalformedCall if is_long else Unfinished
        self.at = end + len(word)
        return self.text[start:end]

    def string(self) -> Reading[str]:
        """Reads a short JSON string. Raises MalformedCall."""
        if (first := (yield from self.peek())) != '"':
            raise MalformedCall if first else Unfinished
        while (found := _STRING.match(self.text, self.at, self.at + MAX_NAME)) is None:
            if (is_long := len(self.text) - self.at >= MAX_NAME) or not (yield from self.more()):
                raise MalformedCall if is_long else Unfinished
        self.at = found.end()
        try:
            return str(json.loads(found[0], strict=False))
        except ValueError:
            raise MalformedCall from None

    def braces(self, make: MakeEvent | None) -> Reading[str]:
        """Reads a JSON object, array or string, to where it closes or the text ends, and returns it. With `make`, yields it as it
        comes too. Control characters, which models write into strings, are escaped there, as JSON has none."""
        depth, in_string, escaped, pieces = 0, False, False, list[str]()
        while True:
            piece = list[str]()
            for character in self.text[self.at :]:
                self.at += 1
                is_raw = in_string and character < " "
                piece.append(json.dumps(character)[1 + escaped : -1] if is_raw else character)
                if escaped:
                    escaped = False
                elif in_string:
                    escaped, in_string = character == "\\", character != '"'
                elif character == '"':
                    in_string = True
                elif character in "{[":
                    depth += 1
                elif character in "}]":
                    depth -= 1
                if depth == 0 and not in_string:
                    break
            pieces.append("".join(piece))
            if make is not None and piece:
                yield make(pieces[-1])
            if (depth == 0 and not in_string) or not (yield from self.more()):
                return "".join(pieces)

    def value(self) -> Reading[None]:
        """Reads a JSON value that nobody asked for. Raises MalformedCall."""
        first = yield from self.peek()
        if first in ('"', "{", "["):
            yield from self.braces(None)
        elif not (yield from self._run(_LITERAL)):
            raise MalformedCall if first else Unfinished

    def python_value(self) -> Reading[str]:
        """Reads the source of an argument of a Python call, up to a comma or a closing bracket. Raises Unfinished."""
        start, depth, quote, escaped = self.at, 0, "", False
        while True:
            while character := self.text[self.at : self.at + 1]:
                if escaped:
                    escaped = False
                elif character in "\"'" and (not quote or quote[0] == character):
                    ahead = self.text[self.at : self.at + 3]
                    if len(ahead) < (3 if not quote else len(quote)) and not ahead.strip(character):
                        break  # perhaps three quotes begin or end here
                    if not quote:
                        quote = 3 * character if ahead == 3 * character else character
                        self.at += len(quote) - 1
                    elif ahead.startswith(quote):
                        self.at += len(quote) - 1
                        quote = ""
                elif quote:
                    escaped = character == "\\"
                elif depth == 0 and character in ",)]}":
                    return self.text[start : self.at].strip()
                elif character in "([{":
                    depth += 1
                elif character in ")]}":
                    depth -= 1
                self.at += 1
            if not (yield from self.more()):
                raise Unfinished


def merged(events: list[Event]) -> list[Event]:
    """The events with adjacent pieces of one text joined.

    In:  [Content("a"), Content("b"), CallStart(0, "f"), Arguments(0, "{"), Arguments(0, "}")]
    Out: [Content("ab"), CallStart(0, "f"), Arguments(0, "{}")]
    """
    found: list[Event] = []
    for event in events:
        match found[-1:], event:
            case [Content(before)], Content(text):
                found[-1] = Content(before + text)
            case [Reasoning(before)], Reasoning(text):
                found[-1] = Reasoning(before + text)
            case [Arguments(call, before)], Arguments(same, text) if same == call:
                found[-1] = Arguments(call, before + text)
            case _:
                found.append(event)
    return found


def overlap(text: str, word: str) -> int:
    """Length of the longest end of `text` that `word` begins with.

    In:  "return x\\n\\n", "\\n\\ndef"
    Out: 2
    """
    return next((size for size in range(min(len(text), len(word) - 1), 0, -1) if text.endswith(word[:size])), 0)
