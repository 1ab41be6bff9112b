"""Texts that requests have generated, for n-gram drafts of others: `TextStore` finds the longest that continues a text, `Lending`
decides which request gets which. Plain Python and NumPy.

The search of the newest tokens is part of the cycle (decoding/ngram.py), and so it stays: the host only lends a request a stretch
of another's text, which the cycle searches along with the request's own. It may do so a cycle late, since the stretch reaches far
ahead. No cycle waits for the host, which looking up each cycle's candidates would cost.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from jaxspec.decoding.ngram import NOTHING
from jaxspec.engine.request import Request
from jaxspec.host_memory import available_memory

LENT = 256
"""Tokens that a request is lent at a time, with CONTEXT of them up to its own newest token."""
CONTEXT = 16
RENEWED = 64
"""A stretch with fewer tokens left ahead is replaced."""
LOOKUP_WAIT = 8
"""Tokens that a request goes on without a stretch before its text is looked up again."""
ORDERS = (16, 8, 4)
"""Lengths of the contexts by which texts are found, the longest first."""
BYTES_PER_TOKEN = 24
"""Bytes of the store per token: the token, its owner, and an entry in each order's table; tables are filled at least to a half."""
LEAST_TOKENS = 4096
END = -1
"""In place of a token: what ends a text."""
MULTIPLIER, MIXER, WORD = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 2**64 - 1


class Continuation(NamedTuple):
    """A place where another text had a text's newest tokens."""

    match: int
    """How many of them, one of ORDERS; more may be equal."""
    behind: np.ndarray
    """[m] int32: the tokens that followed."""


