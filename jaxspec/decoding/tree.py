"""The draft tree: from scored candidates to the nodes that are verified (EAGLE-2, section 4.2: reranking)."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.top import places_of_best
from jaxspec.models.linear import NO_TOKEN
from jaxspec.tree_shape import TreeShape
from jaxspec.typing import Array, Bool, Float, Int


class Candidates(NamedTuple):
    """All tokens that a drafter proposed, in flat order: parents come before their children."""

    tokens: Int[Array, "b c"]
    """Target vocabulary ids."""
    scores: Float[Array, "b c"]
    """Sums of log probabilities along the path from the root: the head's or, for sampled requests, those of acceptance. A child's
    score is never above its parent's; -inf: there is no such candidate, whatever its token."""
    parents: Int[Array, "b c"]
    """Flat index of the parent candidate; -1: a child of the root."""
    sources: Int[Array, "b c"] | None = None
    """Who proposed it, where several drafters are merged: bit i stands for source i. 0: nobody, there is no such candidate."""


class Chain(NamedTuple):
    """Candidates of which each is the child of the one before, and all are verified: they need no scores."""

    tokens: Int[Array, "b c"]
    """Target vocabulary ids."""


class Tree(NamedTuple):
    """The verified nodes. Node 0 is the root; parents come before children."""

    tokens: Int[Array, "b n"]
    parents: Int[Array, "b n"]
    """Node number of the parent; -1 for the root."""
    depth: Int[Array, "b n"]
    """Edges from the root."""
    mask: Bool[Array, "b n n"]
    """mask[i, j]: node j is node i or one of its ancestors."""
    sources: Int[Array, "b n"] | None = None
    """As in Candidates; 0 for the root."""
    pays: Bool[Array, "b n"] | None = None
    """The nodes that are verified: with each, all of its ancestors. None: all."""

    @property
    def verified(self) -> Int[Array, "b n"]:
        """The tokens of the nodes that are verified, NO_TOKEN at the others."""
        return self.tokens if self.pays is None else jnp.where(self.pays, self.tokens, NO_TOKEN)


def ancestor_mask(parents: Int[Array, "b n"], max_depth: int) -> Bool[Array, "b n n"]:
    """Follows every node's parents up to the root.

    In:  parents [[-1, 0, 0, 1]], max_depth 2
    Out: [[[1,0,0,0], [1,1,0,0], [1,0,1,0], [1,1,0,1]]]
    """
    nodes = parents.shape[1]
    columns = jnp.arange(nodes)
    mask = jnp.broadcast_to(jnp.eye(nodes, dtype=bool), (*parents.shape, nodes))
    ancestor = parents
    for _ in range(max_depth):
        mask = mask | (ancestor[:, :, None] == columns)
        ancestor = jnp.where(ancestor < 0, -1, jnp.take_along_axis(parents, jnp.maximum(ancestor, 0), 1))
    return mask


def worth_a_row(row_cost: float, done: Bool[Array, " b"]) -> Float[Array, "b 1"]:
    """The score from which a node is worth its row of the target's pass.

    The pass takes 1 - row_cost, and row_cost for each row: 1 + (b - 1) * row_cost with the roots alone, which emit a token for
    each running sequence. One more row pays if its probability of acceptance is above the number of tokens that the roots emit in
    the time it takes. Nothing pays in ended sequences; if all have ended, it is a trial run, which measures the time of all rows.

    In:  row_cost 0.2, done [False] * 4
    Out: log(0.5) for each: the roots emit 4 tokens in a time of 1.6, so 0.5 in 0.2
    """
    chance = row_cost * jnp.sum(~done) / (1 + (len(done) - 1) * row_cost)
    return jnp.where(jnp.all(done), -jnp.inf, jnp.where(done, jnp.inf, jnp.log(chance)))[:, None]


def none_of(candidates: Candidates) -> Candidates:
    """As many placeholders, whose scores say that they are no candidates."""
    tokens = jnp.zeros(candidates.tokens.shape, jnp.int32)
    return Candidates(tokens, jnp.full(tokens.shape, -jnp.inf), tokens - 1)


def rank(
    root: Int[Array, " b"], candidates: Candidates | Chain, shape: TreeShape, worth: Float[Array, "b 1"] | None = None
) -> Tree:
    """The tree of the best candidates: the one place where they are ranked, on the device, or on the host's own where one of the
    sources is there. Nodes without a candidate repeat the root's token below it. `worth`: the score from which they pay."""
    if isinstance(candidates, Chain):
        return chain(root, candidates.tokens)
    missing = shape.num_draft_tokens - 1 - candidates.tokens.shape[1]
    if missing > 0:
        nothing = jnp.broadcast_to(root[:, None], (len(root), missing))
        nobody = None if candidates.sources is None else jnp.zeros_like(nothing)
        filler = Candidates(nothing, jnp.full(nothing.shape, -jnp.inf), jnp.full_like(nothing, -1), nobody)
        return rank(root, jax.tree.map(lambda *both: jnp.concatenate(both, 1), candidates, filler), shape, worth)
    return build_tree(root, candidates, shape.num_draft_tokens, shape.num_steps, worth)


