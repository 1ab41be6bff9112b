"""Where drafts come from: the interface of a drafter, no drafter at all, and several whose drafts are merged.

A drafter is a frozen dataclass that holds no arrays but its weights; drafters that differ only in these compile to equal
programs. The engine keeps its state (`empty`) with its own, gives it every token of the text once (`absorb`), and asks it for
candidates before the target runs (`propose`). head_drafter.py drafts token by token with a head, block_drafter.py a block at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.decoding.sampling import Thresholds
from jaxspec.decoding.state import Batch, Sizes, State
from jaxspec.decoding.tree import Candidates, Chain, as_candidates, merge, none_of
from jaxspec.model_config import ModelConfig
from jaxspec.models.llama import Llama
from jaxspec.tree_shape import TreeShape
from jaxspec.typing import Array, Bool, Float, Int

RATE_PRIOR = 4.0
"""How many observations the first guess of a learnt rate counts as."""
SUREST, MOST_SHARPNESS = 0.98, 4.0
"""Bounds of a source's rates, and of what its scores are multiplied by."""
RATE_MEMORY = 0.99
"""The share of its past observations that a rate keeps at each new one: it adapts to other texts within some hundred tokens."""


SURE = 0.5
"""If the token that the text itself proposes has at least this probability, no head is asked: it would take time, and seldom be
right where the text is wrong. Only where rows have a cost. (Five kinds of text, the built-in model: 8% faster than n-grams alone,
10% slower where the head is always asked; two cores of an EPYC, 29 November 2026.)"""

type Place = Callable[[Any, ModelConfig | None], Any]
"""Puts weights on an engine's devices, which share the weights of layers with these sizes. None: each device has them all."""


def remembered(sums: Float[Array, " n"], counts: Bool[Array, "b n"], new: Array | float) -> Float[Array, " n"]:
    """The sums, each faded by RATE_MEMORY for every row that counts for it, plus what is new in those rows (wide as `counts`)."""
    return RATE_MEMORY ** jnp.sum(counts, 0) * sums + jnp.sum(jnp.where(counts, new, 0), 0)


class NewTokens(NamedTuple):
    """Tokens for a drafter to absorb: token j goes to slot first_slot + j, with the target's feature of the position before it."""

    tokens: Int[Array, "b j"]
    features: Float[Array, "b j f"]
    first_slot: Int[Array, " b"]
    cached: Int[Array, " b"]
    """Tokens of slots below it were absorbed before: nothing is written for them, and they see only themselves."""
    size: Int[Array, " b"]
    """The number of valid tokens; the rest is padding."""


class DraftUse(NamedTuple):
    """What becomes of drafts."""

    is_lossless: bool = False
    """Only the target's choice is accepted, so drafts may depend on its noise (coupling.py)."""
    scored: bool = False
    """The drafts are ranked together with those of other drafters."""
    worth: Float[Array, "b 1"] | None = None
    """Drafts with lower scores are not verified (tree.worth_a_row), so they need not be found. None: all are verified."""

    @property
    def needs_scores(self) -> bool:
        """Otherwise a chain may come without scores."""
        return self.scored or self.worth is not None


VERIFIED_WHOLE = DraftUse()


class Draft(NamedTuple):
    """What a drafter proposes."""

    candidates: Candidates | Chain
    memo: Any = None
    """Arrays that its `learn` reads; nothing else does."""


class DraftTraits(NamedTuple):
    """What decides which trees a drafter can draft, and which of them pay."""

    max_topk: int = 0
    """The widest tree that it can draft (TreeShape.topk); 0: it drafts nothing."""
    max_steps: int | None = None
    """The deepest (TreeShape.num_steps); None: any."""
    lags: bool = False
    """It may be left out of plain cycles, which then cost no more than without it: it absorbs their tokens before the next tree."""
    from_text: bool = False
    """It looks texts up, at any depth for the same time: TreeShape.head_steps does not limit it."""
    limits_head: bool = False
    """Its trees may have head_steps: it drafts from the text, and otherwise too."""
    max_head_steps: int | None = None
    """Then, the largest of these head_steps; None: any."""


