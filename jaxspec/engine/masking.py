"""Requests under grammars in the engine: when they may start, and the masks of their first tokens and of their cycles."""

import time
from collections.abc import Callable, Sequence

import numpy as np

from jaxspec.decoding.programs import Settlement
from jaxspec.decoding.tree import Candidates
from jaxspec.engine.launched import Launched
from jaxspec.engine.programs import ProgramError
from jaxspec.engine.request import Request, Status
from jaxspec.engine.runner import Half, Runner
from jaxspec.engine.scheduler import PrefillChunk, Scheduler
from jaxspec.engine.stats import EngineStats, Stopwatch
from jaxspec.engine.trees import TreeChoice
from jaxspec.grammar.cache import Grammars
from jaxspec.grammar.matcher import Bans, Matcher
from jaxspec.grammar.trees import DraftedNodes
from jaxspec.sampling_params import SamplingParams

WAIT_SECONDS = 0.005
"""A step in which nothing runs, as programs are missing, takes so long."""


class Masking:
    """Makes masks from the grammars of requests."""

    def __init__(self, grammars: Grammars, runner: Runner, trees: TreeChoice, counts: EngineStats):
        self._grammars, self._runner, self._trees, self._counts = grammars, runner, trees, counts
        self._time = Stopwatch()
        self._error: ProgramError | None = None
        """Why requests under grammars can't run."""

    def matcher_of(self, params: SamplingParams, stop_token_ids: Sequence[int]) -> Matcher | None:
        """For a new request. Raises ValueError, naming the field, if its grammar can't be compiled or allows no token."""
        if params.constraint is None:
            return None
        return self._grammars.matcher(params.constraint, Bans(stop_token_ids, params.bad_token_ids, params.allowed_token_ids))

    def may_start(self, request: Request) -> bool:
        """Whether the programs that the request needs are there; if not, they compile in the background."""
        if request.matcher is None:
            return True
        trees = dict.fromkeys((*self._trees.own, *(() if request.tree is None else (request.tree,))))
        try:
            return self._runner.can_mask(tuple(trees))
        except ProgramError as error:
            self._error = error
            return False

    def must_wait(self, scheduler: Scheduler) -> bool:
        """Whether all requests wait for programs."""
        if scheduler.admitted or not scheduler.waiting:
            return False
        return not any(self.may_start(request) for request in scheduler.waiting)

    def hopeless(self, waiting: Sequence[Request]) -> list[tuple[Request, ProgramError]]:
        """Requests whose programs can't be compiled."""
        if self._error is None:
            return []
        return [(request, self._error) for request in waiting if request.matcher is not None]

    def first_mask(self, chunk: PrefillChunk) -> np.ndarray | None:
        """The mask [1, 1, words] of the token after a prompt, with its last chunk; None: any token may follow."""
        matcher = chunk.request.matcher
        return matcher.step.words[None, None] if matcher is not None and chunk.is_last else None

    def launch_settlement(self, half: Half, fail: Callable[[Request, Exception], None]) -> Launched:
        """Waits for the trees, makes their masks and starts the second half. `fail` ends requests whose matcher fails."""
        drafted = drafted_nodes(half)
        matchers = [request.matcher if request.status is not Status.FINISHED else None for request in half.requests]
        with self._time:
            masked = self._grammars.masker.mask(matchers, drafted, half.settle.tree.num_steps, self._grammars.vocabulary.words)
        self._counts.mask_seconds = self._time.seconds
        for row, error in masked.failed.items():
            fail(half.requests[row], error)
        self._counts.pruned_tokens += masked.pruned
        self._counts.forced_tokens += masked.forced
        settlement = Settlement(masked.tokens, masked.parents, half.proposal.memo, masked.masks)
        return self._runner.launch_settlement(half, settlement)


def drafted_nodes(half: Half) -> DraftedNodes:
    """What was proposed, as soon as it is known."""
    tree, candidates = half.proposal.tree, half.proposal.candidates
    tokens, parents = np.asarray(tree.tokens), np.asarray(tree.parents)
    if isinstance(candidates, Candidates):
        of = (np.asarray(each) for each in (candidates.tokens, candidates.parents, candidates.scores))
    else:
        of = (np.zeros((len(tokens), 0), dtype) for dtype in (np.int32, np.int32, np.float32))
    return DraftedNodes(tokens, parents, *of)


def wait_for_programs() -> None:
    """Instead of a step that has nothing to do but wait."""
    time.sleep(WAIT_SECONDS)
