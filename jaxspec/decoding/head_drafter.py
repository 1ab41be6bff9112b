"""The drafter with a trained head: it grows candidates level by level, keeping the best as the next beam (EAGLE-2, section 4.1)."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.decoding.commit import write_slots
from jaxspec.decoding.coupling import Calibration, Depth, Prediction, calibrate, uncalibrated
from jaxspec.decoding.drafter import VERIFIED_WHOLE, Draft, Drafter, DraftTraits, DraftUse, NewTokens, Place
from jaxspec.decoding.settings import highest_kind
from jaxspec.decoding.state import Batch, Sizes, State, empty_cache, last
from jaxspec.decoding.top import top, top_of_few
from jaxspec.decoding.tree import Candidates, Chain, none_of
from jaxspec.models.head import DraftHead, Head, HeadConfig
from jaxspec.models.layers import AttentionMetadata
from jaxspec.models.linear import DEFAULT_KERNELS, NO_TOKEN, Kernels, only_rows
from jaxspec.models.llama import Llama
from jaxspec.models.registry import LoadedHead
from jaxspec.tree_shape import TreeShape
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


class VisibleSlots(NamedTuple):
    """A range of cache slots, as AttentionMetadata takes it."""

    page_table: Int[Array, "b p"]
    start: Int[Array, " b"]
    length: Int[Array, " b"]


def visible_slots(
    page_table: Int[Array, "b p"],
    length: Int[Array, " b"],
    page_size: int,
    sliding_window: SlidingWindow | None,
    first_slot: int = 1,
) -> VisibleSlots:
    """The slots first_slot <= i < length of a head's cache, or the part of them inside the sliding window.

    Without a sink exactly the last `size` slots; with one, the pages that hold the sink and the last `size` slots.

    In:  pages [3, 8, 5, 9, 4], length 18, page_size 4, size 5, sink 2
    Out: pages [3, 9, 4, ...], start 1, length 10: slots 1-3, 12-15 and 16-17
    """
    start = jnp.full_like(length, first_slot)
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


class DraftInputs(NamedTuple):
    """What a head drafts from, for the sequences of a batch."""

    head: DraftHead
    target: Llama
    hidden: Float[Array, "b h"]
    """The head's output at the root's pair."""
    cache: tuple[KeysValues, ...]
    """The head's; slots first_slot .. length are written, and the last of them holds the root's pair."""
    length: Int[Array, " b"]
    seen: VisibleSlots
    """The part of the cache that it sees."""
    prediction: Prediction | None
    """How it is coupled to the target; None: not at all."""


class HeadState(NamedTuple):
    """What a head keeps between programs."""

    cache: tuple[KeysValues, ...]
    """Per layer of the head; slot i holds the pair (feature of position i - 1, token i), so slot 0 is never used; a draft
    model's slot i (models/draft_model.py) holds token i."""
    hidden: Float[Array, "r h"]
    """The head's output at its last slot; without a lag, that is slot Sequences.length, where the next draft starts."""
    calibration: Calibration


@dataclass(frozen=True, kw_only=True)
class TrainedDrafter(Drafter):
    """The base of drafters with a head. Their state has the head's `calibration`."""

    config: HeadConfig
    graph: nnx.GraphDef
    """The head without its weights."""
    kv_cache_dtype: str = "auto"
    """As EngineConfig.draft_kv_cache_dtype."""
    weights: dict = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self):
        widest = self.config.draft_vocab_size or self.config.layer.vocab_size
        self._derive(
            capture=self.config.captured_layers,
            feature_size=self.config.feature_size,
            first_slot=self.config.first_slot,
            traits=DraftTraits(widest, self.config.max_steps, lags=True),
        )

    def with_weights(self, weights: dict) -> "TrainedDrafter":
        return replace(self, weights=weights)

    @property
    def head(self) -> Any:
        return nnx.merge(self.graph, self.weights)

    def placed(self, place: Place) -> Any:
        return place(self.weights, self.config.layer)

    def learn(self, state: State, batch: Batch, memo: Any, chosen: Int[Array, " b"]) -> Any:
        """`memo`: the logits after the roots [b, v], in the head's vocabulary."""
        if memo is None:
            return state.draft
        return state.draft._replace(calibration=calibrate(self.prediction(state, batch), memo, chosen))

    def prediction(self, state: State, batch: Batch) -> Prediction:
        """How its drafts are coupled to the target."""
        needed = highest_kind(batch.settings, ~batch.sequences.done)
        return Prediction(needed, state, batch, self.head.token_map(), state.draft.calibration)


