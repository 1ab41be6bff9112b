"""Drafts from the text itself: what followed its last tokens where they stood before (n-gram or prompt-lookup decoding).

No weights, no pages: the text is on the device already (State.history), so the search is part of the cycle, and a draft knows the
newest token. A host structure would know it a cycle later; so the host only lends stretches of other requests' texts
(engine/text_store.py), which are searched along. The search compares every position with the last 12 tokens: 0.15 ms for a text of
8,192 tokens (one AMD EPYC core, jax 0.12.0.1, during other work, 26 November 2026; no GPU has run it).

Several places continue the text, the longest matches first, and the newest among equals. Their continuations share prefixes, which
makes them a tree. A candidate's score estimates how likely the target is to choose it, and all before it:

    the rate at which the target followed matches of this length (learnt while serving)
    x the share of the places that continue so, longer matches counting more

After an accepted draft the match is longer by one, so these rates know depths, too.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.drafter import RATE_PRIOR, VERIFIED_WHOLE, Draft, Drafter, DraftTraits, DraftUse, remembered
from jaxspec.decoding.state import Batch, Sizes, State
from jaxspec.decoding.top import TOP_AT_ONCE, top
from jaxspec.decoding.tree import Candidates, Chain
from jaxspec.models.llama import Llama
from jaxspec.tree_shape import TreeShape
from jaxspec.typing import Array, Bool, Float, Int

PLACES = TOP_AT_ONCE
"""Places whose continuations are compared."""
NOTHING = -1
"""In place of a token: equal to none."""
LONGER = 4.0
"""How much more a place counts whose match is longer by one token."""


class Rates(NamedTuple):
    """How often the target chose the token that a match of each length proposed first. All requests share them."""

    chosen: Float[Array, " lengths"]
    seen: Float[Array, " lengths"]


class NgramState(NamedTuple):
    """What an n-gram drafter keeps between programs."""

    rates: Rates
    lent: Int[Array, "r l"] | None = None
    """A stretch of another request's text for each row, searched as if it stood before the row's own; -1: nothing."""


class FirstGuess(NamedTuple):
    """What `learn` compares with the target's choice."""

    token: Int[Array, " b"]
    match: Int[Array, " b"]
    """Its length; 0: there was none."""


class Places(NamedTuple):
    """Where the text's last tokens stood before: the longest matches first, the newest among equals."""

    last: Int[Array, "b r"]
    """The position that corresponds to the root's."""
    match: Int[Array, "b r"]
    """How many tokens are equal, up to there and up to the root; 0: no such place."""


@dataclass(frozen=True)
class NgramDrafter(Drafter):
    """Continues the text as it continued before."""

    shortest: int = 1
    """Tokens of a match, at least."""
    longest: int = 12
    """Tokens that are compared, at most: longer matches count as these."""
    lent: int = 0
    """Tokens of another request's text that each row may be lent (engine/text_store.py); 0: none."""
    traits = DraftTraits(max_topk=PLACES, from_text=True)
    source = "ngram"

    def empty(self, sizes: Sizes) -> NgramState:
        """No observations: a longer match is followed more often, in any text."""
        first_guess = 1 - 0.7 ** np.arange(self.longest + 1, dtype=np.float32)
        rates = Rates(jnp.asarray(RATE_PRIOR * first_guess), jnp.full(self.longest + 1, RATE_PRIOR, jnp.float32))
        return NgramState(rates, jnp.full((sizes.rows, self.lent), NOTHING, jnp.int32) if self.lent else None)

    def lend(self, own: NgramState, rows: Int[Array, " b"], stretches: Int[Array, "b l"]) -> NgramState:
        return own if own.lent is None else own._replace(lent=own.lent.at[rows].set(stretches))

    def propose(self, target: Llama, state: State, batch: Batch, tree: TreeShape, use: DraftUse = VERIFIED_WHOLE) -> Draft:
        """With topk = 1 the continuation of the longest match, else a tree of PLACES continuations."""
        text, root, own = state.history[batch.rows], batch.sequences.length, state.draft
        if own.lent is not None:
            text, root = jnp.concatenate([own.lent[batch.rows], text], 1), root + own.lent.shape[1]
        places = find(text, root, self.longest, 1 if tree.topk == 1 else PLACES)
        places = places._replace(match=jnp.where(places.match >= self.shortest, places.match, 0))
        continuations = jnp.maximum(continued(text, root, places.last, tree.num_steps), 0)  # without a place it may be NOTHING
        memo = FirstGuess(continuations[:, 0, 0], places.match[:, 0])
        if tree.topk == 1 and not use.needs_scores:
            return Draft(Chain(continuations[:, 0]), memo)
        return Draft(candidates(continuations, places.match, own.rates), memo)

    def learn(self, state: State, batch: Batch, memo: Any, chosen: Int[Array, " b"]) -> NgramState:
        """Counts the first proposal of each sequence."""
        rates = state.draft.rates
        if memo is None:
            return state.draft
        counts = (memo.match > 0) & ~batch.sequences.done
        of_length = (memo.match[:, None] == jnp.arange(self.longest + 1)) & counts[:, None]
        is_chosen = (memo.token == chosen)[:, None]
        after = Rates(remembered(rates.chosen, of_length, is_chosen), remembered(rates.seen, of_length, 1.0))
        return state.draft._replace(rates=after)