class Drafter(ABC):
    """A source of drafts. `state.draft` is its own; everything else of the state it may read and must not change.

    The defaults here are for a drafter without weights, features or state.
    """

    weights: Any = ()
    """A pytree of arrays; inside a program they are traced. Nothing below depends on them."""
    capture: tuple[int, ...] = ()
    """The layers of the target whose input residual streams make the feature; (): the hidden after its final norm."""
    feature_size: int = 0
    """Width of the feature of one position; 0: it reads none."""
    first_slot: int = 1
    """The first slot whose token it absorbs. Slot 0 has no feature before it, which matters only to those that read features."""
    traits: DraftTraits
    source: str = "head"
    """Its name in /metrics and answers, where there are others."""
    source_names: tuple[str, ...] = ()
    """What the numbers of Tree.sources stand for; (): its trees have none, as it is the only source."""

    def _derive(self, **facts: Any) -> None:
        """Sets those of the above that follow from the fields of a frozen dataclass."""
        for name, value in facts.items():
            object.__setattr__(self, name, value)

    def with_weights(self, weights: Any) -> "Drafter":
        """The same drafter with these weights."""
        return self

    def placed(self, place: Place) -> Any:
        """Its weights on the devices of an engine."""
        return place(self.weights, None)

    def empty(self, sizes: Sizes) -> Any:
        """Its state for `sizes.rows` requests and its pages, if it has any: zeros."""
        return ()

    @abstractmethod
    def propose(self, target: Llama, state: State, batch: Batch, tree: TreeShape, use: DraftUse = VERIFIED_WHOLE) -> Draft:
        """Candidates below each root, for a tree with num_steps > 0."""

    def absorb(self, target: Llama, state: State, batch: Batch, new: NewTokens) -> Any:
        """Its state after these tokens."""
        return state.draft

    def learn(self, state: State, batch: Batch, memo: Any, chosen: Int[Array, " b"]) -> Any:
        """Its state after the target chose these tokens after the roots. `memo`: its draft's, or None in plain cycles."""
        return state.draft

    def lend(self, own: Any, rows: Int[Array, " b"], stretches: Int[Array, "b l"]) -> Any:
        """Its state `own` with stretches of other requests' texts for these rows."""
        return own


class Models(NamedTuple):
    """The target, and where its drafts come from."""

    target: Llama
    drafter: Drafter
    thresholds: Thresholds | None = None
    """Drafts that the target did not choose may be accepted under these. None: lossless."""
    row_cost: float = 0.0
    """As EngineConfig.row_cost."""


@dataclass(frozen=True)
class NoDrafter(Drafter):
    """Plain decoding: proposes the root only."""

    traits = DraftTraits()

    def propose(self, target: Llama, state: State, batch: Batch, tree: TreeShape, use: DraftUse = VERIFIED_WHOLE) -> Draft:
        return Draft(Chain(jnp.zeros((len(batch.rows), 0), jnp.int32)))


class Promises(NamedTuple):
    """Each source's best token after the root, and its chance by its score, for `Merged.learn` to compare with what was chosen."""

    token: Int[Array, "b sources"]
    chance: Float[Array, "b sources"]
    """0: the source proposed nothing."""


class Memos(NamedTuple):
    """What merged drafters learn from."""

    own: tuple[Any, ...]
    """Each source's."""
    promises: Promises
    is_sure: Bool[Array, ""] | None
    """Only those sources were asked that draft from the text. None: all were."""


class MergedState(NamedTuple):
    """What merged drafters keep between programs."""

    sources: tuple[Any, ...]
    """Each source's own."""
    seen: Float[Array, " sources"]
    """How many of a source's best tokens after the root the target was asked about,"""
    chosen: Float[Array, " sources"]
    """how many it chose,"""
    promised: Float[Array, " sources"]
    """and how many it should have chosen according to the scores. All requests share these."""

    @property
    def sharpness(self) -> Float[Array, " sources"]:
        """What a source's scores are multiplied by, so that they promise on average what the target chooses."""
        chosen, promised = (jnp.log(jnp.minimum(part / self.seen, SUREST)) for part in (self.chosen, self.promised))
        return jnp.clip(chosen / promised, 1 / MOST_SHARPNESS, MOST_SHARPNESS)


