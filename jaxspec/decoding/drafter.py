"""Where drafts come from: the interface of a drafter, no drafter at all, and several whose drafts are merged.

A drafter is a frozen dataclass that holds no arrays but its weights; drafters that are equal but for these compile to equal
programs. The engine keeps its state (`empty`) with its own, gives it every token of the text once (`absorb`), and asks it for
candidates before the target runs (`propose`). head_drafter.py drafts with a trained head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp

from jaxspec.config import TreeShape
from jaxspec.decoding.coupling import Coupling
from jaxspec.decoding.state import Batch, Sizes, State
from jaxspec.decoding.tree import Candidates, Chain, as_candidates, merge
from jaxspec.models.llama import Llama
from jaxspec.typing import Array, Float, Int


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


@runtime_checkable
class Drafter(Protocol):
    """A source of drafts. `state.draft` is its own; everything else of the state it may read and must not change."""

    @property
    def weights(self) -> Any:
        """A pytree of arrays; inside a program they are traced. Nothing below depends on them."""

    def with_weights(self, weights: Any) -> "Drafter":
        """The same drafter with these weights."""

    @property
    def capture(self) -> tuple[int, ...]:
        """The layers of the target whose input residual streams make the feature; (): the hidden after its final norm."""

    @property
    def feature_size(self) -> int:
        """Width of the feature of one position; 0: it reads none."""

    @property
    def lags(self) -> bool:
        """It may be left out of plain cycles, which then cost no more than without it: it absorbs their tokens before the next
        tree."""

    @property
    def max_topk(self) -> int:
        """The widest tree that it can draft (TreeShape.topk); 0: it drafts nothing."""

    def empty(self, sizes: Sizes) -> Any:
        """Its state for `sizes.rows` requests and its pages, if it has any: zeros."""

    def propose(
        self, target: Llama, state: State, batch: Batch, tree: TreeShape, coupling: Coupling | None, *, scored: bool = False
    ) -> Draft:
        """Candidates below each root, for a tree with num_steps > 0. `scored`: they are ranked beside those of others."""

    def absorb(self, target: Llama, state: State, batch: Batch, new: NewTokens) -> Any:
        """Its state after these tokens."""

    def learn(self, state: State, batch: Batch, coupling: Coupling | None, memo: Any, chosen: Int[Array, " b"]) -> Any:
        """Its state after the target chose these tokens behind the roots. `memo`: its draft's, or None in plain cycles."""


class Models(NamedTuple):
    """The target, and where its drafts come from."""

    target: Llama
    drafter: Drafter


@dataclass(frozen=True)
class NoDrafter:
    """Plain decoding: proposes the root only."""

    weights: tuple[()] = ()
    capture: tuple[int, ...] = ()
    feature_size: int = 0
    lags: bool = False
    max_topk: int = 0

    def with_weights(self, weights: tuple[()]) -> "NoDrafter":
        return self

    def empty(self, sizes: Sizes) -> tuple[()]:
        return ()

    def propose(
        self, target: Llama, state: State, batch: Batch, tree: TreeShape, coupling: Coupling | None, *, scored: bool = False
    ) -> Draft:
        return Draft(Chain(jnp.zeros((len(batch.rows), 0), jnp.int32)))

    def absorb(self, target: Llama, state: State, batch: Batch, new: NewTokens) -> tuple[()]:
        return ()

    def learn(
        self, state: State, batch: Batch, coupling: Coupling | None, memo: Any, chosen: Int[Array, " b"]
    ) -> tuple[()]:  # fmt: skip
        return ()


@dataclass(frozen=True)
class Merged:
    """Several drafters at once, whose candidates are ranked together. Those that read features must read the same."""

    sources: tuple[Drafter, ...]

    def __post_init__(self):
        if len({(each.capture, each.feature_size) for each in self.sources if each.feature_size}) > 1:
            layers = ", ".join(str(each.capture) for each in self.sources if each.feature_size)
            raise ValueError(f"merged drafters must read the same layers of the target, got {layers}: leave out all but one")

    @property
    def weights(self) -> tuple[Any, ...]:
        return tuple(each.weights for each in self.sources)

    def with_weights(self, weights: Sequence[Any]) -> "Merged":
        return replace(self, sources=tuple(each.with_weights(own) for each, own in zip(self.sources, weights, strict=True)))

    @property
    def _reader(self) -> Drafter:
        return next((each for each in self.sources if each.feature_size), NoDrafter())

    @property
    def capture(self) -> tuple[int, ...]:
        return self._reader.capture

    @property
    def feature_size(self) -> int:
        return self._reader.feature_size

    @property
    def lags(self) -> bool:
        return any(each.lags for each in self.sources)

    @property
    def max_topk(self) -> int:
        return max(each.max_topk for each in self.sources)

    def empty(self, sizes: Sizes) -> tuple[Any, ...]:
        return tuple(each.empty(sizes) for each in self.sources)

    def propose(
        self, target: Llama, state: State, batch: Batch, tree: TreeShape, coupling: Coupling | None, *, scored: bool = False
    ) -> Draft:
        drafts = [each.propose(target, own, batch, tree, coupling, scored=True) for each, own in self._with_states(state)]
        candidates = merge([as_candidates(draft.candidates) for draft in drafts], tree.num_steps)
        return Draft(candidates, tuple(draft.memo for draft in drafts))

    def absorb(self, target: Llama, state: State, batch: Batch, new: NewTokens) -> tuple[Any, ...]:
        return tuple(each.absorb(target, own, batch, new) for each, own in self._with_states(state))

    def learn(
        self, state: State, batch: Batch, coupling: Coupling | None, memo: Any, chosen: Int[Array, " b"]
    ) -> tuple[Any, ...]:  # fmt: skip
        memos = memo or (None,) * len(self.sources)
        sources = zip(self._with_states(state), memos, strict=True)
        return tuple(each.learn(own, batch, coupling, noted, chosen) for (each, own), noted in sources)

    def _with_states(self, state: State) -> list[tuple[Drafter, State]]:
        """Each source, and the state with this source's part in place of all of them."""
        return [(each, state._replace(draft=own)) for each, own in zip(self.sources, state.draft, strict=True)]
