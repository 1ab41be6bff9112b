"""EAGLE-3's training-time test: the head is unrolled on its own outputs, as in drafting (EAGLE-3 paper, section 3.2).

Half of the text that it learns from is the target's own: `regenerate` writes it.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from jaxspec.models.eagle3 import default_captured_layers
from jaxspec.models.head import DraftHead
from jaxspec.models.layers import AttentionMetadata, causal_metadata
from jaxspec.models.llama import Llama
from jaxspec.models.registry import LoadedModel
from jaxspec.typing import Array, Bool, Float, Int, KeysValues

DECAY = 0.8
GROWTH = 64


class Lesson(NamedTuple):
    """The frozen target's outputs for a batch of text of n tokens."""

    embeddings: Float[Array, "b n h"]
    features: Float[Array, "b n f"]
    choice: Int[Array, "b n"]
    """The target's own next token at every position."""
    probs: Float[Array, "b n v"]
    """Its next-token distribution, restricted to the draft vocabulary and renormalised."""
    in_vocab: Bool[Array, "b n"]
    """True where `choice` has a draft id."""


class Unrolled(NamedTuple):
    """Loss and correct drafts; pair t of step i predicts the token behind position t + 1 + i."""

    loss: Float[Array, ""]
    correct: Bool[Array, "steps b t"]
    """True where the head's likeliest token is the target's choice."""


def lesson(target: Llama, target_ids: Int[Array, " v"], tokens: Int[Array, "b n"]) -> Lesson:
    """Runs the target over whole rows of text; `target_ids` lists the draft vocabulary."""
    rows = unrolled_rows(tokens.shape[0], tokens.shape[1], step=0)
    out = target(tokens, rows, capture=default_captured_layers(target.config.num_layers))
    logits = target.logits(out.hidden)
    choice = jnp.argmax(logits, -1)
    members = jnp.zeros(logits.shape[-1], bool).at[target_ids].set(True)
    return Lesson(target.embed(tokens), out.features, choice, jax.nn.softmax(logits[..., target_ids]), members[choice])


def unrolled_rows(batch: int, width: int, step: int) -> AttentionMetadata:
    """The rows of one unroll step: pair t stands `step` tokens further and sees the true pairs 0..t and its own drafts.

    The window holds the keys of all steps so far, so the mask is [tril | eye | ... | eye]: the very shape drafting has, with
    every position of the text drafting its own chain at once.

    In:  batch=1, width=2, step=1
    Out: positions [[1, 2]], no pages, mask [[1,0, 1,0], [1,1, 0,1]]
    """
    eye = jnp.eye(width, dtype=bool)
    mask = jnp.concatenate([jnp.tril(jnp.ones((width, width), bool))] + [eye] * step, 1)
    zeros = jnp.zeros(batch, jnp.int32)
    return AttentionMetadata(
        positions=jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32) + step, (batch, width)),
        page_table=jnp.zeros((batch, 0), jnp.int32),
        start=zeros,
        length=zeros,
        mask=jnp.broadcast_to(mask, (batch, *mask.shape)),
    )


def unroll(head: DraftHead, target: Llama, taught: Lesson, steps: int) -> Unrolled:
    """Drafts `steps` tokens from every position of the text.

    Pair t of step i reads the embedding of token t + 1 + i and, at step 0, the feature of position t, later its own output
    before the norm. Only the last `steps` positions have no full chain and are left out, so nothing is padded.

    The loss is the sum over steps of DECAY^i times the mean cross-entropy to the target's distribution, where positions
    whose choice lies outside the draft vocabulary count as 0 (SafeAILab's definition).
    """
    batch, width = taught.choice.shape[0], taught.choice.shape[1] - steps
    hidden, window = head.project(taught.features[:, :width]), None
    loss, correct = jnp.zeros(()), []
    for step in range(steps):
        ahead = slice(step + 1, step + 1 + width)
        out = head(taught.embeddings[:, ahead], hidden, unrolled_rows(batch, width, step), None, window)
        hidden, window = out.hidden, out.window
        logits = head.logits(hidden, target)
        entropy = -jnp.sum(taught.probs[:, ahead] * jax.nn.log_softmax(logits), -1)
        loss += DECAY**step * jnp.mean(taught.in_vocab[:, ahead] * entropy)
        correct.append(head.target_ids(jnp.argmax(logits, -1)) == taught.choice[:, ahead])
    return Unrolled(loss, jnp.stack(correct))


