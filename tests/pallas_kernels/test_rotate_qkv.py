"""Splitting, norms and rotation against complex numbers, in every implementation."""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.fp8 import Scales
from pallas_kernels.product import Product, partial_sums
from pallas_kernels.rotate_qkv.api import IMPLEMENTATIONS, QkvLayout, rotate_qkv
from pallas_kernels.weight import Dense
from tests.sets import exhaustive

RUNNABLE = {name: partial(turn, interpret=True) if name == "pallas_triton" else turn for name, turn in IMPLEMENTATIONS.items()}
LAYOUTS = [
    QkvLayout(4, 2, 8),
    QkvLayout(3, 1, 10),
    QkvLayout(2, 2, 96),
    QkvLayout(6, 3, 16, norm_eps=1e-3),
    QkvLayout(2, 1, 8, attention_factor=1.5),
]


def by_hand(x: np.ndarray, angle: np.ndarray, weight: np.ndarray | None, eps: float | None) -> np.ndarray:
    """The pair (x[i], x[i + half]) is a complex number; rotating it is multiplying by exp(i * angle)."""
    if weight is not None:
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, :, None]
    return np.concatenate([turned.real, turned.imag], -1)


@pytest.mark.parametrize("implementation", RUNNABLE)
@pytest.mark.parametrize(
    ("layout", "dtype", "tolerance"),
    [
        *((layout, "float32", 1e-5) for layout in LAYOUTS),
        *((exhaustive if layout != LAYOUTS[0] else pytest.param)(layout, "bfloat16", 4e-2) for layout in LAYOUTS),
    ],
    ids=str,
)
def test_equals_complex_multiplication(implementation, layout, dtype, tolerance):
    rng = np.random.default_rng(layout.head_dim)
    heads, kv_heads, head_dim = layout.heads, layout.kv_heads, layout.head_dim
    qkv = jnp.asarray(rng.normal(size=(2, 3, (heads + 2 * kv_heads) * head_dim)), dtype)
    positions, frequencies = rng.integers(0, 100_000, (2, 3)), rng.uniform(0, 1, head_dim // 2).astype(np.float32)
    weights = [None, None] if layout.norm_eps is None else [jnp.asarray(rng.normal(size=head_dim), dtype) for _ in "qk"]
    norms = None if layout.norm_eps is None else tuple(weights)
    got = RUNNABLE[implementation](qkv, jnp.asarray(positions), jnp.asarray(frequencies), norms, layout=layout)

    angle = (positions[..., None].astype(np.float32) * frequencies).astype(np.float64)  # rounded, as the definition says
    split = np.split(np.asarray(qkv, np.float64).reshape(2, 3, -1, head_dim), [heads, heads + kv_heads], 2)
    wide = [None if weight is None else np.asarray(weight, np.float64) for weight in weights]
    for mine, part, weight in zip(got[:2], split[:2], wide, strict=True):
        assert mine.dtype == qkv.dtype
        np.testing.assert_allclose(
            np.asarray(mine, np.float64), layout.attention_factor * by_hand(part, angle, weight, layout.norm_eps), atol=tolerance
        )
    np.testing.assert_array_equal(np.asarray(got[2], np.float64), split[2])  # values pass unchanged


@pytest.mark.parametrize("implementation", RUNNABLE)
def test_a_projection_still_to_be_computed_gives_the_same(implementation):
    """Its four parts and the bias are whole numbers, so every order of additions gives the same."""
    layout, rng = QkvLayout(2, 1, 16), np.random.default_rng(0)
    x, weight, bias = (jnp.asarray(rng.integers(-2, 3, size), jnp.float32) for size in ((2, 3, 1024), (1024, 64), (64,)))
    where = jnp.asarray(rng.integers(0, 50, (2, 3))), jnp.asarray(rng.uniform(size=8), jnp.float32)
    product, rotate = Product(x, Dense(weight), bias), RUNNABLE[implementation]
    assert partial_sums(product)[0].shape[0] == 4
    for mine, expected in zip(
        rotate(product, *where, None, layout=layout), rotate(product.value(), *where, None, layout=layout), strict=True
    ):
        np.testing.assert_array_equal(mine, expected)


@pytest.mark.parametrize("implementation", RUNNABLE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_scales", [False, True])
def test_keys_and_values_of_8_bits_are_the_rounded_ones(implementation, dtype, has_scales):
    layout, rng = QkvLayout(3, 2, 16), np.random.default_rng(1)
    qkv = jnp.asarray(rng.normal(size=(2, 3, 7 * 16)) * np.geomspace(1e-3, 3e3, 3)[:, None], dtype)  # the last beyond 448
    where = jnp.asarray(rng.integers(0, 50, (2, 3))), jnp.asarray(rng.uniform(size=8), jnp.float32)
    scales = Scales(jnp.asarray([0.3, 2.5]), jnp.asarray([1.7, 0.01])) if has_scales else None
    rotate = RUNNABLE[implementation]
    q, *wide = rotate(qkv, *where, None, layout=layout)
    got_q, *got = rotate(qkv, *where, None, scales, layout=replace(layout, fp8=True))
    np.testing.assert_array_equal(got_q, q)
    for mine, part, scale in zip(got, wide, scales or (np.ones(2),) * 2, strict=True):
        nearest = np.clip(np.asarray(part, np.float32) / np.asarray(scale, np.float32)[:, None], -448, 448)
        assert mine.dtype == np.uint8 and abs(nearest).max() == 448
        np.testing.assert_array_equal(mine, nearest.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def test_unknown_implementations_are_named():
    where = jnp.ones((1, 1), jnp.int32), jnp.ones(1)
    with pytest.raises(ValueError, match="unknown rotate_qkv implementation 'cuda'"):
        rotate_qkv(jnp.ones((1, 1, 6)), *where, None, QkvLayout(1, 1, 2), implementation="cuda")


def test_norms_belong_to_their_layout():
    where, norms = (jnp.ones((1, 1), jnp.int32), jnp.ones(1)), (jnp.ones(2), jnp.ones(2))
    with pytest.raises(ValueError, match=r"norms are missing, but layout.norm_eps is 1e-05"):
        rotate_qkv(jnp.ones((1, 1, 6)), *where, None, QkvLayout(1, 1, 2, 1e-5))
    with pytest.raises(ValueError, match=r"norms were given, but layout.norm_eps is None"):
        rotate_qkv(jnp.ones((1, 1, 6)), *where, norms, QkvLayout(1, 1, 2))
    with pytest.raises(ValueError, match="qkv is bfloat16 and the norms are float32, float32: they must have the same dtype"):
        rotate_qkv(jnp.ones((1, 1, 6), jnp.bfloat16), *where, norms, QkvLayout(1, 1, 2, 1e-5))
