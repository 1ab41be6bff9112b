"""EAGLE-3's training-time test: the head is unrolled on its own outputs, as in drafting (EAGLE-3 paper, section 3.2).

Losses and masks are those of SafeAILab's trainer (tests/train/test_reference.py holds them to 1e-5), with one difference: that
trainer pads the target's logits with zeros, so if token 0 has a draft id, its head learns a uniform distribution at a row's last
position. Ours learns nothing after the end of a row.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.models.head import DraftHead, Head
from jaxspec.models.layers import AttentionMetadata
from jaxspec.models.linear import Kernels
from jaxspec.models.llama import Llama
from jaxspec.train.settings import LOSSES as LOSS_NAMES
from jaxspec.typing import Array, Bool, Float, Int

DECAY = 0.8
"""Weight of each unroll step's loss, relative to the step before."""
CHUNK = 256
"""Positions whose logits exist at the same time, for all unroll steps: equally many of each row. (For a block head: blocks.)"""
REGRESSION, CROSS_ENTROPY = 1.0, 0.1
"""EAGLE-1's weights of the two losses (EAGLE paper, section 3.2)."""


def cross_entropy(teacher: Float[Array, "*rows v"], logits: Float[Array, "*rows v"]) -> Float[Array, "*rows"]:
    """Cross-entropy of the head's distribution against the target's, from the logits of both (EAGLE-3's loss)."""
    return jax.nn.logsumexp(logits, -1) - jnp.sum(jax.nn.softmax(teacher) * logits, -1)


def unlikely_match(teacher: Float[Array, "*rows v"], logits: Float[Array, "*rows v"]) -> Float[Array, "*rows"]:
    """Minus the logarithm of the chance that rejection sampling accepts, which is the overlap of the two (LK, arXiv 2602.23881).
    The teacher is the target's log probabilities, which over a draft vocabulary add up to less than one."""
    return -jax.nn.logsumexp(jnp.minimum(teacher, jax.nn.log_softmax(logits)), -1)


LOSSES = dict(zip(LOSS_NAMES, (cross_entropy, unlikely_match), strict=True))


class Rows(NamedTuple):
    """A batch of text. One row may hold several conversations, one after the other.

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
    """The target's most likely next token at every position."""
    log_sum: Float[Array, "b n"]
    """The log-sum-exp of the target's logits over its whole vocabulary: a logit minus this is a log probability."""


class Unrolled(NamedTuple):
    """Losses and right drafts. Pair t of step i predicts the token at position t + 2 + i. (For a block head, n counts the blocks of
    a row, and step i is the i-th token that each drafts.)"""

    loss: Float[Array, ""]
    """What is minimised: the sum of DECAY^step times each step's loss."""
    losses: Float[Array, " steps"]
    """A mean over all positions of the batch, those that don't count included (SafeAILab's definition)."""
    correct: Bool[Array, "steps b n"]
    """True where the head's most likely token is the target's choice, and the pair counts."""
    counted: Bool[Array, "steps b n"]


def metadata(rows: Rows, step: int) -> AttentionMetadata:
    """Attention metadata of one unroll step: pair t is `step` positions further on, and attends to the true pairs 0..t of its
    conversation and to its own drafts.

    The window holds the keys of all steps so far, so the mask is [causal | eye | ... | eye], as in drafting a chain from every
    position of the text at once. Padding attends to the text, so that no row of the mask is empty.

    In:  one conversation of 2 tokens, step=1
    Out: positions [[1, 2]], no pages, mask [[1,0, 1,0], [1,1, 0,1]]
    """
    batch, width = rows.tokens.shape
    segments = jnp.asarray(rows.segments)
    queries, keys = segments[:, :, None], segments[:, None, :]
    seen = (keys > 0) & ((queries == keys) | (queries == 0)) & jnp.tril(jnp.ones((width, width), bool))
    eye = jnp.broadcast_to(jnp.eye(width, dtype=bool), (batch, width, width))
    return AttentionMetadata.of_window(jnp.asarray(rows.positions) + step, jnp.concatenate([seen] + [eye] * step, -1))


def teach(target: Llama, captured_layers: tuple[int, ...], rows: Rows) -> Lesson:
    out = target(jnp.asarray(rows.tokens), metadata(rows, 0), capture=captured_layers)
    flat, whole = _chunks((out.hidden,))
    logits = jax.lax.map(lambda chunk: (jnp.argmax(each := target.logits(*chunk), -1), jax.nn.logsumexp(each, -1)), flat)
    return Lesson(out.features, out.hidden, *map(whole, logits))