def accuracies(correct: Bool[Array, "steps b t"]) -> dict[str, list[float] | float]:
    """Shares of right drafts per step, the same among chains right so far, and the mean accept length of a chain.

    The accept length counts the target's own token: 1 + the mean number of leading right drafts. On the target's greedy
    text it is what a chain of that depth achieves.
    """
    so_far = jnp.cumprod(correct, 0)
    alone, chain = correct.mean((1, 2)), so_far.mean((1, 2))
    given = chain / jnp.concatenate([jnp.ones(1), chain[:-1]])
    return {
        "accuracy": [round(float(share), 3) for share in alone],
        "given_chain_right": [round(float(share), 3) for share in given],
        "accept_length": round(1 + float(chain.sum()), 3),
    }


def continue_prompts(
    model: Llama, prompts: Int[Array, "b w"], key: Array, new_tokens: int, temperature: float
) -> Int[Array, "b n"]:
    """Prompts of one length and `new_tokens` tokens behind each, greedy where temperature is 0.

    One page per sequence holds its whole cache; it grows by GROWTH slots at a time, so short texts are cheap.
    """
    batch, width = prompts.shape
    pages = jnp.arange(batch, dtype=jnp.int32)[:, None]
    zeros = jnp.zeros(batch, jnp.int32)

    def choose(hidden, key):
        logits = model.logits(hidden)
        if temperature == 0:
            return jnp.argmax(logits, -1).astype(jnp.int32)
        return jax.random.categorical(key, logits / temperature).astype(jnp.int32)

    def step(carry, inputs):
        cache, token = carry
        length, key = inputs
        mask = jnp.ones((batch, 1, 1), bool)
        out = model(token[:, None], AttentionMetadata(zeros[:, None] + length, pages, zeros, zeros + length, mask), cache)
        put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=length, axis=1)
        cache = tuple(KeysValues(put(old.k, new.k), put(old.v, new.v)) for old, new in zip(cache, out.window, strict=True))
        return (cache, choose(out.hidden[:, 0], key)), token

    out = model(prompts, causal_metadata(batch, width))
    cache, token, parts = out.window, choose(out.hidden[:, -1], key), [prompts]
    for first in range(0, new_tokens, GROWTH):
        count = min(GROWTH, new_tokens - first)
        room = ((0, 0), (0, count), (0, 0), (0, 0))
        cache = tuple(KeysValues(jnp.pad(layer.k, room), jnp.pad(layer.v, room)) for layer in cache)
        lengths = width + first + jnp.arange(count, dtype=jnp.int32)
        keys = jax.random.split(jax.random.fold_in(key, first), count)
        (cache, token), tokens = jax.lax.scan(step, (cache, token), (lengths, keys))
        parts.append(tokens.T)
    return jnp.concatenate(parts, 1)


def regenerate(
    target: LoadedModel, prompts: NDArray[np.int32], new_tokens: int, temperature: float = 0.0, batch: int = 128, seed: int = 0
) -> NDArray[np.int32]:
    """int32 [rows, prompt + new_tokens] from int32 [rows, prompt], `batch` rows at a time; remaining rows are dropped."""

    @jax.jit
    def run(params, prompts, key):
        return continue_prompts(target.merge(params), prompts, key, new_tokens, temperature)

    keys = jax.random.split(jax.random.key(seed), len(prompts) // batch)
    parts = [
        np.asarray(run(target.params, prompts[index * batch : (index + 1) * batch], key))
        for index, key in enumerate(tqdm(keys, desc="target's own text", mininterval=10))
    ]
    return np.concatenate(parts)
