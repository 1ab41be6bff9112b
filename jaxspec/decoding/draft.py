"""Drafting: the head grows candidates level by level, keeping the best as the next beam (EAGLE-2, section 4.1)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.config import TreeShape
from jaxspec.decoding.coupling import Coupling, coupled_scores
from jaxspec.decoding.settings import SamplingKind
from jaxspec.decoding.state import Batch, Models, State
from jaxspec.decoding.tree import Candidates, Tree, build_tree, chain, root_only
from jaxspec.models.head import DraftHead
from jaxspec.models.layers import AttentionMetadata
from jaxspec.typing import Array, Bool, Float, Int, KeysValues


@dataclass(frozen=True)
class SlidingWindow:
    """The part of its cache that a head sees: the last slots, and the first.

    SGLang's --speculative-draft-window-size and --speculative-draft-sink-size. Heads are trained on short texts and make
    little use of old tokens; this keeps them within that range (but for the sink, whose distance grows) and reads less. Keys are
    stored rotated, so all it takes is a shorter page table.
    """

    size: int
    """The last slots."""
    sink: int = 0
    """The first slots."""


class Beam(NamedTuple):
    """The k candidates that the next level grows from."""

    tokens: Int[Array, "b k"]
    scores: Float[Array, "b k"]
    flat: Int[Array, "b k"]
    """Index of each among all candidates."""
    hidden: Float[Array, "b k h"]
    """The head's output at each candidate's *parent*, which the head reads with the candidate's token."""
    ancestors: Bool[Array, "b k s"]
    """Which earlier window keys are ancestors."""


class Draft(NamedTuple):
    """What a head proposes."""

    tree: Tree
    root_logits: Float[Array, "b v"] | None
    """The head's logits of the tokens after the roots, in its own vocabulary. None: plain decoding drafts nothing."""


def draft_tree(
    models: Models,
    state: State,
    batch: Batch,
    tree: TreeShape,
    sliding_window: SlidingWindow | None = None,
    coupling: Coupling | None = None,
) -> Draft:
    """The best tree that the head drafts below each root, or the root alone for plain decoding."""
    root = batch.sequences.root
    if tree.num_steps == 0:
        return Draft(root_only(root), None)
    if tree.topk == 1:
        tokens, logits = draft_chain(models, state.caches.draft, batch, tree, sliding_window, coupling)
        return Draft(chain(root, tokens), logits)
    candidates, logits = draft(models, state.caches.draft, batch, tree, sliding_window, coupling)
    return Draft(build_tree(root, candidates, tree.num_draft_tokens, tree.num_steps), logits)


@jax.named_scope("draft")
def draft(
    models: Models,
    cache: tuple[KeysValues, ...],
    batch: Batch,
    tree: TreeShape,
    sliding_window: SlidingWindow | None = None,
    coupling: Coupling | None = None,
) -> tuple[Candidates, Float[Array, "b v"]]:
    """num_steps levels of candidates below the root, and the first level's logits.

    The head runs num_steps - 1 times, on topk tokens. `cache` is the head's: slots 1 .. length are written, and the last of them
    holds the root's pair.
    """
    head, target = models.head, models.target
    assert head is not None, "the engine refuses a tree without a head"
    length, draft_hidden = batch.sequences.length, batch.sequences.draft_hidden
    batch_size, k = draft_hidden.shape[0], tree.topk
    root_logits = head.logits(draft_hidden[:, None], target)
    tokens, log_probs = best_children(head, root_logits, k, 0, coupling)
    tokens, scores = tokens[:, 0], log_probs[:, 0]
    levels = [Candidates(tokens, scores, jnp.full((batch_size, k), -1))]
    beam = Beam(
        tokens,
        scores,
        jnp.broadcast_to(jnp.arange(k), (batch_size, k)),
        jnp.broadcast_to(draft_hidden[:, None], (batch_size, k, draft_hidden.shape[-1])),
        jnp.zeros((batch_size, k, 0), bool),
    )
    earlier = None
    seen = visible_slots(batch.page_table, length + 1, cache[0].k.shape[1], sliding_window)
    for level in range(1, tree.num_steps):
        # A candidate sees the head's cache, its ancestors in the window, and itself.
        mask = jnp.concatenate([beam.ancestors, jnp.broadcast_to(jnp.eye(k, dtype=bool), (batch_size, k, k))], 2)
        # A pair's position is its slot - 1, and a candidate at depth `level` has slot length + level.
        positions = jnp.broadcast_to((length + level - 1)[:, None], (batch_size, k))
        metadata = AttentionMetadata(positions, *seen, mask)
        out = head(head.embed(beam.tokens, target), beam.hidden, metadata, cache, earlier)
        earlier = out.window
        tokens, log_probs = best_children(head, head.logits(out.hidden, target), k, level, coupling)
        children, beam = grow(beam, tokens, log_probs, out.hidden, mask, first_flat=k + (level - 1) * k * k)
        levels.append(children)
    return Candidates(*(jnp.concatenate(parts, 1) for parts in zip(*levels, strict=True))), root_logits[:, 0]


