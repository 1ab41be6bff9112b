"""The draft tree: from scored candidates to the nodes that are verified (EAGLE-2, section 4.2: reranking)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.typing import Array, Bool, Float, Int


class Candidates(NamedTuple):
    """All tokens that a draft proposed, in flat order: level by level, parent by parent, best child first."""

    tokens: Int[Array, "b c"]
    """Target vocabulary ids."""
    scores: Float[Array, "b c"]
    """Sums of log probabilities along the path from the root: the head's or, for sampled requests, those of acceptance. A child's
    score is never above its parent's."""
    parents: Int[Array, "b c"]
    """Flat index of the parent candidate; -1: a child of the root."""


class Tree(NamedTuple):
    """The verified nodes. Node 0 is the root; parents come before children."""

    tokens: Int[Array, "b n"]
    parents: Int[Array, "b n"]
    """Node number of the parent; -1 for the root."""
    depth: Int[Array, "b n"]
    """Edges from the root."""
    mask: Bool[Array, "b n n"]
    """mask[i, j]: node j is node i or one of its ancestors."""


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


@jax.named_scope("build_tree")
def build_tree(root: Int[Array, " b"], candidates: Candidates, num_draft_tokens: int, max_depth: int) -> Tree:
    """The root and the best num_draft_tokens - 1 candidates, in flat order.

    A parent scores no less than its child and comes earlier in flat order, and `lax.top_k` prefers lower indices on
    ties: so the chosen set always holds the parents of its members.
    """
    _, picked = jax.lax.top_k(candidates.scores, num_draft_tokens - 1)
    picked = jnp.sort(picked, -1)
    parents = jnp.take_along_axis(candidates.parents, picked, 1)
    # A candidate's node number is 1 + its rank among the picked; the root (-1) becomes node 0.
    parents = jnp.sum(picked[:, None, :] <= parents[:, :, None], -1)
    parents = jnp.concatenate([jnp.full_like(parents[:, :1], -1), parents], 1).astype(jnp.int32)
    tokens = jnp.concatenate([root[:, None], jnp.take_along_axis(candidates.tokens, picked, 1)], 1)
    mask = ancestor_mask(parents, max_depth)
    return Tree(tokens, parents, jnp.sum(mask, -1, dtype=jnp.int32) - 1, mask)


def root_only(root: Int[Array, " b"]) -> Tree:
    """The empty tree of plain decoding: nothing but the root."""
    zeros = jnp.zeros((root.shape[0], 1), jnp.int32)
    return Tree(root[:, None], zeros - 1, zeros, jnp.ones((root.shape[0], 1, 1), bool))


def chain(root: Int[Array, " b"], tokens: Int[Array, "b c"]) -> Tree:
    """Each token is the child of the one before it. All but the tokens is constant, made by NumPy: XLA then packs the mask when it
    compiles.

    In:  root [7], tokens [[4, 9]]
    Out: tokens [[7, 4, 9]], parents [[-1, 0, 1]], depth [[0, 1, 2]], mask [[[1,0,0], [1,1,0], [1,1,1]]]
    """
    batch, nodes = tokens.shape[0], tokens.shape[1] + 1
    depth = jnp.asarray(np.tile(np.arange(nodes, dtype=np.int32), (batch, 1)))
    mask = jnp.asarray(np.tile(np.tri(nodes, dtype=bool), (batch, 1, 1)))
    return Tree(jnp.concatenate([root[:, None], tokens], 1), depth - 1, depth, mask)
