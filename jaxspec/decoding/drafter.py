"""Where drafts come from: the interface of a drafter, no drafter at all, and several whose drafts are merged.

A drafter is a frozen dataclass that holds no arrays but its weights; drafters that are equal but for these compile to equal
programs. The engine keeps its state (`empty`) with its own, gives it every token of the text once (`absorb`), and asks it for
candidates before the target runs (`propose`). head_drafter.py drafts token by token with a head, block_drafter.py a block at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxspec.decoding.sampling import Thresholds
from jaxspec.decoding.state import Batch, Sizes, State
from jaxspec.decoding.tree import Candidates, Chain, as_candidates, discounted, merge
from jaxspec.model_config import ModelConfig
from jaxspec.models.llama import Llama
from jaxspec.tree_shape import TreeShape
from jaxspec.typing import Array, Bool, Float, Int

RATE_PRIOR = 4.0
"""Observations that the first guess of a learnt rate counts for."""
RATE_MEMORY = 0.99
"""The share of its observations that a rate keeps when it sees another: it follows other texts within some hundred tokens."""


def remembered(sums: Float[Array, " n"], counts: Bool[Array, "b n"], new: Array | float) -> Float[Array, " n"]:
    """The sums, each faded by RATE_MEMORY for every row that counts for it, plus what is new in those rows (wide as `counts`)."""
    return RATE_MEMORY ** jnp.sum(counts, 0) * sums + jnp.sum(jnp.where(counts, new, 0), 0)


type Place = Callable[[Any, ModelConfig | None], Any]
"""Puts weights on the devices of an engine, which share those of layers with these sizes. None: each device has all."""


class NewTokens(NamedTuple):
    """Tokens for a drafter to absorb: number j is that of slot first_slot + j, with the target's feature of the position before."""

    tokens: Int[Array, "b j"]
    features: Float[Array, "b j f"]
    first_slot: Int[Array, " b"]
    cached: Int[Array, " b"]
    """Tokens of slots below it were absorbed before: nothing is written for them, and they see only themselves."""
    size: Int[Array, " b"]
    """The number of valid tokens; the rest is padding."""


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
    """Then, the deepest of these; None: any."""


class Drafter(ABC):
    """A source of drafts. `state.draft` is its own; everything else of the state it may read and must not change.

    What is said of weights, features and state here holds for one that has none.
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
    """What /metrics and answers call it beside others."""
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
    def propose(
        self, target: Llama, state: State, batch: Batch, tree: TreeShape, *, coupled: bool = False, scored: bool = False
    ) -> Draft:
        """Candidates below each root, for a tree with num_steps > 0.

        `coupled`: they may depend on the target's noise (coupling.py). `scored`: they are ranked beside those of others.
        """

    def absorb(self, target: Llama, state: State, batch: Batch, new: NewTokens) -> Any:
        """Its state after these tokens."""
        return state.draft

    def learn(self, state: State, batch: Batch, memo: Any, chosen: Int[Array, " b"]) -> Any:
        """Its state after the target chose these tokens behind the roots. `memo`: its draft's, or None in plain cycles."""
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


@dataclass(frozen=True)
class NoDrafter(Drafter):
    """Plain decoding: proposes the root only."""

    traits = DraftTraits()

    def propose(
        self, target: Llama, state: State, batch: Batch, tree: TreeShape, *, coupled: bool = False, scored: bool = False
    ) -> Draft:
        return Draft(Chain(jnp.zeros((len(batch.rows), 0), jnp.int32)))


class Promises(NamedTuple):
    """Each source's best token behind the root, and its chance by its score, for `Merged.learn` to compare with what was chosen."""

    token: Int[Array, "b sources"]
    chance: Float[Array, "b sources"]
    """0: the source proposed nothing."""


class MergedState(NamedTuple):
    """What merged drafters keep between programs."""

    sources: tuple[Any, ...]
    """Each source's own."""
    chosen: Float[Array, " sources"]
    """How often the target chose a source's best token behind the root,"""
    promised: Float[Array, " sources"]
    """and how often it should have by the scores. All requests share both."""


