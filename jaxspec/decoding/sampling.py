"""Choosing the target's own token: argmax, or argmax of logits / T + noise (noise.py), among the tokens that filters leave.

Penalties, bias and bans (penalties.py) change the logits before they get here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.decoding.noise import draw, greedy, position_key
from jaxspec.decoding.settings import SamplingKind, Settings, divisor
from jaxspec.decoding.top import top
from jaxspec.decoding.tree import Tree
from jaxspec.sampling_params import MAX_LOGPROBS
from jaxspec.typing import Array, Bool, Float, Int
from pallas_kernels.cutoff import cutoff

type Logits = Float[Array, "b n v"]

ALL = slice(None)
NODES_AT_ONCE = 8
"""Nodes whose logits are adjusted at the same time: adjusted logits are a copy, which for large trees would double the memory."""


class Logprobs(NamedTuple):
    """Log probabilities of the tokens at j positions, and the most likely tokens there, best first."""

    chosen: Float[Array, "b j"]
    top_ids: Int[Array, "b j top"]
    top: Float[Array, "b j top"]


@jax.named_scope("choose")
def choose(
    logits: Logits,
    positions: Int[Array, "b n"],
    needed: Int[Array, ""],
    settings: Callable[[], Settings],
    adjust: Callable[[Logits, slice], Logits],
) -> Int[Array, "b n"]:
    """The target's token at each of the `positions`; requests with temperature 0 are greedy under every kind.

    `needed` is the highest SamplingKind of the batch: only its branch runs, and reads the settings; the others cost nothing.
    `adjust` takes the logits of some nodes, and the slice of these nodes.
    """

    def sample(logits: Logits) -> Int[Array, "b n"]:
        return drawn(logits, settings().temperature)

    def sample_filtered(logits: Logits, nodes: slice = ALL) -> Int[Array, "b n"]:
        is_sampled = settings().temperature > 0
        scaled = jnp.where(is_sampled[:, None, None], apply_filters(logits, settings()), logits)
        return drawn(scaled, is_sampled.astype(jnp.float32), nodes)

    def sample_adjusted(logits: Logits) -> Int[Array, "b n"]:
        chosen: list[Array] = []
        for first in range(0, logits.shape[1], NODES_AT_ONCE):
            nodes = slice(first, first + NODES_AT_ONCE)
            logits, _ = jax.lax.optimization_barrier((logits, chosen[-1:]))  # else XLA adjusts all parts at once
            chosen.append(sample_filtered(adjust(logits[:, nodes], nodes), nodes))
        return jnp.concatenate(chosen, 1)

    def drawn(scores: Logits, temperature: Float[Array, " b"], nodes: slice = ALL) -> Int[Array, "b n"]:
        return draw(scores, temperature, settings().seed, positions[:, nodes])

    branches = {
        SamplingKind.GREEDY: greedy,
        SamplingKind.TEMPERATURE: sample,
        SamplingKind.FILTERED: sample_filtered,
        SamplingKind.ADJUSTED: sample_adjusted,
    }
    return jax.lax.switch(needed, [branches[kind] for kind in SamplingKind], logits)


def apply_filters(logits: Logits, settings: Settings, *, rough: bool = False) -> Logits:
    """The logits divided by the temperature, with -inf in place of the tokens that top_k, top_p and min_p drop.

    All three use the same probabilities, so their order does not matter. A token is kept if it is among the top_k, if the
    tokens before it have less than top_p together, and if its probability is at least min_p times the largest one. The
    most likely token is always kept; equally likely ones come in order of their ids. `rough`: good enough for drafts.

    In:  logarithms of 0.5, 0.3, 0.15, 0.05; temperature 1, top_k 3, top_p 0.9, min_p 0.4
    Out: the first two are kept (top_k keeps three, top_p three, min_p two)
    """
    is_sampled, none = settings.temperature > 0, Settings()
    pairs = ((settings.top_k, none.top_k), (settings.top_p, none.top_p), (settings.min_p, none.min_p))
    limits = (jnp.where(is_sampled, given, neutral)[:, None] for given, neutral in pairs)  # greedy requests get none
    of_rows = (jnp.broadcast_to(each, logits.shape[:-1]) for each in (1 / divisor(settings)[..., 0], *limits))
    kept = cutoff(logits, *of_rows, rough=rough).keeps(logits)
    return jnp.where(kept, logits / divisor(settings), -jnp.inf)


def logprobs_of(logits: Float[Array, "b j v"], tokens: Int[Array, "b j"], count: int = MAX_LOGPROBS) -> Logprobs:
    """Log probabilities of the tokens, and of the `count` most likely tokens (or of the whole vocabulary if it is smaller)."""
    count = min(count, logits.shape[-1])
    total = jax.nn.logsumexp(logits, -1)
    best, ids = top(logits, count)
    chosen = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
    return Logprobs(chosen - total, ids, best - total[..., None])


def logprobs_if(asked: Bool[Array, " b"], compute: Callable[[], Logprobs]) -> Logprobs:
    """The result of `compute` if any sequence asks for it; otherwise zeros of the same shapes, at no cost."""

    def zeros() -> Logprobs:
        return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), jax.eval_shape(compute))

    return jax.lax.cond(jnp.any(asked), compute, zeros)


@dataclass(frozen=True)
class Thresholds:
    """SGLang's --speculative-accept-threshold-single and -acc, both in (0, 1]. 1 and 1 is lossless."""

    single: float = 1.0
    acc: float = 1.0


