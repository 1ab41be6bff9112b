"""The drafter with a block head: one forward, then a tree of the best texts that its positions spell.

Positions are drafted apart from one another, so a text's score is the sum of its tokens' log probabilities, each at its own
position, and the best tree of n nodes holds the n best texts (DDTree, arXiv 2604.12989; the paper's heap is a sort per level
here). With a DSpark head a token's probability depends on the token before it, too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.decoding.commit import write_slots
from jaxspec.decoding.coupling import Calibration, Prediction, uncalibrated
from jaxspec.decoding.drafter import VERIFIED_WHOLE, Draft, DraftUse, NewTokens
from jaxspec.decoding.head_drafter import SlidingWindow, TrainedDrafter, best_child, best_children, visible_slots
from jaxspec.decoding.state import Batch, Sizes, State, empty_cache
from jaxspec.decoding.top import top_of_few
from jaxspec.decoding.tree import Candidates, Chain
from jaxspec.models.block import BlockConfig, BlockHead
from jaxspec.models.layers import AttentionMetadata
from jaxspec.models.linear import DEFAULT_KERNELS, Kernels
from jaxspec.models.llama import Llama
from jaxspec.models.registry import LoadedHead
from jaxspec.tree_shape import TreeShape
from jaxspec.typing import Array, Float, Int, KeysValues

type Children = Callable[[int, Int[Array, "b n"]], tuple[Int[Array, "b n k"], Float[Array, "b n k"]]]
"""Takes a level and the tokens before it, root included: the k most likely tokens after each, best first, and log probabilities."""


class BlockState(NamedTuple):
    """What a block head keeps between programs."""

    cache: tuple[KeysValues, ...]
    """Per layer of the head; slot i holds keys and values of the target's feature of position i - 1, so slot 0 is never used."""
    calibration: Calibration


class View(NamedTuple):
    """What the positions of a block see in one layer."""

    metadata: AttentionMetadata
    edge: Int[Array, "b e"]
    """Slots that some positions see and others don't, as the window ends there: in the mask they come before the block."""


@dataclass(frozen=True, kw_only=True)
class BlockDrafter(TrainedDrafter):
    """Drafts a block at once: DFlash, JetSpec or DSpark."""

    config: BlockConfig

    @classmethod
    def of(cls, head: LoadedHead, kernels: Kernels = DEFAULT_KERNELS) -> "BlockDrafter":
        """The drafter with this head. Raises AssertionError if it is no block head."""
        assert isinstance(head.config, BlockConfig)
        return cls(config=head.config, graph=head.graph(kernels), kv_cache_dtype=kernels.kv_cache_dtype, weights=head.params)

    @property
    def head(self) -> BlockHead:
        return nnx.merge(self.graph, self.weights)

    def empty(self, sizes: Sizes) -> BlockState:
        return BlockState(empty_cache(self.config.layer, sizes, self.kv_cache_dtype), uncalibrated())

    @jax.named_scope("draft")
    def propose(self, target: Llama, state: State, batch: Batch, tree: TreeShape, use: DraftUse = VERIFIED_WHOLE) -> Draft:
        """The memo of coupled drafts is the logits after the roots [b, v]."""
        head, root = self.head, batch.sequences.root
        steps = min(tree.num_steps, self.config.max_steps)  # a tree of several sources may be deeper
        logits = block_logits(head, target, state, batch, steps)
        prediction = self.prediction(state, batch) if use.is_lossless else None
        memo = behind(head, logits, 0, root[:, None])[:, 0] if use.is_lossless else None
        if tree.topk == 1 and not use.needs_scores and steps == tree.num_steps:
            return Draft(chain(head, logits, root, prediction), memo)
        width = tree.topk if head.is_conditional else tree.num_draft_tokens
        children = children_of(head, logits, tree.topk, prediction)
        return Draft(best_texts(children, root, steps, tree.num_draft_tokens - 1, width), memo)

    def absorb(self, target: Llama, state: State, batch: Batch, new: NewTokens) -> BlockState:
        """Writes keys and values of the tokens' features."""
        own: BlockState = state.draft
        columns = jnp.arange(new.tokens.shape[1], dtype=jnp.int32)
        slots = new.first_slot[:, None] + columns
        rows = self.head.keys_values(new.features, slots - 1)
        write = (columns < new.size[:, None]) & (slots >= new.cached[:, None])
        path = jnp.broadcast_to(columns, new.tokens.shape)
        return own._replace(cache=write_slots(own.cache, rows, batch.page_table, path, slots, write))


def block_logits(head: BlockHead, target: Llama, state: State, batch: Batch, steps: int) -> Float[Array, "b steps v"]:
    """The logits of the `steps` tokens after each root, without those biases that depend on a token."""
    config, cache = head.config, state.draft.cache
    # Where no position sees a later one, positions whose output nobody reads are left out.
    width = config.first + steps if all(config.causal) else config.block_size
    length, root = batch.sequences.length, batch.sequences.root
    tokens = jnp.full((len(root), width), config.mask_token_id, jnp.int32).at[:, 0].set(root)
    kinds = tuple(zip(config.causal, config.windows, strict=True))
    page_size = cache[0].k.shape[1]
    views = {kind: view(length, batch.page_table, page_size, width, *kind) for kind in dict.fromkeys(kinds)}
    edges = [at_slots(layer, batch.page_table, views[kind].edge) for layer, kind in zip(cache, kinds, strict=True)]
    hidden = head(head.embed(tokens, target), [views[kind].metadata for kind in kinds], cache, edges)
    return head.logits(hidden[:, config.first : config.first + steps], target)


