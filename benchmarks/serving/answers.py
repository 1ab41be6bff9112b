"""What came back for one request, and when. All times are seconds of time.perf_counter."""

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple


class Request(NamedTuple):
    """A prompt, as text or token ids, and how many tokens to ask for."""

    prompt: str | list[int]
    output_len: int


class Failure(NamedTuple):
    """Why a request has no answer."""

    reason: str
    """Without the server's address, since it is recorded."""
    hint: str = ""
    """What the user can do, if that is known."""
    status: int | None = None
    """Of HTTP."""


class FailedRequest(Exception):
    """Ends the reading of an answer."""

    def __init__(self, reason: str, hint: str = "", status: int | None = None):
        super().__init__(reason)
        self.failure = Failure(reason, hint, status)


class Chunk(NamedTuple):
    """An event that brought text or tokens. With speculation one has all the tokens of a cycle."""

    time: float
    tokens: int | None
    """That it brought; None: the server does not say, and nothing else does, so it is not guessed."""


@dataclass
class Answer:
    """One request's answer. What the server did not tell is None."""

    sent: float
    ended: float = math.nan
    is_stream: bool = True
    chunks: list[Chunk] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int | None = None
    tokens: int | None = None
    """Tokens of the completion."""
    accept_length: float | None = None
    """Mean tokens per verification of this request."""
    accept_length_source: str | None = None
    finish_reason: str | None = None
    failure: Failure | None = None

    @property
    def first_token_seconds(self) -> float | None:
        """From sending it to its first token; None for an answer in one piece, which does not show when that was made."""
        return self.chunks[0].time - self.sent if self.is_stream and self.chunks else None

    @property
    def seconds(self) -> float:
        """From sending it to its last token."""
        return self.chunks[-1].time - self.sent

    @property
    def seconds_per_token(self) -> float | None:
        """Of the tokens after the first; None if there are none, or if their number is unknown."""
        if self.first_token_seconds is None or self.tokens is None or self.tokens < 2:
            return None
        return (self.seconds - self.first_token_seconds) / (self.tokens - 1)

    @property
    def chunk_gaps(self) -> list[float]:
        """Seconds between one chunk and the next."""
        return [after.time - before.time for before, after in pairwise(self.chunks)]

    @property
    def token_gaps(self) -> list[float] | None:
        """Seconds per token after the first chunk: a chunk's tokens share its gap. None if a chunk's tokens are unknown."""
        shares = []
        for gap, chunk in zip(self.chunk_gaps, self.chunks[1:], strict=True):
            if not chunk.tokens:
                return None
            shares += [gap / chunk.tokens] * chunk.tokens
        return shares if self.is_stream and self.chunks else None