def unroll(head: DraftHead, target: Llama, taught: Lesson, rows: Rows, steps: int, loss: str = LOSS_NAMES[0]) -> Unrolled:
    """Drafts `steps` tokens from every position of the text. `loss` is one of LOSSES.

    Pair t of step i reads the embedding of token t + 1 + i and, at step 0, the feature of position t, later its own output. It
    counts if token t + i is learnt and of the same conversation. Its loss compares its distribution with the target's at position
    t + 1 + i, over the draft vocabulary; it is 0 where the target's choice has no draft id. An EAGLE-1 head, whose output is a
    feature, also has a smooth L1 loss against the target's. The head needs less memory if it was built with TRAINING.
    """
    tokens, segments, learnt = (jnp.asarray(part) for part in (rows.tokens, rows.segments, rows.learnt))

    @partial(jax.checkpoint, static_argnums=0)
    def draft(number, hidden, window):
        return head(head.embed(shifted(tokens, number + 1), target), hidden, metadata(rows, number), None, window)

    hidden, window = head.project(taught.features), None
    outputs, counted = [], []
    for number in range(steps):
        hidden, window = draft(number, hidden, window)
        outputs.append(hidden)
        counted.append(shifted(learnt, number) & (shifted(segments, number) == segments))

    ids = head.token_map()
    has_id = jnp.ones_like(learnt) if ids is None else jnp.zeros(target.config.vocab_size, bool).at[ids].set(True)[taught.choice]
    weights = [(shifted(counts, -number - 1) & has_id) / tokens.size for number, counts in enumerate(counted)]
    aligned = [shifted(output, -number - 1) for number, output in enumerate(outputs)]  # to where the target predicts the same token
    total, losses, drafted = distances(
        head,
        target,
        taught.hidden[:, :, None],
        taught.log_sum[:, :, None],
        jnp.stack(aligned, 2),
        jnp.stack(weights, 2),
        loss,
        DECAY,
    )
    if head.config.algorithm == "EAGLE":
        regression = jnp.stack(
            [
                jnp.sum(jnp.where(counts, _smooth_l1(output, shifted(taught.hidden, number + 1)), 0.0)) / tokens.size
                for number, (output, counts) in enumerate(zip(outputs, counted, strict=True))
            ]
        )
        total = REGRESSION * jnp.sum(regression * DECAY ** jnp.arange(steps)) + CROSS_ENTROPY * total
        losses = REGRESSION * regression + CROSS_ENTROPY * losses
    right = [counts & shifted(drafted[:, :, number] == taught.choice, number + 1) for number, counts in enumerate(counted)]
    return Unrolled(total, losses, jnp.stack(right), jnp.stack(counted))


def chain_attention(
    q, k_pages, v_pages, page_table, start, length, k_window, v_window, mask, scales: None = None, *, implementation: None = None
):  # fmt: skip
    """`tree_attention` for the masks of `metadata`, without computing the masked scores. The drafts' keys come after the text's;
    of these, row t attends to one per unroll step."""
    batch, width, heads, head_dim = q.shape
    kv_heads = k_window.shape[2]
    own = batch, -1, width, kv_heads, head_dim
    k_own, v_own = k_window[:, width:].reshape(own), v_window[:, width:].reshape(own)
    grouped = q.reshape(batch, width, kv_heads, heads // kv_heads, head_dim)
    of_text = jnp.einsum("bwkgd,bskd->bkgws", grouped, k_window[:, :width], preferred_element_type=jnp.float32)
    of_text = jnp.where(mask[:, None, None, :, :width], of_text, -jnp.inf)
    of_own = jnp.einsum("bwkgd,bswkd->bkgws", grouped, k_own, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.concatenate([of_text, of_own], -1) / head_dim**0.5, -1).astype(q.dtype)
    out = jnp.einsum("bkgws,bskd->bkgwd", weights[..., :width], v_window[:, :width], preferred_element_type=jnp.float32)
    out += jnp.einsum("bkgws,bswkd->bkgwd", weights[..., width:], v_own, preferred_element_type=jnp.float32)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)


TRAINING = Kernels(attend=chain_attention)
"""What a head in training is built with."""


def distances(
    head: Head,
    target: Llama,
    goal: Float[Array, "b n goals h"],
    log_sum: Float[Array, "b n goals"],
    hidden: Float[Array, "b n steps d"],
    weights: Float[Array, "b n steps"],
    loss: str,
    decay: float,
) -> tuple[Float[Array, ""], Float[Array, " steps"], Int[Array, "b n steps"]]:
    """How far the head's distributions are from the target's, over the draft vocabulary.

    Args:
        goal: the target's hidden that the distribution to be learnt is made from: one for each step, or one for all.
        log_sum: `Lesson.log_sum` of these goals.
        hidden: the head's outputs of all steps, each of which drafts the token that its goal predicts.

    Returns:
        The sum over the steps of decay^step times their losses, which alone has a gradient; the losses, weighted sums over the
        positions; and the head's most likely tokens.
    """
    graph, params, *others = nnx.split(head, nnx.Param, ...)
    target_graph, target_state = nnx.split(target)
    return _distances((graph, target_graph, loss, decay), params, (others, target_state), (goal, log_sum, hidden, weights))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _distances(how, params, frozen, inputs):
    """The forward pass without a gradient, for evaluation; logits exist for CHUNK positions at a time."""
    flat, whole = _chunks(inputs)
    totals, losses, drafted = jax.lax.map(lambda chunk: _of_chunk(how, params, frozen, *chunk), flat)
    return totals.sum(), losses.sum(0), whole(drafted)


