"""The walk and the cut, against plain Python that does the same one step at a time."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.spec.state import empty_sequences
from jaxspec.spec.tree import Tree, ancestor_mask
from jaxspec.spec.verify import OUT_OF_BUDGET, RUNNING, STOPPED, accept, cut


def sequences(count: int, *, remaining: int = 100, stop_tokens: tuple[int, ...] = (), done: bool = False):
    empty = empty_sequences(count, 1, 1, jnp.float32)
    stops = empty.stop_tokens.at[:, : len(stop_tokens)].set(jnp.array(stop_tokens, jnp.int32))
    return empty._replace(remaining=jnp.full(count, remaining), stop_tokens=stops, done=jnp.full(count, done))


def walk(tokens, parents, wanted) -> list[int]:
    """Accepted nodes, root first, found by looking for the child that holds the wanted token."""
    path = [0]
    while child := [node for node in range(1, len(tokens)) if parents[node] == path[-1] and tokens[node] == wanted[path[-1]]]:
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
    wanted = rng.integers(0, 3, nodes)
    steps = max_depth + int(rng.integers(0, 2))

    array = jnp.array([parents], jnp.int32)
    tree = Tree(jnp.array([tokens]), array, jnp.array([depth]), ancestor_mask(array, steps))
    result = accept(tree, jnp.asarray(wanted[None]), sequences(1), steps)
    path = walk(tokens, parents, wanted)
    assert int(result.accepted[0]) == len(path) - 1
    assert int(result.emitted[0]) == len(path)
    assert result.path[0, : len(path)].tolist() == path
    assert result.tokens[0, : len(path)].tolist() == wanted[path].tolist()
    assert int(result.finish[0]) == RUNNING


@pytest.mark.parametrize(
    ("tokens", "count", "settings", "expected"),
    [
        ([5, 2, 9], 3, {}, (3, RUNNING)),
        ([5, 2, 9], 3, {"stop_tokens": (2,)}, (2, STOPPED)),
        ([5, 2, 9], 1, {"stop_tokens": (2,)}, (1, RUNNING)),  # the stop token was not accepted
        ([5, 2, 9], 3, {"remaining": 2}, (2, OUT_OF_BUDGET)),
        ([5, 2, 9], 2, {"remaining": 2}, (2, OUT_OF_BUDGET)),
        ([5, 2, 9], 3, {"remaining": 1, "stop_tokens": (2,)}, (1, OUT_OF_BUDGET)),  # the budget ends before the stop
        ([5, 2, 9], 3, {"remaining": 2, "stop_tokens": (2,)}, (2, STOPPED)),
        ([5, 2, 9], 3, {"done": True}, (0, RUNNING)),
    ],
)
def test_cut(tokens, count, settings, expected):
    got = cut(jnp.array([tokens]), jnp.array([count]), sequences(1, **settings))
    assert (int(got[0][0]), int(got[1][0])) == expected
