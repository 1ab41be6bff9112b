"""What becomes of a request when tokens arrive for it, or when it ends otherwise. Plain Python apart from reading reports."""

import logging

from jaxspec.engine.pages import IntegrityError
from jaxspec.engine.request import FAILED, Request, Status, TokenLogprob, Update
from jaxspec.engine.runner import Emitted
from jaxspec.engine.scheduler import Scheduler
from jaxspec.spec.verify import OUT_OF_BUDGET, STOPPED

logger = logging.getLogger(__name__)

MAX_ERROR = 300
"""Characters of a request's error message."""


class Results:
    """Turns what programs emit into text and updates, and takes finished requests out of the scheduler.

    An update waits here until it is handed out, so that a failure in the same step loses none.
    """

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self._updates: list[Update] = []
        self.generated_tokens = self.verify_count = self.verified_tokens = 0
        """Counted as in EngineStats."""

    @property
    def are_waiting(self) -> bool:
        return bool(self._updates)

    def hand_out(self) -> list[Update]:
        """The updates since the last time that say anything."""
        updates, self._updates = self._updates, []
        return [update for update in updates if update.token_ids or update.output]

    def take(self, request: Request, emitted: Emitted, is_cycle: bool) -> None:
        """Adds what a program emitted. Whatever the tokens do to the tokenizer, only this request ends of it."""
        if request.status is Status.FINISHED:  # since the launch: by a stop string or an abort
            return
        try:
            self._updates.append(self._take(request, emitted, is_cycle))
        except IntegrityError:
            raise
        except Exception as error:
            logger.exception("request %s ends with an error", request.id)
            self.fail(request, error)

    def end(self, request: Request, reason: str) -> Update:
        """Ends a request from outside. Its last update is returned, and not handed out again."""
        try:
            return self._finish(request, reason, None, len(request.detokenizer.text), [], ())
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
        self._scheduler.finish(request)
        self._updates.append(Update(request.id, "", (), request.result()))

    def _take(self, request: Request, emitted: Emitted, is_cycle: bool) -> Update:
        """Finishes the request at a stop or at its budget."""
        shown = len(request.detokenizer.text)
        new = emitted.tokens[: request.detokenizer.add(emitted.tokens, ends_with_stop=emitted.finish == STOPPED)]
        logprobs = tuple(emitted.logprobs[: len(new)])
        request.tokens += new
        request.logprobs += logprobs
        self.generated_tokens += len(new)
        if is_cycle and new:
            request.accept_lengths.append(len(new))
            request.accepted_drafts += min(emitted.accepted, len(new))
            self.verify_count += 1
            self.verified_tokens += len(new)
        if request.detokenizer.matched is not None:
            return self._finish(request, "stop", request.detokenizer.matched, shown, new, logprobs)
        if emitted.finish == STOPPED:
            return self._finish(request, "stop", new[-1], shown, new, logprobs)
        if emitted.finish == OUT_OF_BUDGET:
            return self._finish(request, "length", None, shown, new, logprobs)
        return Update(request.id, request.detokenizer.text[shown:], tuple(new), logprobs=logprobs or None)

    def _finish(
        self,
        request: Request,
        reason: str,
        matched: int | str | None,
        shown: int,
        new: list[int],
        logprobs: tuple[TokenLogprob, ...],
    ) -> Update:
        """Ends a request; `shown` characters of its text were handed out before."""
        request.detokenizer.finish()
        if request.detokenizer.matched is not None and reason in ("stop", "length"):
            reason, matched = "stop", request.detokenizer.matched
        request.finish_reason, request.matched_stop = reason, matched
        self._scheduler.finish(request)
        return Update(request.id, request.detokenizer.text[shown:], tuple(new), request.result(), logprobs or None)
