"""Transposing and memory that JAX takes over."""

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxspec.checkpoints.tensor_files import STRIPE, transposed
from jaxspec.host_memory import ALIGNMENT, aligned_empty, own_copy

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [[1], [33], [5, 40, 7], [STRIPE + 3], [2 * STRIPE + 1, 3, STRIPE]])
def test_transposed_stacks_and_transposes(dtype, rows):
    generator = np.random.default_rng(0)
    parts = [generator.integers(0, 100, (count, 300)).astype(dtype) for count in rows]
    out = transposed(*parts)
    np.testing.assert_array_equal(out, np.concatenate(parts).T)
    assert out.flags.c_contiguous and out.dtype == dtype


def test_transposed_takes_views():
    matrix = np.arange(600, dtype=np.float32).reshape(20, 30)
    np.testing.assert_array_equal(transposed(matrix[:, 7:19]), matrix[:, 7:19].T)
    np.testing.assert_array_equal(transposed(transposed(matrix)), matrix)


def test_jax_takes_aligned_memory_over(monkeypatch):
    array = aligned_empty((1000, 30), np.dtype(np.float32))
    array[:] = 1
    assert array.ctypes.data % ALIGNMENT == 0 and own_copy(array) is array
    assert jax.device_put(array, jax.devices("cpu")[0]).unsafe_buffer_pointer() == array.ctypes.data


def test_views_of_files_are_copied(tmp_path):
    (tmp_path / "values").write_bytes(np.arange(64, dtype=np.float32).tobytes())
    copy = own_copy(np.memmap(tmp_path / "values", np.float32, "r"))
    (tmp_path / "values").write_bytes(bytes(256))
    np.testing.assert_array_equal(copy, np.arange(64))
    unaligned = aligned_empty((65,), np.dtype(np.float32))[1:]
    unaligned[:] = 2
    assert own_copy(unaligned).ctypes.data % ALIGNMENT == 0 and (own_copy(unaligned) == 2).all()
