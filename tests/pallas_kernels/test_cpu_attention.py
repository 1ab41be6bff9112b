"""Attention on CPUs: a row has the same bits however its keys are divided between cache and window, and whatever runs beside it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu import what_is_missing
from pallas_kernels.tree_attention.cpu import HEAD_DIMS, cpu_attention
from pallas_kernels.tree_attention.reference import reference_attention
from tests.sets import exhaustive

pytestmark = pytest.mark.skipif(what_is_missing() is not None, reason=f"no kernels for CPUs here: {what_is_missing()}")
HEADS, KV_HEADS, PAGE = 6, 2, 4


def random(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def attended(length: int, window: int, head_dim: int, start: int = 0) -> tuple[jax.Array, ...]:
    """The arguments for a text of length + window tokens, the last `window` of them in the window and causal; page 0 holds NaN."""
    tokens, pages = length + window, -(-(length + window) // PAGE)
    q, k, v = (random(seed, 1, 32, heads, head_dim)[:, :tokens] for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    unseen = jnp.full((PAGE * (pages + 1), KV_HEADS, head_dim), jnp.nan)
    cache = [unseen.at[PAGE : PAGE + length].set(each[0, :length]).reshape(-1, PAGE, KV_HEADS, head_dim) for each in (k, v)]
    table, slots = 1 + jnp.arange(pages, dtype=jnp.int32)[None], jnp.array([start, length], jnp.int32)
    mask = jnp.tril(jnp.ones((window, window), bool))[None]
    return q[:, length:], *cache, table, slots[:1], slots[1:], k[:, length:], v[:, length:], mask


@pytest.mark.variants
@pytest.mark.parametrize("head_dim", [64, *map(exhaustive, sorted({*HEAD_DIMS} - {64}))])
@pytest.mark.parametrize("start", [0, 5])
def test_a_row_is_the_same_in_the_cache_in_a_window_and_alone(head_dim, start):
    alone = np.concatenate([cpu_attention(*attended(length, 1, head_dim, start))[0] for length in range(9, 30)])
    for length in (9, 10, 14, 29):
        arguments = attended(length, 30 - length, head_dim, start)
        found = cpu_attention(*arguments)[0]
        np.testing.assert_array_equal(found, alone[length - 9 :][: len(found)])
        np.testing.assert_allclose(found, reference_attention(*arguments)[0], atol=2e-6)


def test_a_node_of_a_tree_is_the_same_as_its_path_alone():
    """Nodes 1 and 2 are children of node 0, and node 3 of node 2: it sees 0, 2 and itself."""
    q, k_pages, v_pages, table, start, length, k, v, _ = attended(12, 4, 64)
    mask = jnp.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)[None]
    whole = cpu_attention(q, k_pages, v_pages, table, start, length, k, v, mask)
    path = jnp.array([0, 2, 3])
    causal = jnp.tril(jnp.ones((3, 3), bool))[None]
    alone = cpu_attention(q[:, path], k_pages, v_pages, table, start, length, k[:, path], v[:, path], causal)
    np.testing.assert_array_equal(whole[:, path], alone)


def test_a_sequence_is_the_same_in_a_batch():
    cases = [attended(length, 2, 32) for length in (3, 20, 11)]
    pages = max(len(case[1]) for case in cases)
    tables, caches, entries = [], ([], []), max(case[3].shape[1] for case in cases)
    for number, (_, *cache, table, _, _, _, _, _) in enumerate(cases):
        for all_of, each in zip(caches, cache, strict=True):
            all_of.append(jnp.pad(each, ((0, pages - len(each)), (0, 0), (0, 0), (0, 0))))
        tables.append(jnp.pad(table, ((0, 0), (0, entries - table.shape[1]))) + pages * number)
    rest = [jnp.concatenate(each) for each in zip(*(case[4:] for case in cases), strict=True)]
    q = jnp.concatenate([case[0] for case in cases])
    found = cpu_attention(q, *map(jnp.concatenate, caches), jnp.concatenate(tables), *rest)
    for row, case in zip(found, cases, strict=True):
        np.testing.assert_array_equal(row, cpu_attention(*case)[0])


def test_large_scores_and_unlikely_keys():
    """Softmax of numbers far apart: nothing overflows, and weights too small for float32 are zero."""
    arguments = list(attended(12, 3, 64))
    arguments[0] = arguments[0] * 300
    np.testing.assert_allclose(cpu_attention(*arguments), reference_attention(*arguments), atol=1e-3)


def test_sizes_are_checked():
    arguments = list(attended(8, 2, 64))
    arguments[6] = arguments[6][:, :1]
    call = jax.ffi.ffi_call("tree_attention_float32", jax.ShapeDtypeStruct(arguments[0].shape, jnp.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="tree_attention: sizes do not fit"):
        jax.block_until_ready(call(*arguments))