@dataclass(frozen=True, kw_only=True)
class HeadDrafter(TrainedDrafter):
    """Drafts token by token, with a trained head (EAGLE, EAGLE-3 or MTP) or with a small model."""

    window: SlidingWindow | None = None
    """The part of its cache that it sees; None: all of it."""

    @classmethod
    def of(cls, head: LoadedHead, window: SlidingWindow | None = None, kernels: Kernels = DEFAULT_KERNELS) -> "HeadDrafter":
        """The drafter with this head."""
        graph, dtype = head.graph(kernels), kernels.kv_cache_dtype
        return cls(config=head.config, graph=graph, kv_cache_dtype=dtype, weights=head.params, window=window)

    @property
    def head(self) -> DraftHead:
        return nnx.merge(self.graph, self.weights)

    def empty(self, sizes: Sizes) -> HeadState:
        hidden = jnp.zeros((sizes.rows, self.config.layer.hidden_size), sizes.dtype)
        return HeadState(empty_cache(self.config.layer, sizes, self.kv_cache_dtype), hidden, uncalibrated())

    def propose(self, target: Llama, state: State, batch: Batch, tree: TreeShape, use: DraftUse = VERIFIED_WHOLE) -> Draft:
        """The memo of coupled drafts is the logits after the roots [b, v], in the head's vocabulary."""
        head = self.head
        hidden, cache, length = state.draft.hidden[batch.rows], state.draft.cache, batch.sequences.length
        prediction = self.prediction(state, batch) if use.is_lossless else None
        seen = self._visible_slots(batch, length + 1, cache)
        inputs = DraftInputs(head, target, hidden, cache, length, seen, prediction)
        as_chain = tree.topk == 1 and not use.needs_scores
        drafted: tuple[Candidates | Chain, Array] = draft_chain(inputs, tree) if as_chain else draft(inputs, tree, use.worth)
        return Draft(drafted[0], drafted[1] if use.is_lossless else None)

    def absorb(self, target: Llama, state: State, batch: Batch, new: NewTokens) -> HeadState:
        """Runs the head over the pairs, writes their keys and values, and keeps its last output for the next draft."""
        head, own = self.head, state.draft
        batch_size, width = new.tokens.shape
        columns = jnp.arange(width, dtype=jnp.int32)
        slots = new.first_slot[:, None] + columns
        is_new = slots >= new.cached[:, None]
        mask = jnp.broadcast_to(columns[:, None] >= columns, (batch_size, width, width))
        mask = mask & (is_new[:, None, :] | jnp.eye(width, dtype=bool))
        metadata = AttentionMetadata(slots - self.first_slot, *self._visible_slots(batch, new.cached, own.cache), mask)
        # At least one: otherwise trial runs, whose rows have ended, would skip the head.
        exist = columns < jnp.maximum(new.size, 1)[:, None]
        embeddings, features = head.embed(jnp.where(exist, new.tokens, NO_TOKEN), target), only_rows(new.features, exist)
        out = head(embeddings, head.project(features), metadata.of_rows(exist), own.cache)
        path = jnp.broadcast_to(columns, new.tokens.shape)
        write = (columns < new.size[:, None]) & is_new
        pages = write_slots(own.cache, out.window, batch.page_table, path, slots, write)
        hidden = jnp.where((new.size > 0)[:, None], last(out.hidden, new.size), own.hidden[batch.rows])
        return own._replace(cache=pages, hidden=own.hidden.at[batch.rows].set(hidden))

    def _visible_slots(self, batch: Batch, length: Int[Array, " b"], cache: tuple[KeysValues, ...]) -> VisibleSlots:
        return visible_slots(batch.page_table, length, cache[0].k.shape[1], self.window, self.first_slot)


@jax.named_scope("draft")
def draft(inputs: DraftInputs, tree: TreeShape, worth: Float[Array, "b 1"] | None = None) -> tuple[Candidates, Float[Array, "b v"]]:
    """num_steps levels of candidates below the root, and the first level's logits.

    The head runs num_steps - 1 times, on topk tokens; with `worth` (DraftUse) only on those that pay, while there are any.
    """
    head, target, draft_hidden, _, _, _, prediction = inputs
    batch_size, k = draft_hidden.shape[0], tree.topk
    root_logits = head.logits(draft_hidden[:, None], target)
    tokens, log_probs = best_children(head, root_logits, k, 0, prediction)
    tokens, scores = tokens[:, 0], log_probs[:, 0]
    levels = [Candidates(tokens, scores, jnp.full((batch_size, k), -1))]
    beam = Beam(
        tokens,
        scores,
        jnp.broadcast_to(jnp.arange(k), (batch_size, k)),
        jnp.broadcast_to(draft_hidden[:, None], (batch_size, k, draft_hidden.shape[-1])),
        jnp.zeros((batch_size, k, 0), bool),
    )
    window = None
    for level in range(1, tree.num_steps):
        pays = None if worth is None else beam.scores >= worth
        deeper = partial(next_level, inputs, beam, window, level, pays)
        children, beam, window = deeper() if pays is None else level_if(jnp.any(pays), deeper)
        levels.append(children)
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, 1), *levels), root_logits[:, 0]


class Level(NamedTuple):
    """What one step of the head finds."""

    children: Candidates
    beam: Beam
    window: tuple[KeysValues, ...]
    """Keys and values of all candidates that it has run on."""


