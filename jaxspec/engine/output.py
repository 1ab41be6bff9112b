"""What becomes of a request when tokens arrive for it, or when it ends otherwise. Plain Python, no JAX."""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from jaxspec.config import SpecConfig
from jaxspec.engine.detokenizer import Decoder, Detokenizer
from jaxspec.engine.pages import IntegrityError
from jaxspec.engine.request import FAILED, CycleCounts, DraftedTree, Request, Status, TokenLogprob, Update, Verification
from jaxspec.engine.scheduler import Scheduler
from jaxspec.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

MAX_ERROR = 300
"""Characters of a request's error message."""


class Emitted(NamedTuple):
    """What a program emitted for one request."""

    tokens: list[int]
    accepted: int
    finish: str | None
    """"stop" (a stop token), "length" (max_tokens), or None: the request continues."""
    logprobs: list[TokenLogprob]
    """One per token, or none at all."""
    tree: DraftedTree | None
    """If the request wants to see it and something was drafted."""


class Output:
    """Turns what programs emit into text and updates, and takes finished requests out of the scheduler.

    An update waits here until it is handed out, so that a failure in the same step loses none.
    """

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]):
        self._scheduler, self._clock = scheduler, clock
        self._updates: list[Update] = []
        self.generated_tokens = self.verify_count = self.verified_tokens = 0
        """Counted as in EngineStats, as the next four."""
        self.draft_count = self.draft_tokens = 0
        self.accepted_per_position: list[int] = []
        self.finished: Counter[str] = Counter()

    @property
    def are_waiting(self) -> bool:
        return bool(self._updates)

    def hand_out(self) -> list[Update]:
        """The updates since the last time that say anything."""
        updates, self._updates = self._updates, []
        return [update for update in updates if update.token_ids or update.output]

    def take(self, request: Request, emitted: Emitted, spec: SpecConfig | None) -> None:
        """Adds what a cycle with this tree emitted, or a prefill (None). Whatever the tokens do to the tokenizer, only this request
        ends of it."""
        if request.status is Status.FINISHED:  # since the launch: by a stop string or an abort
            return
        try:
            self._updates.append(self._take(request, emitted, spec))
        except IntegrityError:
            raise
        except Exception as error:
            logger.exception("request %s ends with an error", request.id)
            self.fail(request, error)

    def end(self, request: Request, reason: str) -> Update:
        """Ends a request from outside. Its last update is returned, and not handed out again."""
        try:
            return self._finish(request, reason, Update(request.id, "", ()), len(request.detokenizer.text))
        except IntegrityError:
            raise
        except Exception as error:
            logger.exception("request %s ends with an error", request.id)
            self.fail(request, error)
            return self._updates.pop()

    def time_out(self, request: Request) -> None:
        """Ends a request whose deadline has passed."""
        self._updates.append(self.end(request, "timeout"))

    def fail(self, request: Request, error: Exception) -> None:
        """Ends a request that could not be served; the text that was handed out stays."""
        if request.status is Status.FINISHED:
            return
        request.error = f"{FAILED}: {type(error).__name__}: {error}"[:MAX_ERROR]
        request.finish_reason = "error"
        self._leave(request)
        self._updates.append(Update(request.id, "", (), request.result()))

    def _take(self, request: Request, emitted: Emitted, spec: SpecConfig | None) -> Update:
        """Finishes the request at a stop or at its budget."""
        shown = len(request.detokenizer.text)
        new = emitted.tokens[: request.detokenizer.add(emitted.tokens, ends_with_stop=emitted.finish == "stop")]
        logprobs = tuple(emitted.logprobs[: len(new)])
        request.tokens += new
        request.logprobs += logprobs
        self.generated_tokens += len(new)
        if request.first_token_at is None and new:
            request.first_token_at = self._clock()
        verification = None
        if spec is not None and new:
            accepted = min(emitted.accepted, len(new))
            verification = Verification(spec, accepted, emitted.tree)
            self._count(request, CycleCounts(len(new), accepted, spec.num_draft_tokens - 1, spec.num_steps))
        update = Update(request.id, request.detokenizer.text[shown:], tuple(new), None, logprobs or None, verification)
        if request.detokenizer.matched is not None:
            return self._finish(request, "stop", update, shown)
        if emitted.finish == "stop":
            request.matched_stop = new[-1]
            return self._finish(request, "stop", update, shown)
        if emitted.finish == "length":
            return self._finish(request, "length", update, shown)
        return update

    def _count(self, request: Request, cycle: CycleCounts) -> None:
        request.cycles.append(cycle)
        self.verify_count += 1
        self.verified_tokens += cycle.emitted
        if cycle.drafted:
            self.draft_count += 1
            self.draft_tokens += cycle.drafted
            self.accepted_per_position += [0] * (cycle.num_steps - len(self.accepted_per_position))
            for position in range(cycle.accepted):
                self.accepted_per_position[position] += 1

    def _finish(self, request: Request, reason: str, last: Update, shown: int) -> Update:
        """Ends a request with its last update; `shown` characters of its text were handed out before."""
        request.detokenizer.finish()
        if request.detokenizer.matched is not None and reason in ("stop", "length"):
            reason, request.matched_stop = "stop", request.detokenizer.matched
        request.finish_reason = reason
        self._leave(request)
        return replace(last, text=request.detokenizer.text[shown:], output=request.result())

    def _leave(self, request: Request) -> None:
        request.finished_at = self._clock()
        self._scheduler.finish(request)
        assert request.finish_reason is not None
        self.finished[request.finish_reason] += 1


PREFILL, DRAFT, BONUS, PLAIN = "prefill", "draft", "bonus", "plain"


class TracedToken(NamedTuple):
    """A token of the output."""

    id: int
    text: str
    """What it adds to the text. Half a character, or what might begin a stop string, comes with a later token."""
    origin: str
    """PREFILL: the first token. DRAFT: accepted. BONUS: the target's own, behind the accepted drafts. PLAIN: no draft was there."""
    depth: int
    """Of an accepted draft, from 1 on; 0 for others."""


class TokenTrace:
    """Takes the updates of one request, in order. The texts of all tokens together are the whole text."""

    def __init__(self, tokenizer: Decoder | None, params: SamplingParams):
        self._text = Detokenizer.of_request(tokenizer, params)

    def add(self, update: Update) -> list[TracedToken]:
        """The tokens of the update."""
        stopped = update.output is not None and isinstance(update.output.matched_stop, int)
        traced = []
        for index, token in enumerate(update.token_ids):
            is_last = index == len(update.token_ids) - 1
            shown = len(self._text.text)
            self._text.add([token], ends_with_stop=stopped and is_last)
            if is_last and update.output is not None:
                self._text.finish()
            traced.append(TracedToken(token, self._text.text[shown:], *_origin(update, index)))
        return traced


def _origin(update: Update, index: int) -> tuple[str, int]:
    """Origin and depth of one token of the update."""
    verification = update.verification
    if verification is None:
        return PREFILL, 0
    if verification.spec.num_steps == 0:
        return PLAIN, 0
    return (DRAFT, index + 1) if index < verification.accepted else (BONUS, 0)
