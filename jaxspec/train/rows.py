"""From conversations to batches: splits, packing, the draft vocabulary."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxspec.train.conversations import Conversation
from jaxspec.train.ttt import Rows

HELDOUT = 0.04
"""Share of the conversations that are held out."""


class Split(NamedTuple):
    """Conversations to learn from and to judge by."""

    learnt: list[Conversation]
    heldout: list[Conversation]


def split(conversations: Iterable[Conversation], length: int) -> Split:
    """Divides them by a hash of the first prompt, so that a conversation stays on its side whatever is added, and none is in both.

    Conversations are cut to `length` tokens; those without an answer in them are left out.
    """
    parts = Split([], [])
    for tokens, answers in conversations:
        inside = [(start, min(end, length)) for start, end in answers if start + 1 < length]
        if inside:
            prompt = np.asarray(tokens[: answers[0][0]], "<i4").tobytes()
            is_heldout = int.from_bytes(hashlib.sha256(prompt).digest()[:4], "big") < HELDOUT * 2**32
            parts[is_heldout].append(Conversation(tokens[:length], inside))
    return parts


def pack(conversations: Sequence[Conversation], length: int) -> Rows:
    """Rows of `length` tokens, longest conversations first, each into the first row that has room.

    See `Rows` for an example. At most OPEN_ROWS rows are open at a time, so that this takes linear time.
    """
    rows: list[list[Conversation]] = []
    room: list[int] = []
    for conversation in sorted(conversations, key=lambda each: -len(each.tokens)):
        first = max(0, len(rows) - OPEN_ROWS)
        place = next((index for index in range(first, len(rows)) if room[index] >= len(conversation.tokens)), None)
        if place is None:
            place = len(rows)
            rows.append([])
            room.append(length)
        rows[place].append(conversation)
        room[place] -= len(conversation.tokens)
    zeros = np.zeros((len(rows), length), np.int32)
    packed = Rows(zeros, zeros.copy(), zeros.copy(), zeros.astype(np.bool_))
    for row, content in enumerate(rows):
        at = 0
        for number, (tokens, answers) in enumerate(content, 1):
            end = at + len(tokens)
            packed.tokens[row, at:end] = tokens
            packed.segments[row, at:end] = number
            packed.positions[row, at:end] = np.arange(len(tokens))
            for start, stop in answers:
                packed.learnt[row, at + start : at + min(stop, len(tokens) - 1)] = True
            at = end
    return packed


OPEN_ROWS = 64
"""Rows that a conversation may still go into."""


def batch(count: int, size: int, step: int, seed: int) -> NDArray[np.int64]:
    """The rows of batch number `step`, of `count` rows in all: every row once per epoch, in an order that depends on seed and epoch
    only, so that training can go on from any step."""
    size = min(size, count)
    per_epoch = count // size
    epoch, place = divmod(step, per_epoch)
    return np.random.default_rng([seed, epoch]).permutation(count)[place * size : (place + 1) * size]


def draft_vocabulary(conversations: Iterable[Conversation], size: int, vocab_size: int) -> NDArray[np.int64]:
    """The tokens that are most frequent in answers, ties to the smaller id, as ascending target ids [size]."""
    counts = np.zeros(vocab_size, np.int64)
    for tokens, answers in conversations:
        for start, end in answers:
            np.add.at(counts, np.asarray(tokens[start:end]), 1)
    return np.sort(np.lexsort((np.arange(vocab_size), -counts))[: min(size, vocab_size)])
