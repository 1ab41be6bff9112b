"""How far n-gram drafts would have come in a text that something else decodes. Plain Python, no JAX.

What follows a text's newest tokens where they stood before needs no model, so the host can compare it with the tokens that come
anyway: whether a text repeats is known without trying a tree on it. Of the contexts that n-grams know (decoding/ngram.py), this has
the pairs of tokens: 0.7 µs for each token and tree (one busy AMD EPYC core, 27 November 2026).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

KEPT = 4096
"""Tokens of a prompt, the last ones, whose pairs are known: a long one must not hold the engine up."""


@dataclass(slots=True)
class UntriedDraft:
    """A draft that might have been made."""

    place: int | None = None
    """Where the text has the next token, if the text goes on as it did there. None: its last pair of tokens is new."""
    accepted: int = 0


@dataclass(slots=True)
class Repeats:
    """Of one text."""

    seen: int = 0
    """Its tokens that were looked at."""
    behind: dict[tuple[int, int], int] = field(default_factory=dict)
    """The newest place behind each pair."""
    drafts: dict[int, UntriedDraft] = field(default_factory=dict)
    """By depth."""

    def follow(self, text: Sequence[int], prompt: int, depths: Collection[int]) -> Iterator[tuple[int, int]]:
        """The cycles that the tokens since the last call would have ended, with drafts of each depth: the depth, and how much
        the cycle would have emitted. `text` begins with a prompt of so many tokens.

        In:  text [1, 2, 3, 1, 2, 3, 9], prompt 5, depths [2]
        Out: (2, 2): drafted were 3 and 1 behind the second [1, 2], and the 9 came instead of the 1
        """
        if not self.seen:
            self.drafts = {depth: UntriedDraft() for depth in depths}
            for at in range(max(1, prompt - KEPT), prompt - 1):
                self.behind[text[at - 1], text[at]] = at + 1
            self.seen = max(1, prompt - 1)
        for at in range(self.seen, len(text)):
            token, pair = text[at], (text[at - 1], text[at])
            behind = self.behind.get(pair)
            for depth, draft in self.drafts.items():
                if draft.place is not None and draft.accepted < depth and text[draft.place] == token:
                    draft.accepted += 1
                    draft.place += 1
                    continue
                if at >= prompt:
                    yield depth, draft.accepted + 1
                draft.place, draft.accepted = behind, 0
            self.behind[pair] = at + 1
        self.seen = len(text)
