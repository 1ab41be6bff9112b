"""Numbers of 8 bits against the type of ml_dtypes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.fp8 import decode, encode, numbers

BYTES = np.arange(256, dtype=np.uint8)
NUMBERS = BYTES.view(ml_dtypes.float8_e4m3fn)
IS_NUMBER = np.isfinite(NUMBERS.astype(np.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_byte_means_its_number(dtype):
    for run in (decode, jax.jit(decode, static_argnums=1)):
        got = run(jnp.asarray(BYTES), jnp.dtype(dtype))
        assert got.dtype == dtype
        np.testing.assert_array_equal(np.asarray(got, np.float32)[IS_NUMBER], NUMBERS.astype(np.float32)[IS_NUMBER])
    assert IS_NUMBER.sum() == 254
    np.testing.assert_array_equal(encode(decode(jnp.asarray(BYTES), dtype))[IS_NUMBER], BYTES[IS_NUMBER])


@pytest.mark.parametrize("run", [encode, jax.jit(encode)], ids=["eager", "compiled"])
def test_numbers_are_rounded_to_the_nearest_and_halves_to_even(run):
    """Every number of 16 bits, what lies in the middle of two of 8 bits, and what lies just beside the middle."""
    own = np.sort(NUMBERS[IS_NUMBER].astype(np.float32))
    halves = (own[1:] + own[:-1]) / 2
    every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    x = np.concatenate([every[abs(every) <= 448], own, halves, np.nextafter(halves, np.inf), np.nextafter(halves, -np.inf)])
    np.testing.assert_array_equal(run(jnp.asarray(x)), x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def test_what_is_too_large_becomes_the_largest():
    x = jnp.asarray([448.1, 465, 1e9, np.inf, -464.1, -np.inf, np.nan], jnp.float32)
    np.testing.assert_array_equal(encode(x), [0x7E] * 4 + [0xFE] * 2 + [0x7F])
    np.testing.assert_array_equal(decode(encode(x), jnp.float32)[:6], [448] * 4 + [-448] * 2)


def test_other_numbers_pass():
    x = jnp.ones(2, jnp.bfloat16)
    assert numbers(x, jnp.float32) is x and numbers(encode(x), jnp.float32).dtype == jnp.float32
