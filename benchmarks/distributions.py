"""How much of a head's drafts would be accepted, by three rules on the same distributions of target and head.

At every position of the target's own text the head drafts a chain of `STEPS` levels on the true tokens. With p and q, the two
distributions of a level, and k children per node:

- drafts of the k likeliest tokens are accepted with probability p(top k of q): what engines without noise in their drafts reach;
- multi-round rejection sampling draws k children from q without replacement (SpecInfer, arXiv 2305.09781; EAGLE-2);
- coupled drafts are the k largest log q + noise, and the target chooses the largest log p + the same noise.

Rejection sampling changes the text with every tree; the other two leave it as it is.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.coupling import boundary, calibrated
from jaxspec.load import LoadedModels
from jaxspec.models.block import BlockConfig, BlockHead
from jaxspec.models.layers import causal_metadata
from jaxspec.models.linear import DEFAULT_KERNELS
from jaxspec.models.llama import Llama
from jaxspec.train.blocks import TRAINING_BLOCKS, drafted
from jaxspec.train.ttt import metadata, whole_rows
from jaxspec.typing import Array, Float, Int

STEPS, DRAWS, CHILDREN, BINS = 5, 4, (1, 2, 4), 10
"""Levels; random draws per position; children per node; bins of the calibration error."""
POSITIONS = 64
"""The first ones of each text: logits of whole vocabularies are large."""


class Rules(NamedTuple):
    """The chance of each level that a draft is accepted, by rule, [steps, t]; and of coupled drafts what they expected."""

    likeliest: Float[Array, "steps t"]
    rejection: Float[Array, "steps t"]
    coupled: Float[Array, "steps t"]
    expected: Float[Array, "steps t draws k"]
    """The head's own estimate of the chance that each child is the target's choice."""
    chosen: Float[Array, "steps t draws k"]
    """1 where it was."""


def compare(
    models: LoadedModels, texts: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float, weights: tuple[float, ...]
) -> dict:
    """Accept lengths of each rule and number of children, and the calibration error of coupled drafts.

    `texts` are prompts with their continuations; the comparison is about the latter. `weights`: as coupling.py learns them.
    """
    assert models.head is not None
    width = max(len(prompt) for prompt, _ in texts) + POSITIONS + STEPS + 1
    params = (models.target.params, models.head.params)
    logits_of = jax.jit(partial(logits_on_text, models))
    measure = {k: jax.jit(partial(rules, children=k, scale=weights[2] * temperature)) for k in CHILDREN}
    found: dict[int, list[Rules]] = {k: [] for k in CHILDREN}
    for number, (prompt, continuation) in enumerate(texts):
        text = [*prompt, *continuation][:width]
        first, last = len(prompt) - 1, min(len(prompt) + POSITIONS, len(text)) - STEPS - 1
        if last <= first:
            continue
        target, head = logits_of(params, jnp.array([[*text, *[0] * (width - len(text))]]))
        log_p = jax.nn.log_softmax(target[:, first:last] / temperature)
        head = head[:, first:last]
        log_q = jax.nn.log_softmax(calibrated(head, boundary(head), jnp.array(weights)) / temperature)
        for k in CHILDREN:
            found[k].append(measure[k](log_p, log_q, jax.random.key(number)))
    rows = {k: Rules(*(jnp.concatenate(parts, 1) for parts in zip(*found[k], strict=True))) for k in CHILDREN}
    return {
        "positions": rows[CHILDREN[0]].coupled.shape[1],
        "sharpness": weights[1] / weights[2],
        "accept_length": {
            str(k): {name: accept_length(np.asarray(getattr(each, name))) for name in ("likeliest", "rejection", "coupled")}
            for k, each in rows.items()
        },
        "calibration_error": calibration_error(*map(np.asarray, rows[CHILDREN[-1]][-2:])),
    }


def logits_on_text(
    models: LoadedModels, params: tuple[dict, dict], tokens: Int[Array, "1 n"]
) -> tuple[Float[Array, "steps t v"], Float[Array, "steps t v"]]:
    """Logits of target and head for the token after position t + 1 + step, when the head drafts from t on the true tokens.

    Tokens that the head does not know have -inf.
    """
    assert models.head is not None
    kernels = TRAINING_BLOCKS if isinstance(models.head.config, BlockConfig) else DEFAULT_KERNELS
    target, head = models.target.merge(params[0]), models.head.merge(params[1], kernels)
    out = target(tokens, causal_metadata(1, tokens.shape[1]), capture=models.head.config.captured_layers)
    width, logits = tokens.shape[1] - STEPS, target.logits(out.hidden)
    if isinstance(head, BlockHead):
        known = of_blocks(head, target, tokens, out.features)
        return jnp.stack([logits[0, step + 1 : step + 1 + width] for step in range(len(known))]), known
    embeddings = head.embed(tokens, target)
    hidden, window = head.project(out.features[:, :width]), None
    of_target, of_head = [], []
    rows = whole_rows(1, width)
    for step in range(STEPS):
        ahead = slice(step + 1, step + 1 + width)
        drafted = head(embeddings[:, ahead], hidden, metadata(rows, step), None, window)
        hidden, window = drafted.hidden, drafted.window
        known = head.logits(hidden, target)[0]
        if (ids := head.token_map()) is not None:
            known = jnp.full((width, logits.shape[-1]), -jnp.inf).at[:, ids].set(known)
        of_target.append(logits[0, ahead])
        of_head.append(known)
    return jnp.stack(of_target), jnp.stack(of_head)


def of_blocks(
    head: BlockHead, target: Llama, tokens: Int[Array, "1 n"], features: Float[Array, "1 n f"]
) -> Float[Array, "steps t v"]:
    """The logits of a block after each token but the first, which alone the block reads of the text from there on. A DSpark head
    also reads the true token before."""
    steps = min(STEPS, head.config.max_steps)
    roots = 1 + jnp.arange(tokens.shape[1] - STEPS)
    hidden = drafted(head, target, features, whole_rows(1, tokens.shape[1])._replace(tokens=tokens), roots[None])
    logits = head.logits(hidden[0, :, :steps], target)
    if head.is_conditional:
        logits += head.bias(tokens[0, roots[:, None] + jnp.arange(steps)])
    return logits.swapaxes(0, 1)


def rules(
    log_p: Float[Array, "steps t v"], log_q: Float[Array, "steps t v"], key: Array, *, children: int, scale: float = 1.0
) -> Rules:
    """Of every level and position, averaged over DRAWS random draws. `scale`: the head's chances are softmax(scale * scores)."""

    def one_draw(log_p, log_q, key):
        noise, other = (jax.random.gumbel(each, log_p.shape) for each in jax.random.split(key))
        scores = log_q + noise
        best, drafted = jax.lax.top_k(scores, children)
        chosen = drafted == jnp.argmax(log_p + noise)
        expected = jnp.exp(scale * best - jax.nn.logsumexp(scale * scores))
        return rejection(log_p, log_q, jax.lax.top_k(log_q + other, children)[1]), expected, chosen.astype(jnp.float32)

    def one_position(log_p, log_q, key):
        likeliest = jnp.sum(jnp.exp(log_p)[jax.lax.top_k(log_q, children)[1]])
        rejected, expected, chosen = jax.vmap(one_draw, (None, None, 0))(log_p, log_q, jax.random.split(key, DRAWS))
        return Rules(likeliest, jnp.mean(rejected), jnp.mean(jnp.sum(chosen, -1)), expected, chosen)

    keys = jax.random.split(key, log_p.shape[:2])
    return jax.lax.map(lambda each: jax.vmap(one_position)(*each), (log_p, log_q, keys))