def choose_by_threshold(
    logits: Logits, positions: Int[Array, "b n"], settings: Settings, tree: Tree, thresholds: Thresholds
) -> Int[Array, "b n"]:
    """SGLang's threshold acceptance, which is lossy: a draft may be accepted although the target would sample another token.

    At each node the drafted children are tried in order, best first, with one uniform number u per position: a child with the
    target's probability p is taken if u < (the sum of p over the children tried so far, itself included) / acc, or if
    p >= single. If none is taken, a token is sampled from the target's distribution without the children. With both thresholds
    at 1 the result has exactly the target's distribution, if the drafts do not depend on the noise; below 1 the text favours
    the drafts. Greedy requests stay greedy.
    """
    filtered = apply_filters(logits, settings)
    nodes = tree.tokens.shape[1]
    is_child = tree.parents[:, None, :] == jnp.arange(nodes)[:, None]  # [b, parent, child]
    is_twin = (tree.tokens[:, :, None] == tree.tokens[:, None]) & (tree.parents[:, :, None] == tree.parents[:, None])
    is_child &= ~jnp.any(jnp.tril(is_twin, -1), -1)[:, None]  # n-grams fill a tree with tokens that are there already
    of_child = jnp.take_along_axis(jax.nn.softmax(filtered, -1), jnp.broadcast_to(tree.tokens[:, None], is_child.shape), 2)
    of_child = jnp.where(is_child, of_child, 0.0)
    tried = jnp.cumsum(of_child, -1)  # children come in flat order: the head's most likely first
    taken = is_child & (of_child > 0)
    taken &= (uniforms(positions, settings)[:, :, None] < tried / thresholds.acc) | (of_child >= thresholds.single)
    batch, node = jnp.arange(tree.tokens.shape[0])[:, None, None], jnp.arange(nodes)[None, :, None]
    rest = filtered.at[batch, node, tree.tokens[:, None]].add(jnp.where(is_child, -jnp.inf, 0.0))
    sampled = draw(rest, jnp.ones_like(settings.temperature), settings.seed, positions)
    # If the children are the whole distribution, rounding may leave their sum below 1: then the last one is taken.
    is_last = (jnp.arange(nodes) == nodes - 1 - jnp.argmax(of_child[:, :, ::-1] > 0, -1)[..., None]) & (of_child > 0)
    taken |= is_last & jnp.all(jnp.isneginf(rest), -1, keepdims=True)
    drawn = jnp.where(jnp.any(taken, -1), jnp.take_along_axis(tree.tokens, jnp.argmax(taken, -1), 1), sampled)
    return jnp.where(settings.temperature[:, None] > 0, drawn, greedy(logits))


def uniforms(positions: Int[Array, "b n"], settings: Settings) -> Float[Array, "b n"]:
    """One number in [0, 1) per position, keyed like the noise but independent of it."""

    def uniform(seed, position):
        key = jax.random.wrap_key_data(position_key(seed, position), impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, 1), ())

    return jax.vmap(jax.vmap(uniform, in_axes=(None, 0)))(settings.seed, positions)
