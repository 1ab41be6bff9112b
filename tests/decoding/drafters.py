"""Drafters as strangers write them, from public names only: a copy from the text, a block in one forward, and both at once."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import TreeShape
from jaxspec.decoding.drafter import Draft, Drafter, NewTokens
from jaxspec.decoding.state import Batch, Sizes, State
from jaxspec.decoding.tree import Candidates, Chain
from jaxspec.models.llama import Llama

BLOCK = 4
"""Positions that a block covers."""


@dataclass(frozen=True)
class CopyDrafter(Drafter):
    """The tokens after the last earlier occurrence of the text's last two."""

    max_topk = 1

    def propose(
        self, target: Llama, state: State, batch: Batch, tree: TreeShape, *, coupled: bool = False, scored: bool = False
    ) -> Draft:
        text, newest = state.history[batch.rows], batch.sequences.length[:, None]  # the root's position
        pair = jnp.take_along_axis(text, jnp.maximum(newest - jnp.array([1, 0]), 0), 1)
        places = jnp.arange(text.shape[1] - 1)
        same = (text[:, :-1] == pair[:, :1]) & (text[:, 1:] == pair[:, 1:]) & (places + 1 < newest)
        behind = jnp.max(jnp.where(same, places + 2, newest), -1)[:, None] + jnp.arange(tree.num_steps)
        return Draft(Chain(jnp.take_along_axis(text, jnp.minimum(behind, newest), 1)))


class BlockState(NamedTuple):
    pages: jax.Array
    """[pages, page, f]: slot i holds the target's feature of position i - 1."""
    absorbed: jax.Array
    """[r]: tokens that the drafter was told of."""


@dataclass(frozen=True)
class BlockDrafter(Drafter):
    """BLOCK positions at once, from the feature in the last slot of pages of its own: two tokens for each."""

    feature_size: int
    weights: Any = field(default=(), compare=False, repr=False)
    """[BLOCK, f, v]: the logits of each position are a product of the feature."""
    lags = True
    max_topk = 2

    @classmethod
    def random(cls, feature_size: int, vocab_size: int) -> "BlockDrafter":
        weights = np.random.default_rng(0).normal(size=(BLOCK, feature_size, vocab_size))
        return cls(feature_size, weights.astype(np.float32))

    def with_weights(self, weights: Any) -> "BlockDrafter":
        return BlockDrafter(self.feature_size, weights)

    def empty(self, sizes: Sizes) -> BlockState:
        pages = jnp.zeros((sizes.num_pages, sizes.page_size, self.feature_size), sizes.dtype)
        return BlockState(pages, jnp.zeros(sizes.rows, jnp.int32))

    def propose(
        self, target: Llama, state: State, batch: Batch, tree: TreeShape, *, coupled: bool = False, scored: bool = False
    ) -> Draft:
        page, offset = places(state.draft.pages, batch.page_table, batch.sequences.length[:, None])
        feature = state.draft.pages[page, offset][:, 0]
        logits = jax.nn.log_softmax(jnp.einsum("bf,dfv->bdv", feature, self.weights[: tree.num_steps]))
        scores, tokens = jax.lax.top_k(logits, 2)  # [b, d, 2]; each pair continues the first of the pair before
        before = jnp.pad(jnp.cumsum(scores[:, :, 0], 1), ((0, 0), (1, 0)))[:, :-1, None]
        parents = jnp.repeat(2 * jnp.arange(tree.num_steps) - 2, 2).at[:2].set(-1)
        flat = (len(feature), 2 * tree.num_steps)
        return Draft(Candidates(tokens.reshape(flat), (before + scores).reshape(flat), jnp.broadcast_to(parents, flat)), logits)

    def absorb(self, target: Llama, state: State, batch: Batch, new: NewTokens) -> BlockState:
        columns = jnp.arange(new.tokens.shape[1])
        slots = new.first_slot[:, None] + columns
        page, offset = places(state.draft.pages, batch.page_table, slots)
        write = (columns < new.size[:, None]) & (slots >= new.cached[:, None])
        pages = state.draft.pages.at[jnp.where(write, page, len(state.draft.pages)), offset].set(new.features, mode="drop")
        return BlockState(pages, state.draft.absorbed.at[batch.rows].add(jnp.sum(write, 1)))

    def learn(self, state: State, batch: Batch, memo: Any, chosen: Any) -> BlockState:
        assert memo is None or memo.ndim == 3, "its own memo, not that of a source beside it"
        return state.draft


def places(pages: jax.Array, page_table: jax.Array, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The page and the offset in it of each slot [b, j]."""
    size = pages.shape[1]
    return jnp.take_along_axis(page_table, jnp.minimum(slots // size, page_table.shape[1] - 1), 1), slots % size
