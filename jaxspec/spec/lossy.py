"""SGLang's lossy acceptance: a draft may be taken although the target would have drawn another token.

`--speculative-accept-threshold-single` and `-acc`. At a node the drafted children are tried in turn, best first, with one
coin u per position: a child with the target's probability p is taken if u < (p of the children tried so far, its own included)
/ acc, or if p >= single. If none is taken, the token is drawn from the target's law without the children. With both
thresholds at 1 that is exactly the target's law; below, text leans towards the drafts: this changes what the model says.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxspec.sampling import Settings, noise_at, pick, position_key, scale, sorted_and_kept
from jaxspec.spec.tree import Tree
from jaxspec.typing import Array, Float, Int


@dataclass(frozen=True)
class Thresholds:
    """Both in (0, 1]; 1 and 1 is lossless."""

    single: float = 1.0
    acc: float = 1.0


def leaning(
    logits: Float[Array, "b n v"], positions: Int[Array, "b n"], settings: Settings, tree: Tree, thresholds: Thresholds
) -> Int[Array, "b n"]:
    """The token after each node: a drafted child if one is taken, else a draw without the children. Greedy rows stay greedy."""
    probabilities, scaled = filtered_law(logits, settings)
    nodes = tree.tokens.shape[1]
    is_child = tree.parents[:, None, :] == jnp.arange(nodes)[:, None]  # [b, parent, child]
    of_child = jnp.take_along_axis(probabilities, jnp.broadcast_to(tree.tokens[:, None], is_child.shape), 2)
    of_child = jnp.where(is_child, of_child, 0.0)
    tried = jnp.cumsum(of_child, -1)  # children come in flat order: the likeliest to the head first
    taken = is_child & (of_child > 0)
    taken &= (coins(positions, settings)[:, :, None] < tried / thresholds.acc) | (of_child >= thresholds.single)
    first = jnp.argmax(taken, -1)

    batch, node = jnp.arange(tree.tokens.shape[0])[:, None, None], jnp.arange(nodes)[None, :, None]
    rest = scaled.at[batch, node, tree.tokens[:, None]].add(jnp.where(is_child, -jnp.inf, 0.0))
    drawn = jnp.argmax(rest + noise_at(positions, settings, logits.shape[-1]), -1).astype(jnp.int32)
    accepted = jnp.take_along_axis(tree.tokens, first, 1)
    return pick(logits, jnp.where(jnp.any(taken, -1), accepted, drawn), settings)


def filtered_law(logits: Float[Array, "b n v"], settings: Settings) -> tuple[Float[Array, "b n v"], Float[Array, "b n v"]]:
    """Probabilities after temperature and filters, and their logarithms up to a constant, in order of token ids."""
    ordered, ids, kept = sorted_and_kept(logits / scale(settings), settings)
    batch, nodes, _ = logits.shape
    place = jnp.arange(batch)[:, None, None], jnp.arange(nodes)[None, :, None], ids
    scaled = jnp.zeros_like(logits).at[place].set(jnp.where(kept, ordered, -jnp.inf))
    return jax.nn.softmax(scaled, -1), scaled


def coins(positions: Int[Array, "b n"], settings: Settings) -> Float[Array, "b n"]:
    """One number in [0, 1) per position, keyed like the noise but independent of it."""

    def coin(seed, position):
        return jax.random.uniform(jax.random.fold_in(position_key(seed, position), 1), ())

    return jax.vmap(jax.vmap(coin, in_axes=(None, 0)))(settings.seed, positions)
