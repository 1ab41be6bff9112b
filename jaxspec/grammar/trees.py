"""The trees and masks of a cycle under grammars: between drafting and verifying, on the host, requests in parallel.

A draft that its grammar does not allow can't be accepted, so the tree is ranked again without it. A NumPy counterpart of
decoding/tree.py, as candidates are few and the device is busy.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from typing import NamedTuple

import numpy as np

from jaxspec.grammar.matcher import Matcher
from jaxspec.grammar.vocabulary import holds


class DraftedNodes(NamedTuple):
    """The verified nodes of b trees, as in decoding.tree.Tree, and the candidates that they were chosen from."""

    tokens: np.ndarray
    parents: np.ndarray
    """[b, n] int32 each."""
    candidate_tokens: np.ndarray
    candidate_parents: np.ndarray
    scores: np.ndarray
    """[b, c] each, as in decoding.tree.Candidates; c may be 0: then all candidates were chosen."""
    sources: np.ndarray | None = None
    candidate_sources: np.ndarray | None = None
    """[b, n] and [b, c], where drafters are merged; there, c is never 0."""


class Pruning(NamedTuple):
    """What a grammar changed of one tree."""

    pruned: tuple[int, ...]
    """Drafted tokens that it does not allow, in the order of their nodes."""
    forced: int
    """Nodes that are there because it leaves nothing else."""


class MaskedNodes(NamedTuple):
    """What is to be verified."""

    tokens: np.ndarray
    parents: np.ndarray
    """[b, n] int32 each."""
    masks: np.ndarray
    """[b, n, words] uint32: what may follow each node."""
    prunings: Mapping[int, Pruning]
    """Of the rows under grammars, without those that have failed."""
    failed: Mapping[int, Exception]
    """Rows whose matcher has failed, and why: their nodes and masks mean nothing."""
    sources: np.ndarray | None = None
    """[b, n] int32, if they were given; 0 for what was forced."""


class Masker:
    """Makes the masks of batches, with a thread per core: llguidance does its work without Python's lock."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(cpu_count() or 1, thread_name_prefix="masks")

    def mask(self, matchers: Sequence[Matcher | None], nodes: DraftedNodes, num_steps: int, words: int) -> MaskedNodes:
        """The trees and their masks. Tree i is that of matchers[i]; trees without one, and those after them, take any tokens."""
        masks = np.full((*nodes.tokens.shape, words), 2**32 - 1, np.uint32)
        sources = None if nodes.sources is None else nodes.sources.copy()
        prunings: dict[int, Pruning] = {}
        failed: dict[int, Exception] = {}
        masked = MaskedNodes(nodes.tokens.copy(), nodes.parents.copy(), masks, prunings, failed, sources)
        rows = [(matcher, row) for row, matcher in enumerate(matchers) if matcher is not None]

        def fill(each: tuple[Matcher, int]) -> None:
            matcher, row = each
            try:
                prunings[row] = mask_row(matcher, row, nodes, masked, num_steps)
            except Exception as error:
                failed[row] = error

        list(self._threads.map(fill, rows))  # waits for all
        return masked

    def close(self) -> None:
        self._threads.shutdown()


def mask_row(matcher: Matcher, row: int, nodes: DraftedNodes, masked: MaskedNodes, num_steps: int) -> Pruning:
    """Fills one row of `masked`; returns what its grammar changed."""
    tokens, parents, masks = masked.tokens[row], masked.parents[row], masked.masks[row]
    pruned, added = list[int](), 0
    if num_steps:
        drafted = tokens[1:].tolist()
        legal, forced = matcher.legal(drafted, (parents[1:] - 1).tolist())
        pruned = [token for token, may in zip(drafted, legal, strict=True) if not may]
        if pruned or any(forced.values()):
            candidates = TextTree.of(matcher, nodes, row)
            candidates.add_forced(num_steps)
            tokens[:], parents[:], picked, added = candidates.best(tokens[0], len(tokens))
            if masked.sources is not None and nodes.candidate_sources is not None:
                masked.sources[row] = sources_of(picked, nodes.candidate_sources[row], len(tokens))
    for node in matcher.masks(tokens.tolist(), parents.tolist(), masks):
        before = masks[parents[node]]
        tokens[node] = next(token for token in range(32 * len(before)) if not holds(before, token))  # which is never chosen
    return Pruning(tuple(pruned), added)