@jax.named_scope("build_tree")
def build_tree(
    root: Int[Array, " b"],
    candidates: Candidates,
    num_draft_tokens: int,
    max_depth: int,
    worth: Float[Array, "b 1"] | None = None,
) -> Tree:
    """The root and the best num_draft_tokens - 1 candidates, in flat order.

    A parent scores no less than its child and comes earlier in flat order, and of equals the earlier ones are chosen: so the chosen
    set always holds the parents of its members.
    """
    picked = places_of_best(candidates.scores, num_draft_tokens - 1)
    parents = jnp.take_along_axis(candidates.parents, picked, 1)
    # A candidate's node number is 1 + its rank among the picked; the root (-1) becomes node 0.
    parents = jnp.sum(picked[:, None, :] <= parents[:, :, None], -1)
    parents = jnp.concatenate([jnp.full_like(parents[:, :1], -1), parents], 1).astype(jnp.int32)
    tokens = jnp.concatenate([root[:, None], jnp.take_along_axis(candidates.tokens, picked, 1)], 1)
    sources = candidates.sources
    if sources is not None:
        sources = jnp.concatenate([jnp.zeros_like(sources[:, :1]), jnp.take_along_axis(sources, picked, 1)], 1)
    tree = tree_of(tokens, parents, max_depth, sources)
    if worth is None:
        return tree
    pays = jnp.take_along_axis(candidates.scores, picked, 1) >= worth
    return tree._replace(pays=jnp.concatenate([jnp.ones_like(pays[:, :1]), pays], 1))


def tree_of(
    tokens: Int[Array, "b n"], parents: Int[Array, "b n"], max_depth: int, sources: Int[Array, "b n"] | None = None
) -> Tree:  # fmt: skip
    """The tree of these nodes, the root first."""
    mask = ancestor_mask(parents, max_depth)
    return Tree(tokens, parents, jnp.sum(mask, -1, dtype=jnp.int32) - 1, mask, sources)


def as_candidates(draft: Candidates | Chain) -> Candidates:
    """A chain as candidates that are certain, because all of it is to be verified."""
    if isinstance(draft, Candidates):
        return draft
    parents = jnp.broadcast_to(jnp.arange(draft.tokens.shape[1], dtype=jnp.int32) - 1, draft.tokens.shape)
    return Candidates(draft.tokens, jnp.zeros(draft.tokens.shape, jnp.float32), parents)


@jax.named_scope("merge")
def merge(drafts: Sequence[Candidates], max_depth: int) -> Candidates:
    """The candidates of several sources. Of equal ones (the same token after the same text) the first gets the best score and all
    children; the others get the score -inf.

    In:  tokens [5, 6] in a chain; tokens [5, 7], siblings
    Out: tokens [5, 6, 5, 7], parents [-1, 0, -1, -1], sources [3, 1, 0, 2], the third one's score -inf
    """
    tokens = jnp.concatenate([draft.tokens for draft in drafts], 1)
    scores = jnp.concatenate([draft.scores for draft in drafts], 1)
    offsets = np.cumsum([0, *(draft.tokens.shape[1] for draft in drafts)])
    moved = [jnp.where(draft.parents < 0, -1, draft.parents + offset) for draft, offset in zip(drafts, offsets, strict=False)]
    own = parents = jnp.concatenate(moved, 1)
    for _ in range(max_depth):  # candidates of depth d know their first equal after d rounds
        equal = (tokens[:, :, None] == tokens[:, None, :]) & (parents[:, :, None] == parents[:, None, :])
        first = jnp.argmax(equal, -1)
        parents = jnp.where(own < 0, -1, jnp.take_along_axis(first, jnp.maximum(own, 0), 1))
    best = jnp.max(jnp.where(equal, scores[:, None, :], -jnp.inf), -1)
    bits = np.concatenate([np.full(draft.tokens.shape[1], 1 << source, np.int32) for source, draft in enumerate(drafts)])
    proposed = jnp.where(jnp.isneginf(scores), 0, bits)
    sources = jax.lax.reduce_or(jnp.where(equal, proposed[:, None, :], 0), (2,))
    is_first = first == jnp.arange(tokens.shape[1])
    return Candidates(
        tokens, jnp.where(is_first, best, -jnp.inf), parents.astype(jnp.int32), jnp.where(is_first, sources, 0)
    )  # fmt: skip


def root_only(root: Int[Array, " b"]) -> Tree:
    """The empty tree of plain decoding: nothing but the root."""
    return chain(root, jnp.zeros((len(root), 0), jnp.int32))


def chain(root: Int[Array, " b"], tokens: Int[Array, "b c"]) -> Tree:
    """Each token is the child of the one before it. All but the tokens are NumPy constants, so that XLA packs the mask when it
    compiles.

    In:  root [7], tokens [[4, 9]]
    Out: tokens [[7, 4, 9]], parents [[-1, 0, 1]], depth [[0, 1, 2]], mask [[[1,0,0], [1,1,0], [1,1,1]]]
    """
    batch, nodes = tokens.shape[0], tokens.shape[1] + 1
    depth = jnp.asarray(np.tile(np.arange(nodes, dtype=np.int32), (batch, 1)))
    mask = jnp.asarray(np.tile(np.tri(nodes, dtype=bool), (batch, 1, 1)))
    return Tree(jnp.concatenate([root[:, None], tokens], 1), depth - 1, depth, mask)