class TextStore:
    """Token sequences in a bounded ring: new ones take the place of the oldest. Each belongs to a salt, and is found under it only.

    A table for each order has the newest place of each context, by its hash. An entry may be wrong (two contexts with one hash) or
    old (its place was taken), so the tokens found there are compared with the context.
    """

    def __init__(self, max_bytes: int):
        """Raises ValueError if there is not so much memory."""
        if max_bytes > (available := available_memory()):
            raise ValueError(f"ngram_share is {max_bytes >> 20} MB, and {available >> 20} MB of memory are available: lower it")
        self.capacity = max(LEAST_TOKENS, max_bytes // BYTES_PER_TOKEN)
        self._bits = (self.capacity - 1).bit_length() - 1
        self._multipliers = {order: powers(order) for order in ORDERS}
        self.clear()

    def clear(self) -> None:
        """Forgets all texts."""
        self._tokens = np.full(self.capacity, END, np.int32)
        self._owners = np.zeros(self.capacity, np.int64)
        self._tables = {order: np.zeros(1 << self._bits, np.int32) for order in ORDERS}
        self._next = 1  # place 0 ends the text before it
        self.texts = 0

    @property
    def nbytes(self) -> int:
        return self._tokens.nbytes + self._owners.nbytes + sum(table.nbytes for table in self._tables.values())

    def add(self, text: Sequence[int], salt: str | None = None) -> None:
        """Keeps a text, the newest tokens of it if it is longer than a quarter of the store."""
        tokens = np.asarray(text, np.int32)[-(self.capacity // 4) :]
        if len(tokens) < ORDERS[-1] + 1:
            return
        if self._next + len(tokens) + 1 > self.capacity:
            self._tokens[self._next :] = END
            self._next = 1
        first, last, owner = self._next, self._next + len(tokens), owner_of(salt)
        self._tokens[first:last], self._tokens[last] = tokens, END
        self._owners[first:last] = owner
        self._next = last + 1
        self.texts += 1
        wide = tokens.astype(np.uint64)
        for order, table in self._tables.items():
            if len(wide) > order:
                windows = np.lib.stride_tricks.sliding_window_view(wide[:-1], order)
                sums = windows @ np.array(self._multipliers[order], np.uint64) + np.uint64(owner & WORD)
                table[(sums * np.uint64(MIXER)) >> np.uint64(64 - self._bits)] = first + order - 1 + np.arange(len(windows))

    def find(self, tail: Sequence[int], salt: str | None = None, most: int = LENT) -> Continuation | None:
        """What followed the newest tokens in another text with this salt: after the longest ending of `tail` that is found there,
        where it stood last. None: no text has the last 4 tokens.

        In:  texts [5, 6, 7, 8, 9, 1] and [0, 6, 7, 8, 9, 2], tail [3, 6, 7, 8, 9]
        Out: match 4, behind [2]
        """
        owner = owner_of(salt)
        for order in ORDERS:
            if len(tail) < order:
                continue
            context = list(tail[len(tail) - order :])
            mixed = sum([token * factor for token, factor in zip(context, self._multipliers[order], strict=True)], owner) * MIXER
            at = int(self._tables[order][(mixed & WORD) >> (64 - self._bits)])
            if at < order or self._owners[at] != owner or self._tokens[at - order + 1 : at + 1].tolist() != context:
                continue
            behind = self._tokens[at + 1 : at + 1 + most]
            ends = np.flatnonzero(behind == END)
            behind = behind[: ends[0]] if len(ends) else behind
            if len(behind):
                return Continuation(order, behind.copy())
        return None


def powers(count: int) -> tuple[int, ...]:
    """Factors of a polynomial hash, modulo 2^64."""
    return tuple([pow(MULTIPLIER, place + 1, 2**64) for place in range(count)])


def owner_of(salt: str | None) -> int:
    """A salt as a number of 63 bits; 0: no salt."""
    return 0 if salt is None else 1 + (int.from_bytes(blake2b(salt.encode(errors="surrogatepass"), digest_size=8).digest()) >> 2)


@dataclass
class Loan:
    """What the host knows of a request's stretch."""

    behind: np.ndarray
    """What is expected after the text as far as it was read; empty: there is no stretch, or the text has left it."""
    known: int
    """Tokens of the text, as far as it was read."""
    waits: int = 0
    """Tokens until it is looked up again."""


class Lending:
    """The stretches of running requests. A request that shows its trees gets none, since they would show another's tokens."""

    def __init__(self, store: TextStore):
        self.store = store
        self._loans: WeakKeyDictionary[Request, Loan] = WeakKeyDictionary()  # requests may end unseen, as by an abort
        self._private: WeakSet[Request] = WeakSet()  # they began before `clear`

    def begin(self, request: Request) -> np.ndarray:
        """The stretch [LENT] for a request that is admitted, which may be blank: another request had its row before."""
        self._loans.pop(request, None)
        if request.asked.wants_trees:
            return blank()
        loan = self._loans[request] = Loan(np.zeros(0, np.int32), len(request.tokens))
        found = self._renewed(loan, request)
        return blank() if found is None else found

    def follow(self, request: Request) -> np.ndarray | None:
        """A new stretch for a request whose text has grown; None: the old one is still good, or there is none."""
        loan, text = self._loans.get(request), request.tokens
        if loan is None or len(text) == loan.known:
            return None
        new = len(text) - loan.known
        loan.known, loan.waits = len(text), loan.waits - new
        if new <= len(loan.behind) and loan.behind[:new].tolist() == list(text[len(text) - new :]):
            loan.behind = loan.behind[new:]
            if len(loan.behind) >= RENEWED:
                return None
        else:
            loan.behind = loan.behind[:0]
        return self._renewed(loan, request) if loan.waits <= 0 else None

    def end(self, request: Request) -> None:
        """The request has ended: others may continue its output, unless it was ended early."""
        self._loans.pop(request, None)
        if request.finish_reason in ("stop", "length") and request not in self._private:
            self.store.add(request.output, request.asked.cache_salt)

    def clear(self, unfinished: Iterable[Request]) -> None:
        """Forgets all texts, and will keep none of these requests."""
        self.store.clear()
        self._private.update(unfinished)

    def _renewed(self, loan: Loan, request: Request) -> np.ndarray | None:
        text = request.tokens[-ORDERS[0] :]
        found = self.store.find(text, request.asked.cache_salt, LENT - CONTEXT)
        if found is None or len(found.behind) <= len(loan.behind):
            loan.waits = LOOKUP_WAIT
            return None
        loan.behind = found.behind
        loan.waits = LOOKUP_WAIT if len(found.behind) < RENEWED else 0
        return stretch(text[-found.match :], found.behind)


def blank() -> np.ndarray:
    return np.full(LENT, NOTHING, np.int32)


def stretch(context: Sequence[int], behind: np.ndarray) -> np.ndarray:
    """What is lent, at the end of the array.

    In:  context [5, 6], behind [7, 8]
    Out: [-1, ..., -1, 5, 6, 7, 8]
    """
    lent, size = blank(), len(context) + len(behind)
    lent[LENT - size : LENT - len(behind)] = context
    lent[LENT - len(behind) :] = behind
    return lent
