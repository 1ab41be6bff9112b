"""A launched program, and what the host reads of it."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax
import numpy as np

from jaxspec.decoding.sampling import Logprobs
from jaxspec.decoding.state import Drafted, ProgramOutput
from jaxspec.decoding.verify import NOT_VERIFIED, OUT_OF_BUDGET, REPORT_HEADER, RUNNING, STOPPED
from jaxspec.engine.output import Emitted
from jaxspec.engine.request import Request, TokenLogprob
from jaxspec.engine.scheduler import PrefillChunk
from jaxspec.engine.speculation import DraftedTree, DraftSources
from jaxspec.grammar.trees import Pruning
from jaxspec.models.linear import NO_TOKEN
from jaxspec.tree_shape import TreeShape

FINISH = {RUNNING: None, STOPPED: "stop", OUT_OF_BUDGET: "length"}


class Launched(NamedTuple):
    """A launched program. Row i of its report belongs to requests[i]. Its arrays are the device's until `on_host`."""

    requests: list[Request]
    """The requests with a result in it."""
    report: jax.Array
    tree: TreeShape | None
    """The tree of a cycle; None for a prefill."""
    chunks: Sequence[PrefillChunk]
    """What a prefill computes, by row; empty for a cycle. A chunk that is not its prompt's last has no request above, unless it
    has log probabilities of the prompt."""
    logprobs: Logprobs | None
    """None unless one of the requests asks for them; the same for the next two."""
    prompt_logprobs: Logprobs | None
    drafted: Drafted | None
    most_emitted: int
    """Tokens per request, at most; 0 if no chunk is its prompt's last."""
    unreported: Sequence[Request] = ()
    """Requests with chunks that were launched before it, or in it, and have no result: if one of these failed, this result shows
    it."""
    prunings: Mapping[int, Pruning] = MappingProxyType({})
    """What grammars changed of the trees, by row; none of a row without a grammar."""
    drafts_count: bool = True
    """A draft could have been accepted: not under masks of roots."""

    @classmethod
    def of(
        cls,
        output: ProgramOutput,
        requests: list[Request],
        *,
        tree: TreeShape | None = None,
        chunks: Sequence[PrefillChunk] = (),
    ) -> "Launched":
        """Starts copying to the host the parts of the output that the requests ask for."""
        logprobs, prompt_logprobs, drafted = None, None, None
        for asked in [request.asked for request in requests]:
            if asked.params.logprobs is not None:
                logprobs = output.logprobs
            if asked.params.prompt_logprobs is not None:
                prompt_logprobs = output.prompt_logprobs
            if asked.wants_trees:
                drafted = output.drafted
        for array in (output.report, *(logprobs or ()), *(prompt_logprobs or ()), *(drafted or ())):
            array.copy_to_host_async()
        most_emitted = tree.num_steps + 1 if tree is not None else int(any(chunk.is_last for chunk in chunks))
        return cls(requests, output.report, tree, chunks, logprobs, prompt_logprobs, drafted, most_emitted)

    def on_host(self) -> "Launched":
        """Waits for the program, and has NumPy arrays; the prompt's log probabilities stay where they are."""
        report, logprobs, drafted = jax.tree.map(np.asarray, (self.report, self.logprobs, self.drafted))
        return self._replace(report=report, logprobs=logprobs, drafted=drafted)

    @property
    def reports(self) -> bool:
        """Whether there is a result to read."""
        return self.most_emitted > 0 or self.prompt_logprobs is not None


def emitted(program: Launched, source_names: Sequence[str]) -> list[Emitted]:
    """The tokens that a program emitted for each request, from its row of the report; it is `on_host`. Padding rows come last.
    `source_names`: the drafter's."""
    logprobs, drafted = program.logprobs, program.drafted
    found, tokens_end = [], REPORT_HEADER + (0 if program.tree is None else program.tree.num_steps) + 1
    for row, (request, line) in enumerate(zip(program.requests, program.report.tolist(), strict=False)):
        tokens = line[REPORT_HEADER : REPORT_HEADER + line[0]]
        count = request.asked.params.logprobs
        entries = [] if logprobs is None or count is None else token_logprobs(logprobs, row, tokens, count)
        verified, *origins = line[tokens_end:] or [0]
        sources = named_sources(origins, tokens_end - REPORT_HEADER, line[1], source_names) if source_names else DraftSources()
        tree = None
        if drafted is not None and request.asked.wants_trees:
            tree = drafted_tree(drafted, row, line[1], sources, program.prunings.get(row))
        found.append(Emitted(tokens, line[1], FINISH[line[2]], entries, tree, verified, sources))
    return found


def named_sources(reported: Sequence[int], path: int, accepted: int, names: Sequence[str]) -> DraftSources:
    """Names what is at the end of a report's row: nothing, or the sources of the path (as many as tokens), then of all nodes, both
    with the root first.

    In:  [0, 1, 0, 0, 1, 3, -1], path 3, accepted 1, names ("other", "head", "ngram", "head+ngram")
    Out: accepted ("head",), drafted ("head", "head+ngram")
    """
    of_path, of_nodes = reported[1 : accepted + 1], reported[path + 1 :]
    return DraftSources(tuple([names[each] for each in of_path]), tuple([names[each] for each in of_nodes if each != NOT_VERIFIED]))


def drafted_tree(drafted: Drafted, row: int, accepted: int, sources: DraftSources, pruning: Pruning | None) -> DraftedTree | None:
    """One row of arrays, without the nodes that were not verified; None if only the root was."""
    tokens, parents, path = (each[row] for each in drafted)
    is_verified = tokens != NO_TOKEN
    if is_verified.sum() == 1:
        return None
    numbers = np.append(np.cumsum(is_verified) - 1, -1)  # of all nodes among these, and -1 as the root's parent
    return DraftedTree(
        tuple(tokens[is_verified].tolist()), tuple(numbers[parents[is_verified]].tolist()),
        tuple(numbers[path[: accepted + 1]].tolist()), sources.drafted, pruning,
    )  # fmt: skip


def token_logprobs(logprobs: Logprobs, row: int, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """One entry per token, from one row of arrays, each with the `count` most likely tokens."""
    entries = []
    for index, token in enumerate(tokens):
        ids, values = logprobs.top_ids[row, index, :count].tolist(), logprobs.top[row, index, :count].tolist()
        entries.append(TokenLogprob(token, float(logprobs.chosen[row, index]), tuple(zip(ids, values, strict=True))))
    return entries