class TextTree:
    """The candidates of one request that its grammar allows, in flat order, and what must follow them."""

    def __init__(self, tokens: list[int], parents: list[int], scores: list[float], forced: Mapping[int, list[int]]):
        """As in decoding.tree.Candidates; -inf: there is no such candidate."""
        self._tokens, self._parents, self._scores, self._forced = tokens, parents, scores, forced
        self._drafted = len(tokens)

    @classmethod
    def of(cls, matcher: Matcher, nodes: DraftedNodes, row: int) -> "TextTree":
        """The candidates or, if all of them were chosen, the nodes, the first of which are the best."""
        if nodes.scores.shape[1]:
            tokens, parents, scores = (
                each[row].tolist() for each in (nodes.candidate_tokens, nodes.candidate_parents, nodes.scores)
            )
        else:
            tokens, parents = nodes.tokens[row, 1:].tolist(), (nodes.parents[row, 1:] - 1).tolist()
            scores = [-1.0 - node for node in range(len(tokens))]
        legal, forced = matcher.legal(tokens, parents)
        return cls(tokens, parents, [score if may else -np.inf for score, may in zip(scores, legal, strict=True)], forced)

    def add_forced(self, num_steps: int) -> None:
        """Adds what must follow the text and each candidate, down to the tree's depth. It is as likely as what it follows."""
        place = {(parent, token): node for node, (parent, token) in enumerate(zip(self._parents, self._tokens, strict=True))}
        depths = {-1: 0}
        for node in range(-1, self._drafted):
            if node >= 0:
                depths[node] = depths[self._parents[node]] + 1
            if node >= 0 and self._scores[node] == -np.inf:
                continue
            at, score = node, 0.0 if node < 0 else self._scores[node]
            for token in self._forced.get(node, ())[: max(0, num_steps - depths[node])]:
                child = place.get((at, token))
                if child is None:
                    child = place[at, token] = len(self._tokens)
                    self._tokens.append(token)
                    self._parents.append(at)
                    self._scores.append(score)
                self._scores[child] = score
                at = child

    def best(self, root: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """Tokens and parents [count] of the root and the best candidates, the indices of these, and how many were added."""
        tokens, parents, picked = best_nodes(root, np.array(self._tokens), np.array(self._parents), np.array(self._scores), count)
        return tokens, parents, picked, int(np.sum(picked >= self._drafted))


def sources_of(picked: np.ndarray, sources: np.ndarray, count: int) -> np.ndarray:
    """Sources [count] of the root and the picked. Places after the candidates' are of added nodes, which have no source.

    In:  picked [1, 4], sources [3, 2, 1], count 3
    Out: [0, 2, 0]
    """
    found, drafted = np.zeros(count, np.int32), picked < len(sources)
    found[1 : len(picked) + 1][drafted] = sources[picked[drafted]]
    return found


def best_nodes(
    root: int, tokens: np.ndarray, parents: np.ndarray, scores: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Tokens and parents [count] of the root and its best candidates, and their places: decoding.tree.rank for one sequence."""
    picked = np.sort(np.argsort(-scores, kind="stable")[: count - 1])
    new_tokens, new_parents = np.full(count, root, np.int32), np.zeros(count, np.int32)
    new_tokens[1 : len(picked) + 1] = tokens[picked]
    new_parents[1 : len(picked) + 1] = np.searchsorted(picked, parents[picked], side="right")
    new_parents[0] = -1
    return new_tokens, new_parents, picked
