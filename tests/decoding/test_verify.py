"""The walk and the truncation, against plain Python that does the same one step at a time."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.settings import MAX_STOP_TOKENS, neutral_settings, packed
from jaxspec.decoding.state import Batch, Sequences
from jaxspec.decoding.tree import Tree, ancestor_mask
from jaxspec.decoding.verify import OUT_OF_BUDGET, RUNNING, STOPPED, accept, truncate


def sequence(*, remaining: int = 100, done: bool = False) -> Sequences:
    """One row that may emit `remaining` tokens."""
    return Sequences.of(jnp.array([0]), jnp.array([0]), jnp.array([remaining]), jnp.array([done]))


def batch_of(now: Sequences, *stop_tokens: int) -> Batch:
    """One sequence with these stop tokens."""
    settings = neutral_settings(1)._replace(stop_tokens=stops(*stop_tokens))
    return Batch(jnp.array([0]), jnp.zeros((1, 0), jnp.int32), now, packed(settings))


def stops(*tokens: int) -> jnp.ndarray:
    """Stop tokens of one row."""
    return jnp.array([[*tokens, *[-1] * (MAX_STOP_TOKENS - len(tokens))]], jnp.int32)


def walk(tokens, parents, target_tokens) -> list[int]:
    """Accepted nodes, root first, found by looking for the child that holds the target's token."""
    path = [0]

    def children() -> list[int]:
        wanted = target_tokens[path[-1]]
        return [node for node in range(1, len(tokens)) if parents[node] == path[-1] and tokens[node] == wanted]

    while child := children():
        path.append(child[0])
    return path


@pytest.mark.parametrize("seed", range(30))
def test_accept_is_the_walk(seed):
    rng = np.random.default_rng(seed)
    nodes, max_depth = int(rng.integers(1, 12)), 0
    parents, tokens, depth = [-1], [0], [0]
    for node in range(1, nodes):
        parent = int(rng.integers(0, node))
        taken = {tokens[other] for other in range(1, node) if parents[other] == parent}
        tokens.append(int(rng.choice([token for token in range(nodes + 2) if token not in taken][:3])))
        parents.append(parent)
        depth.append(depth[parent] + 1)
        max_depth = max(max_depth, depth[-1])
    target_tokens = rng.integers(0, 3, nodes)
    steps = max_depth + int(rng.integers(0, 2))

    array = jnp.array([parents], jnp.int32)
    pays = [bool(node == 0 or seed % 2 or rng.random() < 0.8) for node in range(nodes)]
    pays = [all(pays[node] for node in np.flatnonzero(ancestors)) for ancestors in ancestor_mask(array, steps)[0]]
    tree = Tree(jnp.array([tokens]), array, jnp.array([depth]), ancestor_mask(array, steps), None, jnp.array([pays]))
    result = accept(tree, jnp.asarray(target_tokens[None]), batch_of(sequence()), steps)
    path = walk([token if paying else -1 for token, paying in zip(tokens, pays, strict=True)], parents, target_tokens)
    assert int(result.accepted[0]) == len(path) - 1
    assert int(result.emitted[0]) == len(path)
    assert result.path[0, : len(path)].tolist() == path
    assert result.tokens[0, : len(path)].tolist() == target_tokens[path].tolist()
    assert int(result.finish[0]) == RUNNING


@pytest.mark.parametrize(
    ("count", "stop", "now", "expected"),
    [
        (3, (), {}, (3, RUNNING)),
        (3, (2,), {}, (2, STOPPED)),
        (3, (7, 9, 2), {}, (2, STOPPED)),  # the first in the text, not in the list
        (1, (2,), {}, (1, RUNNING)),  # the stop token was not accepted
        (3, (), {"remaining": 2}, (2, OUT_OF_BUDGET)),
        (2, (), {"remaining": 2}, (2, OUT_OF_BUDGET)),
        (3, (2,), {"remaining": 1}, (1, OUT_OF_BUDGET)),  # the budget ends before the stop
        (3, (2,), {"remaining": 2}, (2, STOPPED)),
        (3, (2,), {"done": True}, (0, RUNNING)),
    ],
)
def test_truncate(count, stop, now, expected):
    got = truncate(jnp.array([[5, 2, 9]]), jnp.array([count]), sequence(**now), stops(*stop))
    assert (int(got[0][0]), int(got[1][0])) == expected
