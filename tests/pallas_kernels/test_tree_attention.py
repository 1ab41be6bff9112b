"""One test class for every implementation of tree attention: random cases against plain NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_attention.api import IMPLEMENTATIONS, tree_attention

# batch, rows, window keys, heads, KV heads, head size, page size, pages per sequence
CASES = {
    "plain decode": (2, 1, 1, 4, 2, 8, 4, 6),
    "draft level": (3, 4, 12, 4, 4, 16, 16, 3),
    "verification": (2, 8, 8, 8, 2, 8, 4, 9),
    "prefill": (1, 16, 16, 4, 1, 8, 4, 8),
    "no pages": (2, 5, 5, 4, 2, 8, 4, 0),
}


def case(name: str, seed: int) -> dict:
    """Random arrays; pages that no row sees are NaN, and rows see random ancestors and themselves."""
    b, w, s, heads, kv_heads, d, page, table = CASES[name]
    rng = np.random.default_rng(seed)
    slots = table * page
    length = rng.integers(0, slots + 1, b)
    start = np.minimum(rng.integers(0, 3, b), length)
    pages = rng.normal(size=(2, b * table + 2, page, kv_heads, d)).astype(np.float32)
    page_table = rng.permutation(b * table).reshape(b, table).astype(np.int32)
    hidden = np.ones((b * table + 2, page), bool)
    for row in range(b):
        for slot in range(start[row], length[row]):
            hidden[page_table[row, slot // page], slot % page] = False
    pages[:, hidden] = np.nan
    mask = rng.random((b, w, s)) < 0.5
    mask[:, np.arange(w), np.arange(s - w, s)] = True
    return {
        "q": rng.normal(size=(b, w, heads, d)).astype(np.float32),
        "k_pages": pages[0],
        "v_pages": pages[1],
        "page_table": page_table,
        "start": start.astype(np.int32),
        "length": length.astype(np.int32),
        "k_window": rng.normal(size=(b, s, kv_heads, d)).astype(np.float32),
        "v_window": rng.normal(size=(b, s, kv_heads, d)).astype(np.float32),
        "mask": mask,
    }


def by_hand(q, k_pages, v_pages, page_table, start, length, k_window, v_window, mask) -> np.ndarray:
    """One row and one head at a time."""
    out, page = np.zeros(q.shape), k_pages.shape[1]
    group = q.shape[2] // k_window.shape[2]
    for b, w, head in np.ndindex(*q.shape[:3]):
        kv = head // group
        places = [(page_table[b, i // page], i % page) for i in range(start[b], length[b])]
        keys = [k_pages[where][kv] for where in places] + [k_window[b, j, kv] for j in np.flatnonzero(mask[b, w])]
        values = [v_pages[where][kv] for where in places] + [v_window[b, j, kv] for j in np.flatnonzero(mask[b, w])]
        logits = np.array(keys, np.float64) @ q[b, w, head] / np.sqrt(q.shape[3])
        weights = np.exp(logits - logits.max())
        out[b, w, head] = weights / weights.sum() @ np.array(values, np.float64)
    return out


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
class TestTreeAttention:
    @pytest.mark.parametrize("name", CASES)
    @pytest.mark.parametrize("seed", range(4))
    def test_equals_the_definition(self, implementation, name, seed):
        arguments = case(name, seed)
        got = tree_attention(**{key: jnp.asarray(value) for key, value in arguments.items()}, implementation=implementation)
        np.testing.assert_allclose(got, by_hand(**arguments), atol=1e-5)

    def test_bfloat16(self, implementation):
        arguments = case("verification", 9)
        narrow = {key: jnp.asarray(value, jnp.bfloat16) if value.dtype == np.float32 else value for key, value in arguments.items()}
        got = tree_attention(**{key: jnp.asarray(value) for key, value in narrow.items()}, implementation=implementation)
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(got, np.float32), by_hand(**arguments), atol=4e-2)


def test_unknown_implementations_are_named():
    with pytest.raises(ValueError, match="unknown tree_attention implementation 'cuda'; there are: reference"):
        tree_attention(**{key: jnp.asarray(value) for key, value in case("plain decode", 0).items()}, implementation="cuda")
