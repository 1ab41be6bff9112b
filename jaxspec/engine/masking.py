"""Requests under grammars in the engine: their matchers, and the masks of their first tokens and of their cycles.

A cycle whose halves are compiled has masks for all nodes of its tree. Until then the ordinary program runs, with a mask for each
row: one token per cycle, and no request waits for a compiler. (In lossy engines it waits: the text depends on the tree.)
"""

from collections.abc import Callable, Iterable, Sequence
from time import perf_counter

import numpy as np

from jaxspec.decoding.programs import Settlement
from jaxspec.decoding.tree import Candidates
from jaxspec.engine.launched import Launched
from jaxspec.engine.request import Request, Status
from jaxspec.engine.runner import Half, Runner
from jaxspec.engine.stats import EngineStats
from jaxspec.engine.trees import PlannedCycle
from jaxspec.grammar.cache import Grammars
from jaxspec.grammar.matcher import Bans, Matcher
from jaxspec.grammar.trees import DraftedNodes
from jaxspec.sampling_params import SamplingParams


class Masking:
    """Makes masks from the grammars of requests."""

    def __init__(self, grammars: Grammars, runner: Runner, counts: EngineStats):
        self._grammars, self._runner, self._counts = grammars, runner, counts

    def matcher_of(self, params: SamplingParams, stop_token_ids: Sequence[int]) -> Matcher | None:
        """For a new request. Raises ValueError, naming the field, if its grammar can't be compiled or allows no token."""
        if params.constraint is None:
            return None
        return self._grammars.matcher(params.constraint, Bans(stop_token_ids, params.bad_token_ids, params.allowed_token_ids))

    def launch_masks(self, requests: Iterable[Request]) -> None:
        """Launches the masks of the next tokens of these requests, some of which have grammars."""
        for request in requests:
            if request.matcher is not None and request.status is not Status.FINISHED:
                self._runner.launch_mask(request, request.matcher.step.words)

    def launch(self, cycle: Half | PlannedCycle, fail: Callable[[Request, Exception], None]) -> Launched:
        """Makes the masks and starts what is left of the cycle. The texts before it were read. `fail` ends requests whose matcher
        fails."""
        if isinstance(cycle, Half):
            return self._launch_settlement(cycle, fail)
        self.launch_masks(cycle.requests)
        return self._runner.launch_cycle(cycle.requests, cycle.tree)._replace(drafts_count=False)

    def _launch_settlement(self, half: Half, fail: Callable[[Request, Exception], None]) -> Launched:
        """Waits for the trees, makes their masks and starts the second half."""
        drafted = drafted_nodes(half)
        matchers = [request.matcher if request.status is not Status.FINISHED else None for request in half.requests]
        started = perf_counter()
        masked = self._grammars.masker.mask(matchers, drafted, half.settle.tree.num_steps, self._grammars.vocabulary.words)
        self._counts.mask_seconds += perf_counter() - started
        for row, error in masked.failed.items():
            fail(half.requests[row], error)
        self._counts.pruned_tokens += sum([len(pruning.pruned) for pruning in masked.prunings.values()])
        self._counts.forced_tokens += sum([pruning.forced for pruning in masked.prunings.values()])
        settlement = Settlement(masked.tokens, masked.parents, half.proposal.memo, masked.masks, masked.sources)
        return self._runner.launch_settlement(half, settlement)._replace(prunings=masked.prunings)


def drafted_nodes(half: Half) -> DraftedNodes:
    """What was proposed, as soon as it is known."""
    tree, candidates = half.proposal.tree, half.proposal.candidates
    tokens, parents = np.asarray(tree.tokens), np.asarray(tree.parents)
    if not isinstance(candidates, Candidates):
        return DraftedNodes(tokens, parents, *(np.zeros((len(tokens), 0), dtype) for dtype in (np.int32, np.int32, np.float32)))
    of = (np.asarray(each) for each in (candidates.tokens, candidates.parents, candidates.scores))
    sources = (None if each is None else np.asarray(each) for each in (tree.sources, candidates.sources))
    return DraftedNodes(tokens, parents, *of, *sources)