def rejection(log_p: Float[Array, " v"], log_q: Float[Array, " v"], drafted: Int[Array, " k"]) -> Float[Array, ""]:
    """The chance that one of these children, drawn from q without replacement, is accepted.

    In:  p (0.5, 0.5), q (1, 0), drafted [0]
    Out: 0.5
    """
    p, q, refused = jnp.exp(log_p), jnp.exp(log_q), jnp.ones(())
    for child in drafted:
        refused *= 1 - jnp.minimum(1.0, p[child] / jnp.maximum(q[child], 1e-30))
        p = jnp.maximum(p - q, 0)
        p /= jnp.maximum(jnp.sum(p), 1e-30)
        q = q.at[child].set(0)
        q /= jnp.maximum(jnp.sum(q), 1e-30)
    return 1 - refused


def accept_length(chances: np.ndarray) -> float:
    """Tokens per verification, bonus included: 1 + the chance to pass level 1 + that to pass levels 1 and 2 + ..."""
    return float(1 + np.cumprod(chances, 0).sum(0).mean())


def calibration_error(expected: np.ndarray, chosen: np.ndarray) -> float:
    """The mean distance between the expected chance of acceptance and the share that was accepted, over BINS bins."""
    bins = np.minimum((expected * BINS).astype(int), BINS - 1).ravel()
    counts = np.bincount(bins, minlength=BINS)
    means = [np.bincount(bins, each.ravel(), BINS) / np.maximum(counts, 1) for each in (expected, chosen)]
    return float(np.abs(means[0] - means[1]) @ counts / counts.sum())
