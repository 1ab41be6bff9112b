"""The Hopper kernel of tree attention in Pallas' GPU interpreter, which raises on data races, against plain NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_attention.mosaic import mosaic_attention, unsupported
from tests.pallas_kernels.attention_cases import definition
from tests.sets import exhaustive

# batch, rows, window keys, heads, KV heads, head size, page size, pages per sequence; start and length of each sequence; splits
CASES = {
    "plain decode": ((2, 1, 1, 4, 2, 64, 16, 6), [0, 5], [96, 37], 2),
    "draft level": ((2, 4, 12, 2, 2, 64, 32, 2), [1, 1], [33, 64], 1),
    "verification": ((2, 8, 8, 4, 1, 128, 64, 3), [0, 70], [130, 192], 2),
    "heads that fill a tile partly": ((1, 20, 20, 3, 1, 64, 16, 3), [3], [41], 1),
    "two tiles per head, causal, merged": ((1, 72, 72, 2, 1, 64, 32, 2), [0], [40], 3),
    "large pages": ((1, 2, 2, 2, 1, 64, 128, 2), [0], [150], 2),
    "the ring goes round": ((1, 8, 8, 1, 1, 64, 64, 7), [70], [430], 1),
    "empty prefixes, more splits than blocks": ((2, 8, 8, 2, 1, 64, 16, 2), [0, 9], [0, 9], 3),
    "no pages": ((1, 5, 5, 2, 1, 64, 16, 0), [0], [0], None),
}
IN_DEFAULT_SET = (
    "two tiles per head, causal, merged",
    "the ring goes round",
)


def case(name: str, dtype=jnp.bfloat16) -> dict:
    """Random arrays; slots that no row sees are NaN, and rows see random ancestors and themselves."""
    (b, w, s, heads, kv_heads, d, page, table), start, length, _ = CASES[name]
    rng = np.random.default_rng(len(name))
    pages = rng.normal(size=(2, b * table + 2, page, kv_heads, d))
    page_table = rng.permutation(b * table).reshape(b, table).astype(np.int32)
    hidden = np.ones((b * table + 2, page), bool)
    for row in range(b):
        for slot in range(start[row], length[row]):
            hidden[page_table[row, slot // page], slot % page] = False
    pages[:, hidden] = np.nan
    mask = rng.random((b, w, s)) < 0.5
    if "causal" in name:
        mask[:] = np.tri(w, s, dtype=bool)
    mask[:, np.arange(w), np.arange(s - w, s)] = True
    return {
        "q": jnp.asarray(3 * rng.normal(size=(b, w, heads, d)), dtype),
        "k_pages": jnp.asarray(pages[0], dtype),
        "v_pages": jnp.asarray(pages[1], dtype),
        "page_table": jnp.asarray(page_table),
        "start": jnp.asarray(start, jnp.int32),
        "length": jnp.asarray(length, jnp.int32),
        "k_window": jnp.asarray(rng.normal(size=(b, s, kv_heads, d)), dtype),
        "v_window": jnp.asarray(rng.normal(size=(b, s, kv_heads, d)), dtype),
        "mask": jnp.asarray(mask),
    }


def widened(arguments: dict) -> dict:
    return {key: np.asarray(value, np.float64 if value.dtype.itemsize == 2 else None) for key, value in arguments.items()}


@pytest.mark.parametrize("name", [name if name in IN_DEFAULT_SET else exhaustive(name) for name in CASES])
def test_equals_the_definition(name):
    arguments = case(name)
    got = mosaic_attention(**arguments, splits=CASES[name][3], interpret=True)
    assert got.dtype == jnp.bfloat16 and got.shape == arguments["q"].shape
    np.testing.assert_allclose(np.asarray(got, np.float64), definition(**widened(arguments)), atol=2e-2)


def test_float16():
    arguments = case("draft level", jnp.float16)
    got = mosaic_attention(**arguments, splits=1, interpret=True)
    assert got.dtype == jnp.float16
    np.testing.assert_allclose(np.asarray(got, np.float64), definition(**widened(arguments)), atol=5e-3)


@pytest.mark.parametrize("splits", [1, 2])
def test_a_row_that_sees_nothing_gets_zeros(splits):
    arguments = case("no pages") | {"mask": jnp.zeros((1, 5, 5), bool)}
    assert not np.any(np.asarray(mosaic_attention(**arguments, splits=splits, interpret=True), np.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.zeros((1, 1, 2, 64))}, "q has dtype float32, expected bfloat16 or float16"),
        ({"v_window": jnp.zeros((1, 1, 1, 64))}, "v_window has dtype float32, expected q's, bfloat16"),
        ({"k_window": jnp.zeros((1, 0, 1, 64), jnp.bfloat16)}, "k_window has no keys, expected at least one"),
        ({"k_pages": jnp.zeros((2, 8, 1, 64), jnp.bfloat16)}, "the page size is 8, expected one of (16, 32, 64, 128)"),
        ({"k_pages": jnp.zeros((0, 16, 1, 64), jnp.bfloat16)}, "k_pages has no pages, expected at least one"),
        ({"q": jnp.zeros((1, 1, 2, 80), jnp.bfloat16)}, "head_dim is 80, expected one of (64, 128)"),
        ({"k_pages": jnp.zeros((2, 16, 3, 64), jnp.bfloat16)}, "q has 2 heads, expected a multiple of the 3 KV heads"),
    ],
)
def test_what_it_refuses_it_names(change, message):
    arrays = {
        "q": jnp.zeros((1, 1, 2, 64), jnp.bfloat16),
        "k_pages": jnp.zeros((2, 16, 1, 64), jnp.bfloat16),
        "v_pages": jnp.zeros((2, 16, 1, 64), jnp.bfloat16),
        "k_window": jnp.zeros((1, 1, 1, 64), jnp.bfloat16),
        "v_window": jnp.zeros((1, 1, 1, 64), jnp.bfloat16),
    }
    assert unsupported(**arrays) is None
    assert unsupported(**arrays | change) == message


def test_refusing_is_a_value_error():
    arguments = case("no pages")
    with pytest.raises(ValueError, match="mosaic_attention: q has dtype float32, expected bfloat16 or float16"):
        mosaic_attention(**arguments | {"q": arguments["q"].astype(jnp.float32)})
