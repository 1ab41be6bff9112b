"""From conversations to batches: splits, packing, the draft vocabulary."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxspec.demo.corpus import is_heldout
from jaxspec.train.conversations import Conversation
from jaxspec.train.ttt import Rows


class Split(NamedTuple):
    """Conversations to learn from and to evaluate on."""

    learnt: list[Conversation]
    heldout: list[Conversation]


def split(conversations: Iterable[Conversation], length: int) -> Split:
    """Splits by a hash of the first prompt, so that a conversation keeps its part when others are added, and none is in both.

    Conversations are cut to `length` tokens; those without an answer in them are left out.
    """
    parts = Split([], [])
    for each in conversations:
        inside = [(start, min(end, length)) for start, end in each.answers if start + 1 < length]
        if inside:
            prompt = np.asarray(each.tokens[: inside[0][0]], "<i4").tobytes()
            parts[is_heldout(prompt)].append(each._replace(tokens=each.tokens[:length], answers=inside))
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
        for number, each in enumerate(content, 1):
            end = at + len(each.tokens)
            packed.tokens[row, at:end] = each.tokens
            packed.segments[row, at:end] = number
            packed.positions[row, at:end] = np.arange(len(each.tokens))
            for start, stop in each.learnt():
                packed.learnt[row, at + start : at + min(stop, len(each.tokens) - 1)] = True
            at = end
    return packed


OPEN_ROWS = 64
"""Rows that a conversation may still go into."""


def batch(count: int, size: int, step: int, seed: int) -> NDArray[np.int64]:
    """The rows of batch number `step`, of `count` rows in all: each at most once per epoch, in an order that depends on seed and
    epoch only, so that training can resume at any step."""
    size = min(size, count)
    per_epoch = count // size
    epoch, place = divmod(step, per_epoch)
    return np.random.default_rng([seed, epoch]).permutation(count)[place * size : (place + 1) * size]


ENOUGH, MOST_IDS = 0.98, 8192
"""The draft vocabulary covers this share of the text, with so many tokens at most."""


def counts_of(conversations: Iterable[Conversation], vocab_size: int) -> NDArray[np.int64]:
    """How often each token occurs in what is learnt [v]."""
    counts = np.zeros(vocab_size, np.int64)
    for each in conversations:
        for start, end in each.learnt():
            np.add.at(counts, np.asarray(each.tokens[start:end]), 1)
    return counts


def draft_vocabulary(conversations: Iterable[Conversation], size: int | None, vocab_size: int) -> NDArray[np.int64]:
    """The tokens that are most frequent in what is learnt, ties to the smaller id, as ascending target ids [size].

    size: None: as many as cover ENOUGH of the text, and MOST_IDS at most.
    """
    counts = counts_of(conversations, vocab_size)
    order = np.lexsort((np.arange(vocab_size), -counts))
    if size is None:
        size = min(MOST_IDS, 1 + int(np.searchsorted(np.cumsum(counts[order]), ENOUGH * counts.sum())))
    return np.sort(order[:size])