@dataclass(frozen=True)
class Merged(Drafter):
    """Several drafters at once, whose candidates are ranked together. Those that read features must read the same.

    Scores of different sources are comparable only if they keep what they promise: an overconfident head would push every n-gram
    out of the tree. So if a source's best tokens are chosen less often than its scores say, the scores are multiplied by more than
    1, and if more often, by less. Where rows have a cost this makes sense for a single source, too.
    """

    sources: tuple[Drafter, ...]

    def __post_init__(self):
        readers = [each for each in self.sources if each.feature_size]
        if len({(each.capture, each.feature_size) for each in readers}) > 1:
            layers = ", ".join(str(each.capture) for each in readers)
            raise ValueError(f"merged drafters must read the same layers of the target, got {layers}: leave out all but one")
        traits = [each.traits for each in self.sources]
        self._derive(
            weights=tuple(each.weights for each in self.sources),
            capture=readers[0].capture if readers else (),
            feature_size=readers[0].feature_size if readers else 0,
            first_slot=min(each.first_slot for each in self.sources),
            traits=DraftTraits(
                max_topk=min(each.max_topk for each in traits if not each.from_text),
                max_steps=None if None in (deepest := [each.max_steps for each in traits]) else max(filter(None, deepest)),
                lags=any(each.lags for each in traits),
                limits_head=len({each.from_text for each in traits}) == 2,
                max_head_steps=min((each.max_steps for each in traits if each.max_steps is not None), default=None),
            ),
            source_names=names_of_sets([each.source for each in self.sources]) if len(self.sources) > 1 else (),
        )

    def with_weights(self, weights: Sequence[Any]) -> "Merged":
        return Merged(tuple(each.with_weights(own) for each, own in zip(self.sources, weights, strict=True)))

    def placed(self, place: Place) -> tuple[Any, ...]:
        return tuple(each.placed(place) for each in self.sources)

    def empty(self, sizes: Sizes) -> MergedState:
        # Three separate arrays, because each is donated.
        counts = (jnp.full(len(self.sources), part * RATE_PRIOR, jnp.float32) for part in (1.0, 0.5, 0.5))
        return MergedState(tuple(each.empty(sizes) for each in self.sources), *counts)

    def propose(self, target: Llama, state: State, batch: Batch, tree: TreeShape, use: DraftUse = VERIFIED_WHOLE) -> Draft:
        sharpness, states = state.draft.sharpness, self._with_states(state)

        def ask(i: int) -> Draft:
            source, own = states[i]
            shape = tree if source.traits.from_text else tree.of_head
            if not shape.num_steps:
                return Draft(nothing(batch))
            worth = None if use.worth is None else use.worth / sharpness[i]
            draft = source.propose(target, own, batch, shape, use._replace(scored=True, worth=worth))
            return draft._replace(candidates=as_candidates(draft.candidates))

        drafts = {i: ask(i) for i, source in enumerate(self.sources) if source.traits.from_text}
        is_sure = None if use.worth is None or not drafts else are_sure([each.candidates for each in drafts.values()], use.worth)
        drafts |= {i: ask_unless(is_sure, partial(ask, i)) for i in range(len(self.sources)) if i not in drafts}
        in_order = [drafts[i] for i in range(len(self.sources))]
        found = [as_candidates(each.candidates) for each in in_order]
        candidates = merge([own._replace(scores=own.scores * sharpness[i]) for i, own in enumerate(found)], tree.num_steps)
        if len(in_order) == 1:
            candidates = candidates._replace(sources=None)
        return Draft(candidates, Memos(tuple(each.memo for each in in_order), promises(found), is_sure))

    def absorb(self, target: Llama, state: State, batch: Batch, new: NewTokens) -> MergedState:
        def absorbed(source: Drafter, own: State) -> Any:
            return source.absorb(target, own, batch, new._replace(cached=jnp.maximum(new.cached, source.first_slot)))

        return state.draft._replace(sources=tuple(absorbed(each, own) for each, own in self._with_states(state)))

    def learn(self, state: State, batch: Batch, memo: Any, chosen: Int[Array, " b"]) -> MergedState:
        memos = (None,) * len(self.sources) if memo is None else memo.own

        def learnt(source: Drafter, own: State, noted: Any) -> Any:
            if memo is None or memo.is_sure is None or source.traits.from_text:
                return source.learn(own, batch, noted, chosen)
            return jax.lax.cond(memo.is_sure, lambda: own.draft, lambda: source.learn(own, batch, noted, chosen))

        sources = tuple(learnt(*own, noted) for own, noted in zip(self._with_states(state), memos, strict=True))
        after = state.draft._replace(sources=sources)
        if memo is None:
            return after
        promised = memo.promises
        counts = (promised.chance > 0) & ~batch.sequences.done[:, None]
        return after._replace(
            seen=remembered(after.seen, counts, 1.0),
            chosen=remembered(after.chosen, counts, promised.token == chosen[:, None]),
            promised=remembered(after.promised, counts, promised.chance),
        )

    def lend(self, own: MergedState, rows: Int[Array, " b"], stretches: Int[Array, "b l"]) -> MergedState:
        lent = [each.lend(part, rows, stretches) for each, part in zip(self.sources, own.sources, strict=True)]
        return own._replace(sources=tuple(lent))

    def _with_states(self, state: State) -> list[tuple[Drafter, State]]:
        """Each source, with a copy of the state whose `draft` is that source's own."""
        return [(each, state._replace(draft=own)) for each, own in zip(self.sources, state.draft.sources, strict=True)]