@jax.named_scope("find")
def find(text: Int[Array, "b t"], root: Int[Array, " b"], longest: int, count: int) -> Places:
    """The `count` best places (fewer in a shorter text) before the root where the last tokens, up to it, stood before.

    In:  text [[1, 2, 3, 9, 2, 3, 5, 2, 3, 0]], root [8], longest 3, count 2
    Out: last [[5, 2]], match [[2, 2]]: "2 3" ends at 5 and at 2
    """
    length = text.shape[1]
    positions = jnp.arange(length)
    shifted = jnp.pad(text, ((0, 0), (longest - 1, 0)), constant_values=-1)
    is_equal = positions < root[:, None]
    match = jnp.zeros(text.shape, jnp.int32)
    for back in range(longest):
        place = root - back
        own = jnp.take_along_axis(text, jnp.maximum(place, 0)[:, None], 1)
        before = shifted[:, longest - 1 - back : longest - 1 - back + length]
        is_equal = is_equal & (before == own) & (place >= 0)[:, None]
        match = match + is_equal
    # Whole numbers up to 2^24 are exact in float32: contexts of a million tokens.
    best, last = top((match * length + positions).astype(jnp.float32), min(count, length))
    return Places(last.astype(jnp.int32), best.astype(jnp.int32) // length)


def continued(text: Int[Array, "b t"], root: Int[Array, " b"], last: Int[Array, "b r"], steps: int) -> Int[Array, "b r s"]:
    """The `steps` tokens after each place. Past the root, they repeat what stands between place and root.

    In:  text [[7, 8, 9, 7, 0]], root [3], last [[0]], steps 5
    Out: [[[8, 9, 7, 8, 9]]]
    """
    period = jnp.maximum(root[:, None] - last, 1)
    positions = last[:, :, None] + 1 + jnp.arange(steps) % period[:, :, None]
    return jnp.take_along_axis(text[:, None], jnp.minimum(positions, text.shape[1] - 1), 2)


@jax.named_scope("candidates")
def candidates(continuations: Int[Array, "b r s"], match: Int[Array, "b r"], rates: Rates) -> Candidates:
    """All prefixes of the continuations, each once: candidate r * s + d is the token of place r at depth d.

    In:  continuations [[[5, 6], [5, 7]]], match [[3, 3]]
    Out: tokens [[5, 6, 5, 7]], parents [[-1, 0, -1, 0]]; the third score is -inf, as the first stands for both
    """
    batch, count, steps = continuations.shape
    is_place = match > 0
    same = shares_prefix(continuations) & is_place[:, None, :, None]  # [b, r, r, s]: the prefixes of both places are equal
    order = jnp.arange(count)
    first = jnp.where(is_place[:, :, None], jnp.argmax(same, 2), order[:, None]).astype(jnp.int32)
    weight = jnp.where(is_place, LONGER ** (match - match[:, :1]).astype(jnp.float32), 0.0)
    total = jnp.maximum(jnp.sum(weight, 1), 1.0)
    share = jnp.sum(jnp.where(same, weight[:, None, :, None], 0.0), 2) / total[:, None, None]
    # The context of a candidate is its parent's text: a match of the first place that continues so.
    before = jnp.concatenate([jnp.zeros_like(first[:, :, :1]), first[:, :, :-1]], 2)
    of_context = jnp.take_along_axis(match[:, :, None], before.reshape(batch, -1, 1), 1).reshape(before.shape)
    length = jnp.minimum(of_context + jnp.arange(steps), len(rates.seen) - 1)
    followed = jnp.cumsum(jnp.log(jnp.minimum(rates.chosen / rates.seen, 1.0))[length], 2)
    scores = jnp.where(is_place[:, :, None] & (first == order[:, None]), followed + jnp.log(share), -jnp.inf)
    parents = jnp.where(jnp.arange(steps) == 0, -1, before * steps + jnp.arange(steps) - 1)
    flat = (batch, count * steps)
    return Candidates(continuations.reshape(flat), scores.reshape(flat), parents.astype(jnp.int32).reshape(flat))


def shares_prefix(continuations: Int[Array, "b r s"]) -> Bool[Array, "b r r s"]:
    """Whether two continuations are equal up to each depth.

    In:  [[[5, 6], [5, 7]]]
    Out: [[[[1, 1], [1, 0]], [[1, 0], [1, 1]]]]
    """
    return jnp.cumsum(continuations[:, :, None] != continuations[:, None], -1) == 0
