"""The engine's output: emitted tokens become text, updates and results. Plain Python, no JAX."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from jaxspec.engine.pages import IntegrityError
from jaxspec.engine.request import FAILED, Request, Status, TokenLogprob, Update
from jaxspec.engine.scheduler import PrefillChunk, Scheduler
from jaxspec.engine.speculation import CycleCounts, DraftedTree, DraftSources, Verification
from jaxspec.engine.stats import SAMPLING, EngineStats
from jaxspec.grammar.matcher import GrammarError
from jaxspec.tree_shape import TreeShape

logger = logging.getLogger(__name__)

MAX_ERROR = 300
"""Characters of a request's error message."""
PREFILL, DRAFT, BONUS, PLAIN = "prefill", "draft", "bonus", "plain"


class Emitted(NamedTuple):
    """The tokens that a program emitted for one request."""

    tokens: list[int]
    accepted: int
    """The first `accepted` tokens are accepted drafts."""
    finish: str | None
    """"stop" (a stop token), "length" (max_tokens), or None: the request continues."""
    logprobs: list[TokenLogprob]
    """One per token if the request asks for them, else none."""
    tree: DraftedTree | None
    """If the request has `wants_trees` and drafts were verified."""
    drafted: int = 0
    """Drafts that were verified."""
    sources: DraftSources = DraftSources()


class Output:
    """Adds emitted tokens to requests, and removes finished requests from the scheduler.

    An update is kept until `take_updates`, so that a failure in the same step loses none.
    """

    def __init__(self, scheduler: Scheduler, counts: EngineStats, clock: Callable[[], float]):
        self._scheduler, self._counts, self._clock = scheduler, counts, clock
        self._updates: list[Update] = []

    @property
    def has_updates(self) -> bool:
        return bool(self._updates)

    def take_updates(self) -> list[Update]:
        """The updates since the last call, without empty ones."""
        updates, self._updates = self._updates, []
        return [update for update in updates if update.token_ids or update.output]

    def add(self, request: Request, emitted: Emitted, tree: TreeShape | None, *, drafts_count: bool = True) -> None:
        """Adds the tokens of a cycle with this tree, or of a prefill (None), and finishes the request at a stop or at max_tokens.
        If the tokenizer fails, only this request ends. `drafts_count`: as for Launched."""
        if request.status is Status.FINISHED:  # since the launch: by a stop string or an abort
            return
        try:
            shown, tokens, finish, ended = len(request.detokenizer.text), emitted.tokens, emitted.finish, False
            if request.matcher is not None:
                tokens, finish, ended = request.matcher.advance(tokens, finish)
            ends_with_stop = finish == "stop" and not ended
            new = tokens[: request.detokenizer.add(tokens, ends_with_stop=ends_with_stop)]
            logprobs = tuple(emitted.logprobs[: len(new)])
            request.tokens += new
            request.logprobs += logprobs
            self._counts.generated_tokens += len(new)
            if request.first_token_at is None and new:
                request.first_token_at = self._clock()
            verification = None
            if tree is not None and new:
                accepted = min(emitted.accepted, len(new))
                verification = Verification(tree, accepted, emitted.tree)
                sources = emitted.sources if drafts_count else DraftSources()
                drafted, num_steps = (emitted.drafted, tree.num_steps) if drafts_count else (0, 0)
                self._count(request, CycleCounts(len(new), accepted, drafted, num_steps, sources.accepted[:accepted]))
                self._counts.drafted_by_source.update(sources.drafted)
            update = self._update(request, shown, new, logprobs or None, verification)
            if ends_with_stop and request.detokenizer.matched is None:
                request.matched_stop = new[-1]
            reason = "stop" if request.detokenizer.matched is not None else finish
            self._updates.append(update if reason is None else self._finish(request, reason, update))
            if request.matcher is not None and reason is None:
                request.matcher.check()
        except IntegrityError:
            raise
        except GrammarError as error:
            self.fail(request, error)
        except Exception as error:
            logger.exception("request %s ends with an error", request.id)
            self.fail(request, error)

    def add_prompt_logprobs(self, chunk: PrefillChunk, entries: Sequence[TokenLogprob]) -> None:
        """Adds the log probabilities of the tokens after the chunk's first."""
        first = chunk.first_slot + 1
        chunk.request.prompt_logprobs[first : first + len(entries)] = entries

    def end(self, request: Request, reason: str) -> Update:
        """Ends a request with this finish_reason. Returns its last update, which `take_updates` does not return again."""
        try:
            return self._finish(request, reason, self._update(request, len(request.detokenizer.text)))
        except IntegrityError:
            raise
        except Exception as error:
            logger.exception("request %s ends with an error", request.id)
            self.fail(request, error)
            return self._updates.pop()

    def time_out(self, request: Request) -> None:
        """Ends a request whose deadline has passed."""
        self._updates.append(self.end(request, "timeout"))

    def fail(self, request: Request, error: BaseException) -> None:
        """Ends a request that the engine failed on. Its text so far remains."""
        if request.status is Status.FINISHED:
            return
        request.is_own_fault = isinstance(error, GrammarError)
        request.error = (str(error) if request.is_own_fault else f"{FAILED}: {type(error).__name__}: {error}")[:MAX_ERROR]
        request.finish_reason = "error"
        self._leave(request)
        self._updates.append(replace(self._update(request, len(request.detokenizer.text)), output=request.result()))

    def _update(
        self,
        request: Request,
        shown: int,
        new: Sequence[int] = (),
        logprobs: tuple[TokenLogprob, ...] | None = None,
        verification: Verification | None = None,
    ) -> Update:
        """The text after the first `shown` characters, and these new tokens."""
        detokenizer = request.detokenizer
        offsets = detokenizer.offsets_of(request.generated - len(new), len(new)) if detokenizer.with_offsets else None
        return Update(
            request.id, detokenizer.text[shown:], tuple(new), None, logprobs, verification, text_start=shown,
            text_offsets=offsets,
        )  # fmt: skip

    def _count(self, request: Request, cycle: CycleCounts) -> None:
        request.cycles.append(cycle)
        self._counts.verify_count += 1
        self._counts.verified_tokens += cycle.emitted
        if cycle.num_steps:
            self._counts.draft_count += 1
            self._counts.draft_tokens += cycle.drafted
            self._counts.accepted_tokens += cycle.accepted
            sampling = SAMPLING[request.asked.params.temperature > 0]
            self._counts.drafts_by_sampling[sampling] += 1
            self._counts.accepted_by_sampling[sampling] += cycle.accepted
            self._counts.accepted_by_source.update(cycle.sources)
            for position in range(cycle.accepted):
                self._counts.accepted_per_position[position] += 1

    def _finish(self, request: Request, reason: str, last: Update) -> Update:
        """Ends a request; returns its last update with the rest of the text and the result."""
        request.detokenizer.finish()
        if request.detokenizer.matched is not None and reason in ("stop", "length"):
            reason, request.matched_stop = "stop", request.detokenizer.matched
        request.finish_reason = reason
        self._leave(request)
        return replace(last, text=request.detokenizer.text[last.text_start :], output=request.result())

    def _leave(self, request: Request) -> None:
        request.finished_at = self._clock()
        self._scheduler.finish(request)
        assert request.finish_reason is not None
        self._counts.finished[request.finish_reason] += 1


