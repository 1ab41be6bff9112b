"""The Hopper kernel of tree attention in Pallas' GPU interpreter, which raises on data races, against plain NumPy."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_attention.mosaic import mosaic_attention, unsupported
from tests.pallas_kernels.attention_cases import Case, arrays, definition
from tests.sets import exhaustive

CASES = {
    "plain decode": (Case("itself", 2, 1, 1, 4, 2, 64, 16, 6), [0, 5], [96, 37], 2),
    "draft level": (Case("level", 2, 4, 12, 2, 2, 64, 32, 2), [1, 1], [33, 64], 1),
    "verification": (Case("random", 2, 8, 8, 4, 1, 128, 64, 3), [0, 70], [130, 192], 2),
    "heads that fill a tile partly": (Case("random", 1, 20, 20, 3, 1, 64, 16, 3), [3], [41], 1),
    "two tiles per head, causal, merged": (Case("causal", 1, 72, 72, 2, 1, 64, 32, 2), [0], [40], 3),
    "large pages": (Case("random", 1, 2, 2, 2, 1, 64, 128, 2), [0], [150], 2),
    "the ring goes round": (Case("random", 1, 8, 8, 1, 1, 64, 64, 7), [70], [430], 1),
    "empty prefixes, more splits than blocks": (Case("random", 2, 8, 8, 2, 1, 64, 16, 2), [0, 9], [0, 9], 3),
    "no pages": (Case("random", 1, 5, 5, 2, 1, 64, 16, 0), [0], [0], None),
}
"""With start and length of each sequence, and splits."""
IN_DEFAULT_SET = ("two tiles per head, causal, merged", "the ring goes round")


def arguments_of(name: str, dtype: str = "bfloat16") -> dict[str, Any]:
    """With logits that are far apart."""
    case, *seen, _ = CASES[name]
    made = arrays(replace(case, dtype=dtype), len(name), seen)
    return {key: jnp.asarray(value) for key, value in (made | {"q": 3 * made["q"]}).items()}


def check(name: str, dtype: str, tolerance: float) -> None:
    arguments = arguments_of(name, dtype)
    got = mosaic_attention(**arguments, splits=CASES[name][3], interpret=True)
    assert got.dtype == dtype and got.shape == arguments["q"].shape
    expected = definition(**jax.tree.map(np.asarray, arguments))
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=tolerance)


@pytest.mark.parametrize("name", [name if name in IN_DEFAULT_SET else exhaustive(name) for name in CASES])
def test_equals_the_definition(name):
    check(name, "bfloat16", 2e-2)


def test_float16():
    check("draft level", "float16", 5e-3)


@pytest.mark.parametrize("splits", [1, 2])
def test_a_row_that_sees_nothing_gets_zeros(splits):
    arguments = arguments_of("no pages") | {"mask": jnp.zeros((1, 5, 5), bool)}
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
    arguments = arguments_of("no pages")
    with pytest.raises(ValueError, match="mosaic_attention: q has dtype float32, expected bfloat16 or float16"):
        mosaic_attention(**arguments | {"q": arguments["q"].astype(jnp.float32)})
