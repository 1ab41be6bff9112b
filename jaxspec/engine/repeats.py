"""How far n-gram drafts would have come in a text that something else decodes. Plain Python, no JAX.

What follows a text's newest tokens where they stood before needs no model, so the host can compare it with the tokens that come
anyway: whether a text repeats is known without trying a tree on it. Of the contexts of n-grams (decoding/ngram.py), this keeps only
the pairs of tokens: 0.7 µs for each token and tree (one busy AMD EPYC core, 27 November 2026).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

KEPT = 4096
"""Tokens of a prompt, the last ones, whose pairs are known: a long one must not hold the engine up."""
LONGEST = 16
"""The longest match that is searched for, in tokens; while the text goes on as it did, the match grows beyond this."""


@dataclass(slots=True)
class UntriedDraft:
    """A draft that might have been made."""

    match: int
    """The text's match when the draft was made, and when the one before it was: the host knows only the latter if it launches a
    draft before it has read the previous one (Engine.overlapped_step)."""
    match_before: int
    accepted: int = 0


@dataclass(slots=True)
class Repeats:
    """The repeats of one text."""

    match: int = 0
    """Tokens up to the newest that stand at an earlier place, too."""
    place: int = 0
    """Where the text has the next token, if it goes on as it did there; with a match only."""
    seen: int = 0
    """How many of its tokens were looked at."""
    behind: dict[tuple[int, int], int] = field(default_factory=dict)
    """The newest place after each pair."""
    drafts: dict[int, UntriedDraft] = field(default_factory=dict)
    """By depth."""

    def follow(self, text: Sequence[int], prompt: int, depths: Collection[int]) -> Iterator[tuple[int, int, int]]:
        """The cycles that the tokens since the last call would have ended, with drafts of each depth: the depth, how much
        the cycle would have emitted, and the match that the cycle before it began with. The first `prompt` tokens of `text` are the
        prompt.

        In:  text [1, 2, 3, 1, 2, 3, 9], prompt 5, depths [2]
        Out: (2, 2, 2): drafted were 3 and 1 after the second [1, 2], and the 9 came instead of the 1
        """
        if not self.seen:
            for at in range(max(1, prompt - KEPT), prompt - 1):
                self.behind[text[at - 1], text[at]] = at + 1
            self._look(text, prompt - 1)
            self.seen = prompt
            self.drafts = {depth: UntriedDraft(self.match, self.match) for depth in depths}
        for at in range(self.seen, len(text)):
            is_repeated = self.match > 0 and text[self.place] == text[at]
            if is_repeated:
                self.match, self.place, self.behind[text[at - 1], text[at]] = self.match + 1, self.place + 1, at + 1
            else:
                self._look(text, at)
            for depth, draft in self.drafts.items():
                if is_repeated and draft.accepted < depth:
                    draft.accepted += 1
                else:
                    yield depth, draft.accepted + 1, draft.match_before
                    draft.match, draft.match_before, draft.accepted = self.match, draft.match, 0
        self.seen = len(text)

    def _look(self, text: Sequence[int], at: int) -> None:
        """Looks for the newest place where the text up to position `at` has stood before."""
        self.match = 0
        if at:
            pair = text[at - 1], text[at]
            self.place = self.behind.get(pair, 0)
            while self.match < min(self.place, LONGEST) and text[self.place - 1 - self.match] == text[at - self.match]:
                self.match += 1
            self.behind[pair] = at + 1