def names_of_sets(sources: Sequence[str]) -> tuple[str, ...]:
    """The name of each set of sources, by its bits. What nobody proposed ("other") fills the tree, or a grammar forces it.

    In:  ["head", "ngram"]
    Out: ("other", "head", "ngram", "head+ngram")
    """
    sets = range(1, 1 << len(sources))
    return "other", *("+".join(name for bit, name in enumerate(sources) if each >> bit & 1) for each in sets)


def are_sure(drafts: Sequence[Candidates | Chain], worth: Float[Array, "b 1"]) -> Bool[Array, ""]:
    """Whether one of these has a likely token after each root. Ended sequences don't matter; a trial run is not sure of any."""
    likely = jnp.max(promises([as_candidates(draft) for draft in drafts]).chance, 1, keepdims=True) >= SURE
    return jnp.all((likely & ~jnp.isneginf(worth)) | jnp.isposinf(worth))


def ask_unless(is_sure: Bool[Array, ""] | None, ask: Callable[[], Draft]) -> Draft:
    """What a source drafts; where others are sure, placeholders of the same shapes."""
    if is_sure is None:
        return ask()
    shapes = jax.eval_shape(ask)
    skipped = jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), shapes)
    return jax.lax.cond(is_sure, lambda: skipped._replace(candidates=none_of(shapes.candidates)), ask)


def nothing(batch: Batch) -> Candidates:
    """The candidates of a source that is not asked: none."""
    tokens = jnp.zeros((len(batch.rows), 1), jnp.int32)
    return Candidates(tokens, jnp.full(tokens.shape, -jnp.inf), tokens - 1)


def promises(drafts: Sequence[Candidates]) -> Promises:
    """The best candidate of each source after the root."""
    tokens, chances = [], []
    for draft in drafts:
        scores = jnp.where(draft.parents < 0, draft.scores, -jnp.inf)
        best = jnp.argmax(scores, 1)[:, None]
        tokens.append(jnp.take_along_axis(draft.tokens, best, 1))
        chances.append(jnp.exp(jnp.take_along_axis(scores, best, 1)))
    return Promises(jnp.concatenate(tokens, 1), jnp.concatenate(chances, 1))
