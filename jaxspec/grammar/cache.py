"""Compiled grammars, kept for the requests to come."""

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

from jaxspec.child_process import ChildProcess
from jaxspec.grammar import trial
from jaxspec.grammar.compiling import VocabularySource, compiled
from jaxspec.grammar.matcher import Bans, Grammar, Matcher
from jaxspec.grammar.trees import Masker
from jaxspec.grammar.vocabulary import Vocabulary, source_of

CACHE_BYTES = 64 * 2**20
"""How many bytes of compiled grammars are kept. A usual schema's takes about 0.1 MB."""
TRIAL_SECONDS = 2.0
"""The limit for one grammar to compile; most take a millisecond."""
START_SECONDS = 30.0
"""The limit for the process to start and load the vocabulary; usually it takes a second."""
MAX_REPLY = 2**16
"""Bytes."""
MOST_HELD = 2**30
"""Bytes of compiled grammars, with those of unfinished requests, above which no other is compiled."""
MOST_WAITING = 64
"""Grammars that wait to be compiled."""

logger = logging.getLogger(__name__)


type Constraint = tuple[str, str]
"""What a text must follow: the field of SamplingParams, and its value as text."""


class GrammarsBusy(RuntimeError):
    """Too many grammars wait to be compiled, or those of requests take too much memory: try again later."""


class Grammars:
    """The grammars of one model, by their text. Thread-safe. The vocabulary is loaded when the first grammar comes."""

    def __init__(self, tokenizer: Any, vocab_size: int, ends: Sequence[int], most_bytes: int = CACHE_BYTES):
        """Without a `tokenizer` (None) every grammar is refused."""
        self._tokenizer, self._size, self._ends, self._most_bytes = tokenizer, vocab_size, ends, most_bytes
        self._kept: OrderedDict[Constraint, Grammar] = OrderedDict()
        self._held: WeakValueDictionary[Constraint, Grammar] = WeakValueDictionary()
        """The kept grammars, and those of requests."""
        self._lock, self._trials = threading.Lock(), threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")  # hostile grammars take one core at most
        self._coming: dict[Constraint, Future[Grammar]] = {}
        self._process: ChildProcess | None = None
        self._is_closed = False

    @cached_property
    def masker(self) -> Masker:
        """Makes the masks of cycles."""
        return Masker()

    @cached_property
    def _source(self) -> VocabularySource:
        if self._tokenizer is None:
            raise ValueError("needs a tokenizer, and this model directory has none")
        return source_of(self._tokenizer, self._size, self._ends)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Raises ValueError if the model has no tokenizer that tells the bytes of its tokens."""
        return Vocabulary(self._source)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the grammars that are kept."""
        return sum(each.bytes for each in list(self._kept.values()))

    def tried(self, constraint: Constraint) -> "Future[Grammar]":
        """The grammar, compiled first in a process with limits, unless it is held; its ValueError names the field. One by one, in a
        thread. A grammar may take TRIAL_SECONDS, the first one longer. All callers meanwhile get the same future, so none may
        cancel it. While someone holds the result, `matcher` need not compile it.

        Raises:
            GrammarsBusy: too many wait already, or MOST_HELD bytes are taken.
            RuntimeError: after `close`.
        """
        with self._lock:
            if constraint in self._coming:
                return self._coming[constraint]
            if (grammar := self._held.get(constraint)) is not None:
                done: Future[Grammar] = Future()
                done.set_result(grammar)
                return done
            if (held := sum(each.bytes for each in self._held.values())) > MOST_HELD:
                raise GrammarsBusy(f"the grammars of unfinished requests take {held / 2**20:.0f} MiB already: try again later")
            if len(self._coming) >= MOST_WAITING:
                raise GrammarsBusy(f"{MOST_WAITING} grammars wait to be compiled already: try again later")
            coming = self._coming[constraint] = self._thread.submit(self._compile, constraint)
        return coming

    def _compile(self, constraint: Constraint) -> Grammar:
        try:
            source = self._source  # before a process is started
            with self._trials:
                if self._is_closed:  # while the vocabulary was loaded
                    raise CancelledError
                size = self._try(source, constraint)
            return self._keep(constraint, size)
        except ValueError as error:
            raise ValueError(f"{constraint[0]} {error}") from None
        finally:
            with self._lock:
                del self._coming[constraint]

    def matcher(self, constraint: Constraint, bans: Bans) -> Matcher:
        """A matcher at the grammar's beginning. Raises ValueError, naming the field: it can't be compiled, or allows no token."""
        with self._lock:
            grammar = self._held.get(constraint)
            if constraint in self._kept:
                self._kept.move_to_end(constraint)
        try:
            grammar = grammar or self._keep(constraint, trial.LEAST_BYTES + len(constraint[1]))
            return Matcher(grammar, self.vocabulary, bans)
        except ValueError as error:
            raise ValueError(f"{constraint[0]} {error}") from None

    def close(self) -> None:
        """Ends the process and the threads."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        with self._trials:
            self._is_closed = True
            self._end_process()
        if "masker" in vars(self):
            self.masker.close()

    def _keep(self, constraint: Constraint, size: int) -> Grammar:
        try:
            made = Grammar(compiled(self.vocabulary.tokenizer, *constraint), size)
        except ValueError as error:
            raise ValueError(f"can't be compiled: {error}") from None
        with self._lock:
            self._kept[constraint] = self._held[constraint] = made
            while len(self._kept) > 1 and self.kept_bytes > self._most_bytes:
                self._kept.popitem(last=False)
        return made

    def _try(self, source: VocabularySource, constraint: Constraint) -> int:
        """The bytes that the grammar takes. Raises ValueError with the reason if it can't be compiled within limits."""
        try:
            if self._process is None or not self._process.is_alive:
                self._end_process()
                self._process = ChildProcess(trial.__file__)
                self._process.ask({"vocabulary": source._asdict()}, START_SECONDS, MAX_REPLY)
            reply = self._process.ask(dict(zip(("kind", "text"), constraint, strict=True)), TRIAL_SECONDS, MAX_REPLY)
        except (TimeoutError, ConnectionError) as error:
            self._end_process()
            slow = isinstance(error, TimeoutError)
            reason = f"it takes more than {TRIAL_SECONDS:g} seconds" if slow else "it is nested too deeply or takes too much memory"
            logger.warning("replacing the process that tries grammars: %s", reason)
            raise ValueError(f"can't be compiled: {reason}") from None
        if "error" in reply:
            raise ValueError(f"can't be compiled: {reply['error']}")
        return int(reply["bytes"])

    def _end_process(self) -> None:
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.close()
            self._process = None