def view(
    length: Int[Array, " b"], page_table: Int[Array, "b p"], page_size: int, width: int, causal: bool, window: int | None
) -> View:
    """What `width` positions, the root's and those after it, see of the head's slots 1 .. length and of the block.

    Slot i holds position i - 1. Position length + j sees those above length + j - window, so the first sees `width` - 1 positions
    that the last does not. These slots are the edge: all positions see the slots after it.
    """
    columns = np.arange(width)
    block = columns[:, None] >= columns if causal else np.ones((width, width), bool)
    positions = length[:, None] + jnp.asarray(columns, jnp.int32)
    mask = jnp.broadcast_to(jnp.asarray(block), (len(length), width, width))  # windows are wider than blocks
    if window is None:
        seen, edge = visible_slots(page_table, length + 1, page_size, None), jnp.zeros((len(length), 0), jnp.int32)
        return View(AttentionMetadata(positions, *seen, mask), edge)
    seen = visible_slots(page_table, length + 1, page_size, SlidingWindow(window - width))
    edge = (length - window + 2)[:, None] + jnp.asarray(columns[:-1], jnp.int32)
    on_edge = jnp.asarray(columns[:-1] >= columns[:, None]) & (edge > 0)[:, None]
    return View(AttentionMetadata(positions, *seen, jnp.concatenate([on_edge, mask], 2)), edge)


def at_slots(layer: KeysValues, page_table: Int[Array, "b p"], slots: Int[Array, "b e"]) -> KeysValues | None:
    """Keys and values of these slots; None if there are none. Below slot 1 they are zeros, as attention also multiplies
    what it does not see."""
    if not slots.shape[1]:
        return None
    size, is_slot, slots = layer.k.shape[1], (slots > 0)[..., None, None], jnp.maximum(slots, 0)
    page = jnp.take_along_axis(page_table, slots // size, 1)
    return KeysValues(*(jnp.where(is_slot, pages[page, slots % size], 0) for pages in layer))


def behind(head: BlockHead, logits: Float[Array, "b steps v"], level: int, before: Int[Array, "b n"]) -> Float[Array, "b m v"]:
    """The logits of a level after these tokens: m = n, or 1 if they are the same for all."""
    own = logits[:, level : level + 1]
    return own + head.bias(before) if head.is_conditional else own


def chain(head: BlockHead, logits: Float[Array, "b steps v"], root: Int[Array, " b"], prediction: Prediction | None) -> Chain:
    """The most likely token of each level, given the one chosen at the level before."""
    levels = logits.shape[1]
    if not head.is_conditional:
        return Chain(best_child(head, logits, jnp.arange(levels), prediction))
    tokens = [root[:, None]]
    for level in range(levels):
        tokens.append(best_child(head, behind(head, logits, level, tokens[-1]), level, prediction))
    return Chain(jnp.concatenate(tokens[1:], 1))


def children_of(head: BlockHead, logits: Float[Array, "b steps v"], k: int, prediction: Prediction | None) -> Children:
    """The k most likely children: the head's or, for sampled requests, those that the target will likely choose under its noise."""
    if head.is_conditional:
        return lambda level, before: best_children(head, behind(head, logits, level, before), k, level, prediction)
    tokens, log_probs = best_children(head, logits, k, jnp.asarray(np.arange(logits.shape[1])), prediction)  # a constant: no launch

    def children(level: int, before: Int[Array, "b n"]) -> tuple[Int[Array, "b n k"], Float[Array, "b n k"]]:
        shape = (*before.shape, k)
        return jnp.broadcast_to(tokens[:, level, None], shape), jnp.broadcast_to(log_probs[:, level, None], shape)

    return children


def best_texts(children: Children, root: Int[Array, " b"], steps: int, count: int, width: int) -> Candidates:
    """Candidates that hold the `count` best texts, level by level, the best of each level first.

    With a text its prefixes are among the `count` best, one at every level above it, which limits the texts of deep levels.
    `width`: the most texts of a level that are continued; with `count` these are all that can matter.

    In:  children 5 and 6 with log probabilities -0.1 and -2.4 everywhere, steps 2, count 3
    Out: tokens [5, 6, 5, 6], scores [-0.1, -2.4, -0.2, -2.5], parents [-1, -1, 0, 0]
    """
    found, log_probs = children(0, root[:, None])
    kept = min(found.shape[2], count)
    levels, first = [Candidates(found[:, 0, :kept], log_probs[:, 0, :kept], jnp.full((len(root), kept), -1, jnp.int32))], 0
    for level in range(1, min(steps, count)):
        before, scores = levels[-1].tokens[:, :width], levels[-1].scores[:, :width]
        found, log_probs = children(level, before)
        k, flat = found.shape[2], (len(root), -1)
        kept = min(before.shape[1] * k, count - level)
        scores, chosen = top_of_few((scores[:, :, None] + log_probs).reshape(flat), kept)
        tokens = jnp.take_along_axis(found.reshape(flat), chosen, 1)
        levels.append(Candidates(tokens, scores, (chosen // k + first).astype(jnp.int32)))
        first += levels[-2].tokens.shape[1]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, 1), *levels)
