"""The trees and masks of a cycle under grammars: between drafting and verifying, on the host, requests in parallel.

A draft that its grammar does not allow can't be accepted, so the tree is ranked again without it. A NumPy counterpart of
decoding/tree.py, as candidates are few and the device is busy.
"""

from collections.abc import Sequence
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
    """[b, c] each, as in decoding.tree.Candidates; c may be 0: all that there are were chosen."""


class MaskedNodes(NamedTuple):
    """What is to be verified."""

    tokens: np.ndarray
    parents: np.ndarray
    """[b, n] int32 each."""
    masks: np.ndarray
    """[b, n, words] uint32: what may follow each node."""
    pruned: int
    """Drafts that grammars do not allow, among the nodes as they were drafted."""


class Masker:
    """Makes the masks of batches, with a thread per core: llguidance does its work without Python's lock."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(cpu_count() or 1, thread_name_prefix="masks")

    def mask(self, matchers: Sequence[Matcher | None], nodes: DraftedNodes, words: int) -> MaskedNodes:
        """The trees and their masks. Tree i is that of matchers[i]; trees without one, and those behind them, take any tokens."""
        masks = np.full((*nodes.tokens.shape, words), 2**32 - 1, np.uint32)
        masked = MaskedNodes(nodes.tokens.copy(), nodes.parents.copy(), masks, 0)
        rows = [(matcher, row) for row, matcher in enumerate(matchers) if matcher is not None]
        pruned = self._threads.map(lambda each: mask_row(each[0], each[1], nodes, masked), rows)
        return masked._replace(pruned=sum(pruned))

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown()


def mask_row(matcher: Matcher, row: int, nodes: DraftedNodes, masked: MaskedNodes) -> int:
    """Fills one row of `masked`; returns how many of the drafted nodes its grammar does not allow."""
    tokens, parents, masks = masked.tokens[row], masked.parents[row], masked.masks[row]
    legal = matcher.legal(tokens[1:].tolist(), (parents[1:] - 1).tolist())
    pruned = len(legal) - sum(legal)
    if pruned and nodes.scores.shape[1]:
        candidates, of = nodes.candidate_tokens[row], nodes.candidate_parents[row]
        scores = np.where(matcher.legal(candidates.tolist(), of.tolist()), nodes.scores[row], -np.inf)
        tokens[:], parents[:] = best_nodes(tokens[0], candidates, of, scores, len(tokens))
    for node in matcher.masks(tokens.tolist(), parents.tolist(), masks):
        before = masks[parents[node]]
        tokens[node] = next(token for token in range(32 * len(before)) if not holds(before, token))  # which is never chosen
    return pruned


def best_nodes(
    root: int, tokens: np.ndarray, parents: np.ndarray, scores: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Tokens and parents [count] of the root and its best candidates: decoding.tree.rank for one sequence."""
    picked = np.sort(np.argsort(-scores, kind="stable")[: count - 1])
    new_tokens, new_parents = np.full(count, root, np.int32), np.zeros(count, np.int32)
    new_tokens[1 : len(picked) + 1] = tokens[picked]
    new_parents[1 : len(picked) + 1] = np.searchsorted(picked, parents[picked], side="right")
    new_parents[0] = -1
    return new_tokens, new_parents