@jax.named_scope("draft")
def draft_chain(
    models: Models,
    cache: tuple[KeysValues, ...],
    batch: Batch,
    tree: TreeShape,
    sliding_window: SlidingWindow | None = None,
    coupling: Coupling | None = None,
) -> tuple[Int[Array, "b n"], Float[Array, "b v"]]:
    """The num_steps tokens that `draft` proposes with topk = 1, and the logits of the first.

    A chain needs no scores, its mask is constant, and a parent is always the candidate before: fewer launches on a GPU.
    """
    head, target = models.head, models.target
    assert head is not None, "the engine refuses a tree without a head"
    length, hidden = batch.sequences.length, batch.sequences.draft_hidden[:, None]
    seen = visible_slots(batch.page_table, length + 1, cache[0].k.shape[1], sliding_window)
    root_logits = head.logits(hidden, target)
    tokens = [best_child(head, root_logits, 0, coupling)]
    earlier = None
    for level in range(1, tree.num_steps):
        mask = jnp.ones((len(length), 1, level), bool)
        metadata = AttentionMetadata((length + level - 1)[:, None], *seen, mask)
        hidden, earlier = head(head.embed(tokens[-1], target), hidden, metadata, cache, earlier)
        tokens.append(best_child(head, head.logits(hidden, target), level, coupling))
    return jnp.concatenate(tokens, 1), root_logits[:, 0]


def best_child(head: DraftHead, logits: Float[Array, "b w v"], depth: int, coupling: Coupling | None) -> Int[Array, "b w"]:
    """The likeliest child (target id) of each node, the first of its `best_children`; ties go to the lowest draft id."""

    def likeliest(logits: Float[Array, "b w v"]) -> Int[Array, "b w"]:
        return jax.lax.top_k(logits, 1)[1][..., 0]  # on a GPU one launch; argmax takes two

    return head.target_ids(for_sampling(likeliest, head, logits, depth, coupling))


def best_children(
    head: DraftHead, logits: Float[Array, "b w v"], k: int, depth: int, coupling: Coupling | None
) -> tuple[Int[Array, "b w k"], Float[Array, "b w k"]]:
    """The k likeliest tokens (target ids) after nodes at this depth, with their log probabilities: the head's at
    temperature 1 or, for sampled requests, estimates of how likely the target is to choose them, given its noise."""

    def likeliest(logits: Float[Array, "b w v"]) -> tuple[Array, Array, Array]:
        best, ids = jax.lax.top_k(logits, k)
        return best, ids, jnp.sum(jnp.exp(logits - best[..., :1]), -1, keepdims=True)

    best, ids, total = for_sampling(likeliest, head, logits, depth, coupling)
    log_probs = best - best[..., :1] - jnp.log(total)
    return head.target_ids(ids), jnp.minimum(log_probs, 0.0)  # rounding must not put a child above its parent


def for_sampling[Result](
    likeliest: Callable[[Float[Array, "b w v"]], Result],
    head: DraftHead,
    logits: Float[Array, "b w v"],
    depth: int,
    coupling: Coupling | None,
) -> Result:
    """`likeliest` of the head's logits or, unless all requests are greedy, of its coupled scores."""
    if coupling is None:
        return likeliest(logits)
    return jax.lax.cond(
        coupling.needed > SamplingKind.GREEDY,
        lambda logits: likeliest(coupled_scores(coupling, head, logits, depth)),
        likeliest,
        logits,
    )


def grow(
    beam: Beam,
    tokens: Int[Array, "b k children"],
    log_probs: Float[Array, "b k children"],
    hidden: Float[Array, "b k h"],
    mask: Bool[Array, "b k s"],
    first_flat: int,
) -> tuple[Candidates, Beam]:
    """All k * k children of the beam become candidates; the best k of them are the next beam.

    The order changes, so everything that belongs to a parent (hidden, ancestors, flat index) is gathered by parent.
    """
    batch, k = beam.tokens.shape
    tokens, scores = tokens.reshape(batch, k * k), (log_probs + beam.scores[:, :, None]).reshape(batch, k * k)
    children = Candidates(tokens, scores, jnp.repeat(beam.flat, k, 1, total_repeat_length=k * k))
    best, chosen = jax.lax.top_k(scores, k)
    parent = chosen // k
    return children, Beam(
        jnp.take_along_axis(tokens, chosen, 1),
        best,
        first_flat + chosen,
        jnp.take_along_axis(hidden, parent[:, :, None], 1),
        jnp.take_along_axis(mask, parent[:, :, None], 1),
    )


class VisibleSlots(NamedTuple):
    """A range of cache slots, as AttentionMetadata takes it."""

    page_table: Int[Array, "b p"]
    start: Int[Array, " b"]
    length: Int[Array, " b"]


def visible_slots(
    page_table: Int[Array, "b p"], length: Int[Array, " b"], page_size: int, sliding_window: SlidingWindow | None
) -> VisibleSlots:
    """The slots 1 <= i < length of a head's cache, or the part of them inside the sliding window.

    Without a sink exactly the last `size` slots; with one, the pages that hold the sink and the last `size` slots.

    In:  pages [3, 8, 5, 9, 4], length 18, page_size 4, size 5, sink 2
    Out: pages [3, 9, 4, ...], start 1, length 10: slots 1-3, 12-15 and 16-17
    """
    start = jnp.ones_like(length)
    if sliding_window is None:
        return VisibleSlots(page_table, start, length)
    sink = -(-sliding_window.sink // page_size)
    tail = -(-sliding_window.size // page_size) + 1  # it may begin and end inside a page
    first = jnp.maximum(length - sliding_window.size, 0)
    if sink + tail >= page_table.shape[1]:  # the table has no pages to leave out
        return VisibleSlots(page_table, jnp.maximum(start, first) if sink == 0 else start, length)
    first_page = jnp.maximum(first // page_size, sink)
    pages = first_page[:, None] + jnp.arange(tail)
    tail_pages = jnp.take_along_axis(page_table, jnp.minimum(pages, page_table.shape[1] - 1), 1)
    skipped = (first_page - sink) * page_size
    start = jnp.maximum(start, first) - skipped if sink == 0 else start
    return VisibleSlots(jnp.concatenate([page_table[:, :sink], tail_pages], 1), start, length - skipped)