class TracedToken(NamedTuple):
    """A generated token and its origin."""

    id: int
    text: str
    """The text it adds to the update. Half a character, or the beginning of a stop string, comes with a later token."""
    origin: str
    """PREFILL: the first token. DRAFT: an accepted draft. BONUS: the target's own token after them. PLAIN: nothing was drafted."""
    depth: int
    """Of an accepted draft, from 1; 0 for others."""


def traced_tokens(update: Update) -> list[TracedToken]:
    """The tokens of an update, of a request with `wants_trees`. Their texts together are the update's text.

    In:  text "abc", token_ids (5, 6, 7), text_start 9, text_offsets (9, 10, 10), accepted 2
    Out: (5, "a", DRAFT, 1), (6, "", DRAFT, 2), (7, "bc", BONUS, 0)
    """
    if not update.token_ids:
        return []
    if update.text_offsets is None:
        raise ValueError("the update has no text_offsets: add the request with wants_trees=True")
    begins = [min(max(0, offset - update.text_start), len(update.text)) for offset in update.text_offsets]
    edges = [0, *begins[1:], len(update.text)]
    return [
        TracedToken(token, update.text[edges[index] : edges[index + 1]], *_origin(update, index))
        for index, token in enumerate(update.token_ids)
    ]


def _origin(update: Update, index: int) -> tuple[str, int]:
    """Origin and depth of one token of the update."""
    verification = update.verification
    if verification is None:
        return PREFILL, 0
    if verification.shape.num_steps == 0:
        return PLAIN, 0
    return (DRAFT, index + 1) if index < verification.accepted else (BONUS, 0)