def _of_chunk(how, params, frozen, goal, log_sum, hidden, weights):
    """The results of `_distances` for one chunk, [b, n, ...] as in `distances`."""
    graph, target_graph, loss, decay = how
    head, target = nnx.merge(graph, params, *frozen[0]), nnx.merge(target_graph, frozen[1])
    teacher = restricted_logits(target, goal, head.token_map())
    if LOSSES[loss] is unlikely_match:
        teacher -= log_sum[..., None]
    logits = head.logits(hidden, target)
    losses = jnp.sum(weights * LOSSES[loss](teacher, logits), (0, 1))
    return jnp.sum(losses * decay ** jnp.arange(len(losses))), losses, head.target_ids(jnp.argmax(logits, -1))


def _forward(how, params, frozen, inputs):
    """Computes the gradient along with the loss, so that logits are neither computed twice nor kept."""

    def chunk(summed, part):
        goal, log_sum, hidden, weights = part

        def learnt(params, hidden):
            total, *others = _of_chunk(how, params, frozen, goal, log_sum, hidden, weights)
            return total, others

        (total, (losses, drafted)), (gradient, of_hidden) = jax.value_and_grad(learnt, (0, 1), has_aux=True)(params, hidden)
        return jax.tree.map(lambda sum, part: sum + part.astype(sum.dtype), summed, (gradient, total, losses)), (of_hidden, drafted)

    flat, whole = _chunks(inputs)
    wide = jax.tree.map(lambda array: jnp.zeros(array.shape, jnp.float32), params)
    sums = wide, jnp.float32(0), jnp.zeros(inputs[-1].shape[-1])
    (gradient, total, losses), (of_hidden, drafted) = jax.lax.scan(chunk, sums, flat)
    gradient = jax.tree.map(lambda sum, array: sum.astype(array.dtype), gradient, params)
    return (total, losses, whole(drafted)), (gradient, whole(of_hidden))


def _backward(_, gradients, cotangents):
    gradient, of_hidden = jax.tree.map(lambda each: (cotangents[0] * each).astype(each.dtype), gradients)
    return gradient, None, (None, None, of_hidden, None)


_distances.defvjp(_forward, _backward)


def _smooth_l1(output: Float[Array, "b n d"], goal: Float[Array, "b n d"]) -> Float[Array, "b n"]:
    distance = jnp.abs(output.astype(jnp.float32) - goal)
    return jnp.where(distance < 1, 0.5 * distance**2, distance - 0.5).mean(-1)


def restricted_logits(target: Llama, hidden: Float[Array, "*rows h"], ids: Int[Array, " v"] | None) -> Float[Array, "*rows v"]:
    """The target's logits of these tokens only; None: of all."""
    if ids is None:
        return target.logits(hidden)
    return target.output_columns(ids).dot(hidden, jnp.float32)


def shifted(values: Array, places: int) -> Array:
    """Shifts each row left by `places` (right if negative), and fills with zeros.

    In:  [[1, 2, 3]], 1      [[1, 2, 3]], -1
    Out: [[2, 3, 0]]         [[0, 1, 2]]
    """
    if places < 0:
        return jnp.concatenate([jnp.zeros_like(values[:, :-places]), values[:, :places]], 1)
    return jnp.concatenate([values[:, places:], jnp.zeros_like(values[:, :places])], 1) if places else values


def _chunks(arrays: tuple[Array, ...]) -> tuple[tuple[Array, ...], Callable[[Array], Array]]:
    """Arrays [b, n, ...] as [chunks, b, size, ...], padded with zeros, and the inverse for a result. Each chunk
    has positions of every row, so devices that divide the rows divide each chunk."""
    batch, width = arrays[0].shape[:2]
    size = min(max(1, CHUNK // batch), width)
    count = -(-width // size)

    def chunked(array):
        padded = jnp.pad(array, ((0, 0), (0, count * size - width), *((0, 0),) * (array.ndim - 2)))
        return padded.reshape(batch, count, size, *array.shape[2:]).swapaxes(0, 1)

    def whole(array):
        return array.swapaxes(0, 1).reshape(batch, count * size, *array.shape[3:])[:, :width]

    return tuple(map(chunked, arrays)), whole


def accuracies(correct: np.ndarray, counted: np.ndarray) -> dict[str, list[float] | float]:
    """Share of right drafts per step, the same for chains that are right so far, and the mean accept length of a chain.

    Only pairs that count in every step are used; `correct` and `counted` are bool [steps, b, n]. The accept length counts
    the target's own token: 1 + the mean number of leading right drafts. On the target's greedy text it is what a chain of that
    depth achieves.
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
