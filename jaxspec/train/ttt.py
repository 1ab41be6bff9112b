"""EAGLE-3's training-time test: the head is unrolled on its own outputs, as in drafting (EAGLE-3 paper, section 3.2).

Losses and masks are those of SafeAILab's trainer: tests/train/test_reference.py holds them to 1e-5.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.head import DraftHead
from jaxspec.models.layers import AttentionMetadata
from jaxspec.models.llama import Llama
from jaxspec.typing import Array, Bool, Float, Int

DECAY = 0.8
"""Weight of each unroll step's loss, relative to the step before."""
CHUNK = 1024
"""Positions whose logits exist at the same time."""
REGRESSION, CROSS_ENTROPY = 1.0, 0.1
"""EAGLE-1's weights of the two losses (EAGLE paper, section 3.2)."""


class Rows(NamedTuple):
    """A batch of text. One row may hold several conversations, one behind the other.

    In:  conversations [5, 6, 7] and [8, 9], whose last two and last one tokens are answers, in a row of 6
    Out: tokens [5, 6, 7, 8, 9, 0], segments [1, 1, 1, 2, 2, 0], positions [0, 1, 2, 0, 1, 0], learnt [0, 1, 0, 0, 0, 0]
    """

    tokens: Int[Array, "b n"] | np.ndarray
    segments: Int[Array, "b n"] | np.ndarray
    """Number of the token's conversation in its row, from 1; 0: padding."""
    positions: Int[Array, "b n"] | np.ndarray
    """Within the conversation."""
    learnt: Bool[Array, "b n"] | np.ndarray
    """True for tokens of answers, but for the last token of a conversation: nothing follows it."""

    def map(self, function: Callable[[Any], Any]) -> "Rows":
        """The same function of every field."""
        return Rows(function(self.tokens), function(self.segments), function(self.positions), function(self.learnt))


def whole_rows(batch: int, width: int) -> Rows:
    """Rows that are one text each, learnt but for their last tokens; all tokens are 0."""
    places = np.broadcast_to(np.arange(width, dtype=np.int32), (batch, width))
    return Rows(np.zeros_like(places), np.ones_like(places), places, places < width - 1)


class Lesson(NamedTuple):
    """The frozen target's outputs for a batch."""

    features: Float[Array, "b n f"]
    hidden: Float[Array, "b n h"]
    """After the final norm: logits are made from it when they are needed."""
    choice: Int[Array, "b n"]
    """The target's likeliest next token at every position."""


class Unrolled(NamedTuple):
    """Losses and right drafts. Pair t of step i predicts the token at position t + 2 + i."""

    losses: Float[Array, " steps"]
    """A mean over all positions of the batch, those that don't count included (SafeAILab's definition)."""
    correct: Bool[Array, "steps b n"]
    """True where the head's likeliest token is the target's choice, and the pair counts."""
    counted: Bool[Array, "steps b n"]

    @property
    def loss(self) -> Float[Array, ""]:
        """What is minimised."""
        return jnp.sum(self.losses * DECAY ** jnp.arange(len(self.losses)))


def metadata(rows: Rows, step: int) -> AttentionMetadata:
    """The rows of one unroll step: pair t stands `step` tokens further and sees the true pairs 0..t of its conversation and its
    own drafts.

    The window holds the keys of all steps so far, so the mask is [causal | eye | ... | eye]: the very shape drafting has, with
    every position of the text drafting its own chain at once. Padding sees the text, so that no row of the mask is empty.

    In:  one conversation of 2 tokens, step=1
    Out: positions [[1, 2]], no pages, mask [[1,0, 1,0], [1,1, 0,1]]
    """
    batch, width = rows.tokens.shape
    segments = jnp.asarray(rows.segments)
    queries, keys = segments[:, :, None], segments[:, None, :]
    seen = (keys > 0) & ((queries == keys) | (queries == 0)) & jnp.tril(jnp.ones((width, width), bool))
    eye = jnp.broadcast_to(jnp.eye(width, dtype=bool), (batch, width, width))
    zeros = jnp.zeros(batch, jnp.int32)
    return AttentionMetadata(
        positions=jnp.asarray(rows.positions) + step,
        page_table=jnp.zeros((batch, 0), jnp.int32),
        start=zeros,
        length=zeros,
        mask=jnp.concatenate([seen] + [eye] * step, -1),
    )


def teach(target: Llama, captured_layers: tuple[int, ...], rows: Rows) -> Lesson:
    """Runs the target over a batch."""
    out = target(jnp.asarray(rows.tokens), metadata(rows, 0), capture=captured_layers)
    return Lesson(out.features, out.hidden, _by_chunks(lambda hidden: jnp.argmax(target.logits(hidden), -1), out.hidden))


