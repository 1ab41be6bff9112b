"""Following a text by its grammar: which tokens may come next, after the text and after every node of a draft tree.

What may follow a text depends on the text alone, so a tree changes none of it. Where the grammar may end, the request's stop
tokens may follow; where nothing of it can follow, the text has ended.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import llguidance
import numpy as np

from jaxspec.grammar.vocabulary import Vocabulary, Words, holds, packed


class GrammarError(ValueError):
    """A request can't go on: its grammar allows no token, or the library has reached a limit."""


class Bans(NamedTuple):
    """What a request says about tokens in addition to its grammar."""

    stops: Sequence[int]
    """Tokens that end the text."""
    bad: Sequence[int] = ()
    """Never drawn."""
    allowed: Sequence[int] | None = None
    """Only these are; None: all."""


class Step(NamedTuple):
    """What may follow a text."""

    words: Words
    """The tokens."""
    is_end: bool
    """The grammar has ended: nothing but stop tokens may."""


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Grammar:
    """A compiled grammar."""

    beginning: llguidance.LLMatcher
    """Its automaton before the first token, which is copied."""
    bytes: int
    """Memory that it takes."""


class Matcher:
    """The grammar of one request, after the text that was read so far.

    Raises GrammarError if it has ended, or allows no token, before the first one.
    """

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary, bans: Bans):
        self._grammar, self._automaton, self._vocabulary = grammar, grammar.beginning.deep_copy(), vocabulary
        self._read: list[int] = []
        self._failure: GrammarError | None = None
        self._stops = frozenset(bans.stops)
        stops, bad = packed(sorted(self._stops), vocabulary.words), packed(bans.bad, vocabulary.words)
        allowed = ~packed((), vocabulary.words) if bans.allowed is None else packed(bans.allowed, vocabulary.words)
        self._ends, self._text = stops & allowed & ~bad, vocabulary.text & allowed & ~bad
        self._buffer = np.zeros(vocabulary.library_words, np.int32)
        self.step = self._step()
        """After the text."""
        if not self.step.words.any():
            raise GrammarError("allows no text that the request's bad_token_ids or allowed_token_ids leave")

    def advance(self, tokens: Sequence[int], finish: str | None) -> tuple[list[int], str | None, bool]:
        """Adds new tokens to the text, up to where the grammar ends. `finish`: why the device ended the text with the last of them,
        or None. Returns the tokens that count, why the text has ended, if it has, and whether the grammar has ended it.

        Where a token may not follow, or nothing can follow it, the text ends before it, as it would if they came one by one, and
        `check` raises.
        """
        own = len(tokens) - (finish == "stop")  # a stop token is not part of the grammar's text
        for index, token in enumerate(tokens[:own]):
            try:
                if not self._automaton.consume_token(token):
                    raise GrammarError(f"the grammar does not allow token {token}: {self._reason()}")
                self._read.append(token)
                self.step = self._step()
            except GrammarError as error:
                self._failure = error
                return list(tokens[:index]), None, False
            if self.step.is_end:
                return list(tokens[: index + 1]), "stop", True
        return list(tokens), finish, False

    def check(self) -> None:
        """Raises GrammarError if no token may follow the text."""
        if self._failure is not None:
            raise self._failure
        if not self.step.words.any():
            raise GrammarError("bad_token_ids or allowed_token_ids leave no token that the grammar allows")

    def legal(self, tokens: Sequence[int], parents: Sequence[int]) -> tuple[list[bool], dict[int, list[int]]]:
        """For each node of a tree below the text, whether it may follow its parent, and the tokens that must follow it, if any; -1
        is the text itself. Parents come first.

        (A model may write what must follow with other tokens, whose bytes are the same.)
        """
        found, stops = [False] * len(tokens), set[int]()
        forced = {-1: self._automaton.compute_ff_tokens()}
        for node in self._walk(tokens, parents, stops):
            found[node] = True
            if tokens_behind := self._automaton.compute_ff_tokens():
                forced[node] = tokens_behind
        for node in stops:
            found[node] = True
        return found, forced

    def masks(self, tokens: Sequence[int], parents: Sequence[int], out: Words) -> list[int]:
        """Fills the rows of `out` [nodes, words] with what may follow each node of a tree. Node 0 is the end of the text; rows of
        nodes that may not follow their parents remain. Returns nodes after which no token may follow: they must not be reached.
        """
        out[0] = self.step.words
        empty = []
        for node in self._walk(tokens[1:], [parent - 1 for parent in parents[1:]], set()):
            try:
                step = self._step()
            except GrammarError:
                empty.append(node + 1)
                continue
            out[node + 1] = step.words
            if step.is_end:
                out[node + 1] |= self._vocabulary.text  # what follows is cut off, and there must be something
            elif not step.words.any():
                empty.append(node + 1)
        return empty

    def _walk(self, tokens: Sequence[int], parents: Sequence[int], stops: set[int]) -> Iterable[int]:
        """Visits the nodes that may follow, each with the automaton after it, and returns it to the text. Stop tokens that may
        follow are not visited: they are put into `stops`."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            children.setdefault(parent, []).append(node)
        stack = [(node, 0) for node in reversed(children.get(-1, ()))]
        path: list[int] = []
        while stack:
            node, depth = stack.pop()
            if len(path) > depth:
                self._automaton.rollback(len(path) - depth)
                del path[depth:]
            token = tokens[node]
            if token in self._stops and self._automaton.is_accepting():
                stops.add(node)
                continue
            if not holds(self._text, token):
                continue
            if self._automaton.try_consume_tokens([token]) == 1:
                yield node
                if not self._automaton.is_error():
                    path.append(token)
                    stack += [(child, len(path)) for child in reversed(children.get(node, ()))]
            if self._automaton.is_error():
                self._read_again(path)
        if path:
            self._automaton.rollback(len(path))

    def _read_again(self, path: Sequence[int]) -> None:
        """Replaces the automaton, which can't leave a state of error, by one after the text and a path."""
        self._automaton = self._grammar.beginning.deep_copy()
        for token in self._read:
            self._automaton.consume_token(token)
        self._automaton.try_consume_tokens(list(path))

    def _step(self) -> Step:
        buffer = self._buffer
        self._automaton.unsafe_compute_mask_ptr(buffer.ctypes.data, buffer.nbytes)
        if self._automaton.is_error():
            raise GrammarError(f"the grammar can't be followed any further: {self._reason()}")
        text = buffer.view(np.uint32)[: self._vocabulary.words] & self._text
        if not self._automaton.is_accepting():
            return Step(text, False)
        return Step(text | self._ends, not text.any())

    def _reason(self) -> str:
        return " ".join(self._automaton.get_error().split())[:200] or self._automaton.stop_reason()