def next_level(
    inputs: DraftInputs, beam: Beam, earlier: tuple[KeysValues, ...] | None, level: int, pays: Bool[Array, "b k"] | None
) -> Level:
    """The children of the beam. `pays`: which of its candidates get children. None: all."""
    head, target, _, cache, _, seen, prediction = inputs
    batch_size, k = beam.tokens.shape
    # A candidate sees the head's cache, its ancestors in the window, and itself.
    mask = jnp.concatenate([beam.ancestors, jnp.broadcast_to(jnp.eye(k, dtype=bool), (batch_size, k, k))], 2)
    positions = jnp.broadcast_to(positions_at(inputs, level)[:, None], (batch_size, k))
    tokens, hidden, metadata = beam.tokens, beam.hidden, AttentionMetadata(positions, *seen, mask)
    if pays is not None:
        tokens, hidden, metadata = jnp.where(pays, tokens, NO_TOKEN), only_rows(hidden, pays), metadata.of_rows(pays)
    out = head(head.embed(tokens, target), hidden, metadata, cache, earlier)
    found, log_probs = best_children(head, head.logits(out.hidden, target), k, level, prediction)
    if pays is not None:
        log_probs = jnp.where(pays[:, :, None], log_probs, -jnp.inf)
    return Level(*grow(beam, found, log_probs, out.hidden, mask, first_flat=k + (level - 1) * k * k), out.window)


def level_if(pays: Bool[Array, ""], deeper: Callable[[], Level]) -> Level:
    """The next level; where it does not pay, placeholders of the same shapes."""
    shapes = jax.eval_shape(deeper)
    nothing = jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), shapes)
    none = none_of(shapes.children)
    beam = nothing.beam._replace(scores=jnp.full_like(nothing.beam.scores, -jnp.inf))
    return jax.lax.cond(pays, deeper, lambda: nothing._replace(children=none, beam=beam))


@jax.named_scope("draft")
def draft_chain(inputs: DraftInputs, tree: TreeShape) -> tuple[Chain, Float[Array, "b v"]]:
    """The num_steps tokens that `draft` proposes with topk = 1, and the logits of the first.

    A chain needs no scores, its mask is constant, and a parent is always the candidate before: fewer launches on a GPU.
    """
    head, target, draft_hidden, cache, length, seen, prediction = inputs
    hidden = draft_hidden[:, None]
    root_logits = head.logits(hidden, target)
    tokens = [best_child(head, root_logits, 0, prediction)]
    earlier = None
    for level in range(1, tree.num_steps):
        mask = jnp.ones((len(length), 1, level), bool)
        metadata = AttentionMetadata(positions_at(inputs, level)[:, None], *seen, mask)
        hidden, earlier = head(head.embed(tokens[-1], target), hidden, metadata, cache, earlier)
        tokens.append(best_child(head, head.logits(hidden, target), level, prediction))
    return Chain(jnp.concatenate(tokens, 1)), root_logits[:, 0]


def positions_at(inputs: DraftInputs, level: int) -> Int[Array, " b"]:
    """The positions of candidates at this depth, whose slot is length + level."""
    return inputs.length + level - inputs.head.config.first_slot


def best_child(head: Head, logits: Float[Array, "b w v"], depth: Depth, prediction: Prediction | None) -> Int[Array, "b w"]:
    """The most likely child (target id) of each node, the first of its `best_children`; ties go to the lowest draft id."""

    def likeliest(logits: Float[Array, "b w v"]) -> Int[Array, "b w"]:
        return jax.lax.top_k(logits, 1)[1][..., 0]  # on a GPU one launch; argmax takes two

    return head.target_ids(for_sampling(likeliest, logits, depth, prediction))


def best_children(
    head: Head, logits: Float[Array, "b w v"], k: int, depth: Depth, prediction: Prediction | None
) -> tuple[Int[Array, "b w k"], Float[Array, "b w k"]]:
    """The k most likely tokens (target ids) after nodes at this depth, with their log probabilities: the head's at
    temperature 1 or, for sampled requests, estimates of how likely the target is to choose them, given its noise."""

    def likeliest(logits: Float[Array, "b w v"]) -> tuple[Array, Array, Array]:
        best, ids = top(logits, k)
        return best, ids, jnp.sum(jnp.exp(logits - best[..., :1]), -1, keepdims=True)

    best, ids, total = for_sampling(likeliest, logits, depth, prediction)
    log_probs = best - best[..., :1] - jnp.log(total)
    return head.target_ids(ids), jnp.minimum(log_probs, 0.0)  # rounding must not put a child above its parent


def for_sampling[Result](
    likeliest: Callable[[Float[Array, "b w v"]], Result],
    logits: Float[Array, "b w v"],
    depth: Depth,
    prediction: Prediction | None,
) -> Result:
    """`likeliest` of the head's logits or, unless all requests are greedy, of its coupled scores."""
    return likeliest(logits) if prediction is None else prediction.of_kinds(likeliest, logits, depth)


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
    best, chosen = top_of_few(scores, k)
    parent = chosen // k
    return children, Beam(
        jnp.take_along_axis(tokens, chosen, 1),
        best,
        first_flat + chosen,
        jnp.take_along_axis(hidden, parent[:, :, None], 1),
        jnp.take_along_axis(mask, parent[:, :, None], 1),
    )