def unroll(head: DraftHead, target: Llama, taught: Lesson, rows: Rows, steps: int) -> Unrolled:
    """Drafts `steps` tokens from every position of the text.

    Pair t of step i reads the embedding of token t + 1 + i and, at step 0, the feature of position t, later its own output. It
    counts if token t + i is learnt and of the same conversation. Its loss is the cross-entropy to the target's distribution at
    position t + 1 + i over the draft vocabulary, 0 where the target's choice has no draft id. An EAGLE-1 head, whose output
    is a feature, also learns to come near the target's.
    """
    ids = head.target_vocab()
    batch, width = rows.tokens.shape
    regresses = head.config.algorithm == "EAGLE"
    tokens, segments, learnt = (jnp.asarray(part) for part in (rows.tokens, rows.segments, rows.learnt))
    hidden, window = head.project(taught.features), None
    losses, correct, counted = [], [], []

    def draft(number, hidden, window):
        ahead = shifted(tokens, number + 1)
        out = head(head.embed(ahead, target), hidden, metadata(rows, number), None, window)
        counts = shifted(learnt, number) & (shifted(segments, number) == segments)
        choice, goal = shifted(taught.choice, number + 1), shifted(taught.hidden, number + 1)
        entropy, drafted = cross_entropy(head, target, goal, out.hidden)
        has_id = jnp.ones_like(counts) if ids is None else members(ids, target.config.vocab_size)[choice]
        loss = jnp.sum(jnp.where(counts & has_id, entropy, 0.0)) / (batch * width)
        if regresses:
            distance = jnp.abs(out.hidden.astype(jnp.float32) - goal)
            smooth = jnp.where(distance < 1, 0.5 * distance**2, distance - 0.5).mean(-1)
            loss = REGRESSION * jnp.sum(jnp.where(counts, smooth, 0.0)) / (batch * width) + CROSS_ENTROPY * loss
        return loss, counts & (drafted == choice), counts, out

    for number in range(steps):
        loss, right, counts, out = jax.checkpoint(draft, static_argnums=0)(number, hidden, window)
        hidden, window = out.hidden, out.window
        losses.append(loss)
        correct.append(right)
        counted.append(counts)
    return Unrolled(jnp.stack(losses), jnp.stack(correct), jnp.stack(counted))


def cross_entropy(
    head: DraftHead, target: Llama, goal: Float[Array, "b n h"], hidden: Float[Array, "b n d"]
) -> tuple[Float[Array, "b n"], Int[Array, "b n"]]:
    """The cross-entropy of the head's distribution to the target's, over the draft vocabulary, and the head's likeliest token.

    Logits are made chunk by chunk, and again for the gradient, so they are never stored whole.
    """
    ids = head.target_vocab()

    def chunk(goal, hidden):
        teacher = jax.lax.stop_gradient(restricted_logits(target, goal, ids))
        logits = head.logits(hidden, target)
        entropy = -jnp.sum(jax.nn.softmax(teacher) * jax.nn.log_softmax(logits), -1)
        return entropy, head.target_ids(jnp.argmax(logits, -1))

    return _by_chunks(jax.checkpoint(chunk), goal, hidden)


def restricted_logits(target: Llama, hidden: Float[Array, "*rows h"], ids: Int[Array, " v"] | None) -> Float[Array, "*rows v"]:
    """The target's logits of these tokens only; None: of all."""
    if ids is None:
        return target.logits(hidden)
    if target.config.tie_word_embeddings:
        return jnp.einsum("...h,vh->...v", hidden, target.embed_tokens[...][ids], preferred_element_type=jnp.float32)
    return jnp.einsum("...h,hv->...v", hidden, target.lm_head.kernel[...][:, ids], preferred_element_type=jnp.float32)


def members(ids: Int[Array, " v"], vocab_size: int) -> Bool[Array, " vocab"]:
    """Which tokens have a draft id."""
    return jnp.zeros(vocab_size, bool).at[ids].set(True)


def shifted(values: Array, places: int) -> Array:
    """Each position gets what stands `places` further; the end is filled with zeros.

    In:  [[1, 2, 3]], 1
    Out: [[2, 3, 0]]
    """
    return jnp.concatenate([values[:, places:], jnp.zeros_like(values[:, :places])], 1) if places else values


def _by_chunks(function, *arrays: Array):
    """The function of arrays [b, n, ...], CHUNK positions at a time."""
    batch, width = arrays[0].shape[:2]
    count = -(-batch * width // CHUNK)
    padding = count * CHUNK - batch * width

    def chunks(array):
        flat = array.reshape(batch * width, *array.shape[2:])
        return jnp.pad(flat, ((0, padding), *((0, 0),) * (flat.ndim - 1))).reshape(count, CHUNK, *flat.shape[1:])

    def whole(array):
        return array.reshape(count * CHUNK, *array.shape[2:])[: batch * width].reshape(batch, width, *array.shape[2:])

    if batch * width <= CHUNK:
        return function(*arrays)
    return jax.tree.map(whole, jax.lax.map(lambda parts: function(*parts), tuple(map(chunks, arrays))))


def accuracies(correct: np.ndarray, counted: np.ndarray) -> dict[str, list[float] | float]:
    """Shares of right drafts per step, the same among chains right so far, and the mean accept length of a chain.

    Over pairs that count in every step; both are bool [steps, b, n]. The accept length counts the target's own token: 1 + the
    mean number of leading right drafts. On the target's greedy text it is what a chain of that depth achieves.
    """
    whole = np.asarray(counted).all(0)
    pairs = np.asarray(correct)[:, whole].astype(np.float64)
    if not pairs.size:
        return {"accuracy": [], "given_chain_right": [], "accept_length": 1.0}
    alone, chain = pairs.mean(1), np.cumprod(pairs, 0).mean(1)
    given = chain / np.concatenate([np.ones(1), np.maximum(chain[:-1], 1e-9)])
    return {
        "accuracy": [round(float(share), 3) for share in alone],
        "given_chain_right": [round(float(share), 3) for share in given],
        "accept_length": round(1 + float(chain.sum()), 3),
    }