@dataclass(frozen=True)
class Merged(Drafter):
    """Several drafters at once, whose candidates are ranked together. Those that read features must read the same.

    Scores of different sources are comparable only if they keep what they promise: an overconfident head would push every n-gram
    out of the tree. So a source whose best tokens are chosen less often than their scores say loses as much at every depth.
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
            source_names=names_of_sets([each.source for each in self.sources]),
        )

    def with_weights(self, weights: Sequence[Any]) -> "Merged":
        return Merged(tuple(each.with_weights(own) for each, own in zip(self.sources, weights, strict=True)))

    def placed(self, place: Place) -> tuple[Any, ...]:
        return tuple(each.placed(place) for each in self.sources)

    def empty(self, sizes: Sizes) -> MergedState:
        chosen, promised = (jnp.full(len(self.sources), RATE_PRIOR, jnp.float32) for _ in range(2))  # two, for both are donated
        return MergedState(tuple(each.empty(sizes) for each in self.sources), chosen, promised)

    def propose(
        self, target: Llama, state: State, batch: Batch, tree: TreeShape, *, coupled: bool = False, scored: bool = False
    ) -> Draft:
        shapes = [tree if each.traits.from_text else tree.of_head for each in self.sources]
        drafts = [
            each.propose(target, own, batch, shape, coupled=coupled, scored=True) if shape.num_steps else Draft(nothing(batch))
            for (each, own), shape in zip(self._with_states(state), shapes, strict=True)
        ]
        found = [as_candidates(draft.candidates) for draft in drafts]
        kept = jnp.minimum(jnp.log(state.draft.chosen / state.draft.promised), 0.0)
        candidates = merge([discounted(own, kept[i], shapes[i].num_steps) for i, own in enumerate(found)], tree.num_steps)
        return Draft(candidates, (tuple(draft.memo for draft in drafts), promises(found)))

    def absorb(self, target: Llama, state: State, batch: Batch, new: NewTokens) -> MergedState:
        def absorbed(source: Drafter, own: State) -> Any:
            return source.absorb(target, own, batch, new._replace(cached=jnp.maximum(new.cached, source.first_slot)))

        return state.draft._replace(sources=tuple(absorbed(each, own) for each, own in self._with_states(state)))

    def learn(self, state: State, batch: Batch, memo: Any, chosen: Int[Array, " b"]) -> MergedState:
        memos, promised = memo or ((None,) * len(self.sources), None)
        sources = zip(self._with_states(state), memos, strict=True)
        after = state.draft._replace(sources=tuple(each.learn(own, batch, noted, chosen) for (each, own), noted in sources))
        if promised is None:
            return after
        counts = (promised.chance > 0) & ~batch.sequences.done[:, None]
        return after._replace(
            chosen=remembered(after.chosen, counts, promised.token == chosen[:, None]),
            promised=remembered(after.promised, counts, promised.chance),
        )

    def lend(self, own: MergedState, rows: Int[Array, " b"], stretches: Int[Array, "b l"]) -> MergedState:
        lent = [each.lend(part, rows, stretches) for each, part in zip(self.sources, own.sources, strict=True)]
        return own._replace(sources=tuple(lent))

    def _with_states(self, state: State) -> list[tuple[Drafter, State]]:
        """Each source, and the state with this source's part in place of all of them."""
        return [(each, state._replace(draft=own)) for each, own in zip(self.sources, state.draft.sources, strict=True)]


def names_of_sets(sources: Sequence[str]) -> tuple[str, ...]:
    """The name of each set of sources, by its bits. What none of them proposed fills the tree, or a grammar forces it.

    In:  ["head", "ngram"]
    Out: ("other", "head", "ngram", "head+ngram")
    """
    sets = range(1, 1 << len(sources))
    return "other", *("+".join(name for bit, name in enumerate(sources) if each >> bit & 1) for each in sets)


def nothing(batch: Batch) -> Candidates:
    """Of a source that is not asked."""
    tokens = jnp.zeros((len(batch.rows), 1), jnp.int32)
    return Candidates(tokens, jnp.full(tokens.shape, -jnp.inf), tokens - 1)


def promises(drafts: Sequence[Candidates]) -> Promises:
    """The best candidate of each source behind the root."""
    tokens, chances = [], []
    for draft in drafts:
        scores = jnp.where(draft.parents < 0, draft.scores, -jnp.inf)
        best = jnp.argmax(scores, 1)[:, None]
        tokens.append(jnp.take_along_axis(draft.tokens, best, 1))
        chances.append(jnp.exp(jnp.take_along_axis(scores, best, 1)))
    return Promises(jnp.concatenate(tokens, 1), jnp.concatenate(chances, 1))
