"""RMS norm against its formula, in every implementation."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rms_norm.api import IMPLEMENTATIONS, rms_norm

RUNNABLE = {name: norm if name == "reference" else partial(norm, interpret=True) for name, norm in IMPLEMENTATIONS.items()}


@pytest.mark.parametrize("implementation", RUNNABLE)
@pytest.mark.parametrize("shape", [(1, 1, 64), (2, 3, 96), (5, 4, 2, 80)])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2e-2)])
def test_equals_the_formula(implementation, shape, dtype, tolerance):
    rng = np.random.default_rng(shape[-1])
    x, weight = (jnp.asarray(3 * rng.normal(size=size), dtype) for size in (shape, shape[-1:]))
    got = RUNNABLE[implementation](x, weight, 1e-3)
    wide, scale = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3) * scale
    assert got.dtype == x.dtype and got.shape == x.shape
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=tolerance, rtol=tolerance)


def test_unknown_implementations_are_named():
    with pytest.raises(ValueError, match="unknown rms_norm implementation 'cuda'"):
        rms_norm(jnp.ones((1, 2)), jnp.ones(2), 1e-5, implementation="cuda")


def test_mixed_dtypes_are_refused():
    with pytest.raises(ValueError, match="x is bfloat16 and weight is float32: they must have the same dtype"):
        rms_norm(jnp.ones((1, 2), jnp.bfloat16), jnp.ones(2), 1e-5)
