"""row_matmul: a row's product has the same bits however many rows run, in every storage, and blocks give those of their numbers."""

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import row_matmul as package
from pallas_kernels.cpu import library
from pallas_kernels.row_matmul import FORMATS, row_matmul, unpacked, what_is_missing
from pallas_kernels.rows import AsInFile, Beside, Blocks, ByRows, Rows
from pallas_kernels.weight import Dense, Weight
from tests.sets import exhaustive

FOLDER = Path(package.__file__).parents[1]
SOURCES = sorted(FOLDER.rglob("*.cc"))
needs_kernels = pytest.mark.skipif(what_is_missing() is not None, reason=f"no kernels for CPUs here: {what_is_missing()}")
SIZES = [(1, 16), (5, 40), *(exhaustive(*size) for size in ((37, 256), (576, 576), (33, 1000), (2, 1)))]
"""n and k."""


def random(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def random_blocks(format: str, n: int, blocks: int) -> jax.Array:
    """Blocks with random bytes, but finite scales."""
    rng, size = np.random.default_rng(7), FORMATS[format].size
    found = rng.integers(0, 256, (n, blocks, size), np.uint8)
    scales = rng.uniform(-1, 1, (n, blocks, 2)).astype(np.float16).view(np.uint8)
    if format == "fp8_32":
        found[..., 4:] &= 191  # no NaN
        found[..., :4] = rng.uniform(-1, 1, (n, blocks, 1)).astype(np.float32).view(np.uint8)
    elif format == "int4_32":
        pairs = np.stack([scales.view(np.float16)[..., 0], rng.integers(0, 16, (n, blocks))], -1)
        found[..., :4] = pairs.astype(np.float16).view(np.uint8)
    elif format == "q6_k":
        found[..., -2:] = scales[..., :2]
    else:
        found[..., : 2 + 2 * (format in ("q4_1", "q4_k"))] = scales[..., : 2 + 2 * (format in ("q4_1", "q4_k"))]
    return jnp.asarray(found.reshape(n, -1))


@needs_kernels
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_row_has_the_same_bits_however_many_rows_run(n, k, dtype):
    x, weights = random(0, 70, k), jnp.asarray(random(1, n, k), dtype)
    whole = np.asarray(row_matmul(x, weights))
    for rows in (*range(1, 17), 33):
        np.testing.assert_array_equal(row_matmul(x[:rows], weights), whole[:rows])
    exact = np.asarray(x, np.float64) @ np.asarray(weights, np.float64).T
    np.testing.assert_allclose(whole, exact, atol=1e-6 * np.max(np.abs(x) @ np.abs(np.asarray(weights, np.float32)).T))
    np.testing.assert_array_equal(row_matmul(x, weights.astype(jnp.float32)), whole)  # fewer bits in memory, not in sums


@needs_kernels
@pytest.mark.parametrize("format", [None, "q4_1"])
@pytest.mark.parametrize("zeros", [[0], [5, 6], [1, 4], [*range(7)]])
def test_rows_of_zeros_are_not_computed(zeros, format):
    """Their products would be NaN: a weight is infinite. The others have the same bits."""
    weights = random(1, 9, 64).at[4, 7].set(jnp.inf) if format is None else random_blocks(format, 9, 2)
    x = random(0, 7, 64)
    found, whole = (np.array(row_matmul(each, weights, format=format)) for each in (x.at[jnp.array(zeros)].set(0), x))
    whole[zeros] = 0
    np.testing.assert_array_equal(found, whole)


@needs_kernels
@pytest.mark.parametrize("rows", [1, 4, 5, 17])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_eight_bits_are_their_numbers_times_the_rows_scale(dtype, rows):
    x, scales = random(0, rows, 48), random(2, 9)
    numbers = jnp.arange(9 * 48, dtype=jnp.uint32).astype(jnp.uint8).reshape(9, 48)  # every bit pattern
    numbers = jax.lax.bitcast_convert_type(numbers, dtype)
    weights = jnp.where(jnp.isfinite(numbers.astype(jnp.float32)), numbers, 0).astype(dtype)
    found = np.asarray(row_matmul(x, weights, scales))
    expected = np.asarray(row_matmul(x, weights.astype(jnp.float32))) * scales
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(found, row_matmul(x, weights, scales, implementation="reference"), rtol=1e-4, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize("format", FORMATS)
def test_blocks_have_the_bits_of_their_numbers(format):
    blocks = random_blocks(format, 11, 3)
    numbers = unpacked(blocks, format)
    x = random(3, 20, numbers.shape[1])
    for rows in (1, 2, 3, 4, 5, 16, 20):
        np.testing.assert_array_equal(row_matmul(x[:rows], blocks, format=format), row_matmul(x[:rows], numbers))


@pytest.mark.parametrize("format", [each for each in FORMATS if each not in ("fp8_32", "int4_32")])
def test_blocks_are_the_numbers_that_the_library_makes_of_them(format):
    gguf = pytest.importorskip("gguf")
    blocks = random_blocks(format, 6, 2)
    expected = gguf.dequantize(np.asarray(blocks), gguf.GGMLQuantizationType[format.upper()])
    np.testing.assert_array_equal(unpacked(blocks, format), expected.reshape(6, -1))


@needs_kernels
def test_many_threads_at_once():
    x, weights = random(0, 4, 512), random(1, 2048, 512)
    expected = np.asarray(row_matmul(x, weights))
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: np.asarray(row_matmul(x, weights)), range(64)):
            np.testing.assert_array_equal(found, expected)


@needs_kernels
@pytest.mark.parametrize(
    ("name", "x", "weights", "scales"),
    [
        ("float32", (2, 16), ((3, 15), "float32"), None),
        ("q4_1", (2, 64), ((3, 20), "uint8"), None),
        ("q8_0", (2, 30), ((3, 34), "uint8"), None),
        ("int8", (2, 16), ((3, 16), "int8"), (2,)),
        ("bfloat16", (2, 16), ((3, 16), "float32"), None),
    ],
)
def test_the_library_checks_what_it_is_called_with(name, x, weights, scales):
    arguments = [jnp.zeros(x), jnp.zeros(*weights), *([] if scales is None else [jnp.zeros(scales)])]
    with pytest.raises(jax.errors.JaxRuntimeError, match="row_matmul: "):
        call = jax.ffi.ffi_call(f"row_matmul_{name}", jax.ShapeDtypeStruct((2, 3), jnp.float32))
        jax.block_until_ready(call(*arguments))


@pytest.mark.parametrize(("dtype", "scales"), [("int32", None), ("int8", None), ("float32", 3)])
def test_other_weights_are_refused(dtype, scales):
    with pytest.raises(ValueError, match=f"row_matmul has no kernel for {dtype} weights with"):
        row_matmul(jnp.zeros((2, 8)), jnp.zeros((3, 8), dtype), None if scales is None else jnp.zeros(scales))


def weights_of(matrix: jax.Array) -> dict[str, Weight]:
    """The matrix [k, n] in several storages, in fewer bits where they are exact."""
    rows = matrix.T
    blocks = AsInFile(((2, "q8_0"), (3, "float32")))
    kept = Blocks(random_blocks("q8_0", 2, 2), "q8_0")
    return {
        "rows": ByRows()(matrix),
        "16 bits": ByRows("bfloat16")(matrix),
        "blocks": kept,
        "beside": blocks.of([kept.blocks, rows[:3]]),
    }


@pytest.mark.parametrize("matmul", ["auto", "xla"])
@pytest.mark.parametrize("name", ["rows", "16 bits", "blocks", "beside"])
def test_a_weight_does_what_its_matrix_does(name, matmul):
    weight = weights_of(random(1, 64, 5))[name]
    same, x, ids = Dense(weight.dense(jnp.float32)), random(0, 2, 3, 64), jnp.array([1, 0, 1])
    assert weight.shape == same.shape == same.kernel.shape
    np.testing.assert_allclose(weight.dot(x, matmul=matmul), same.dot(x), atol=1e-3)
    assert weight.dot(x.astype(jnp.bfloat16), matmul=matmul).dtype == jnp.bfloat16
    assert weight.dot(x.astype(jnp.bfloat16), jnp.float32, matmul).dtype == jnp.float32
    np.testing.assert_array_equal(weight.columns(ids).dense(jnp.float32), same.kernel[:, ids])
    np.testing.assert_array_equal(weight.lookup(ids[None], jnp.float32), same.kernel[:, ids].T[None])


def test_a_files_tensors_become_one_weight():
    zeros = AsInFile(((2, "q8_0"), (3, "float32")))(jnp.zeros((64, 5)))
    made = weights_of(random(1, 64, 5))["beside"]
    assert isinstance(made, Beside) and isinstance(AsInFile(((5, "bfloat16"),))(jnp.zeros((8, 5))), Rows)
    assert jax.tree.structure(zeros) == jax.tree.structure(made)
    assert [(a.shape, a.dtype) for a in jax.tree.leaves(zeros)] == [(a.shape, a.dtype) for a in jax.tree.leaves(made)]


def test_what_is_missing_is_said(monkeypatch, tmp_path):
    """Without the library everything is XLA's, and one line says how to get it."""
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    missing = library.what_is_missing.__wrapped__
    assert "install a C++ compiler" in missing()
    (tmp_path / "kernels.abi3.so").write_bytes(b"no library")
    assert missing().startswith("the library can't be loaded")


def built(folder: Path, *options: str) -> Path:
    """The library, compiled with these options."""
    compiler = shutil.which("g++") or shutil.which("clang++") or pytest.skip("no C++ compiler here")
    command = [compiler, "-std=c++20", "-O3", "-ffp-contract=fast", "-shared", "-fPIC", "-Wno-psabi", *options]
    subprocess.run([*command, *map(str, SOURCES), "-o", str(folder / "kernels.so")], check=True)
    return folder / "kernels.so"


PRODUCTS = """
import hashlib, sys
from pathlib import Path
import jax.numpy as jnp
from pallas_kernels.cpu import library
library.__file__ = str(Path(sys.argv[1]) / "library.py")
assert library.what_is_missing() is None, library.what_is_missing()
from tests.pallas_kernels.test_row_matmul import FORMATS, random, random_blocks, row_matmul
digest = hashlib.sha256()
for rows in (1, 2, 3, 4, 5, 13):
    for n, k in ((1, 16), (7, 40), (130, 512)):
        for dtype in ("float32", "bfloat16", "float16"):
            digest.update(bytes(row_matmul(random(0, rows, k), jnp.asarray(random(1, n, k), dtype))))
        digest.update(bytes(row_matmul(random(0, rows, k), (random(1, n, k) * 50).astype("int8"), random(2, n))))
    for format, (weights, _) in FORMATS.items():
        digest.update(bytes(row_matmul(random(0, rows, 2 * weights), random_blocks(format, 9, 2), format=format)))
print(digest.hexdigest())
"""


@needs_kernels
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["without AVX-512", "address sanitizer"])
def test_another_build_runs_without_errors_and_gives_the_same_bits(tmp_path, kind):
    """For other CPUs; and under the address sanitizer, which ends the process at a read or write outside of an array."""
    flags = {"without AVX-512": ["-DWITHOUT_AVX512"], "address sanitizer": ["-fsanitize=address", "-g"]}[kind]
    (tmp_path / "usual").mkdir()
    (tmp_path / "other").mkdir()
    built(tmp_path / "usual")
    built(tmp_path / "other", *flags)
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0", "JAX_PLATFORMS": "cpu"}
    digests = []
    for folder in ("usual", "other"):
        if folder == "other" and kind == "address sanitizer":
            libraries = ("libasan.so", "libstdc++.so.6")  # the second too, or the first does not find what it stands in for
            command = [["g++", f"-print-file-name={name}"] for name in libraries]
            found = [subprocess.run(each, capture_output=True, text=True, check=True).stdout.strip() for each in command]
            environment["LD_PRELOAD"] = " ".join(found)
        command = [sys.executable, "-c", PRODUCTS, str(tmp_path / folder)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        digests.append(done.stdout)
    if kind == "without AVX-512":  # what the sanitizer adds keeps the compiler from fusing all products and sums
        assert digests[0] == digests[1]


@needs_kernels
@pytest.mark.exhaustive
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_a_product_takes_no_more_than_twice_the_cpu_time_of_xlas(rows):
    """Compilers can turn vectors that are wider than registers into code that is ten times as slow; bits don't show it."""
    x, weights = random(0, rows, 2048), random(1, 4096, 2048)

    def xla(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, weights, (((1,), (1,)), ((), ())))

    seconds = {}
    for name, product in {"kernel": jax.jit(row_matmul), "xla": jax.jit(xla)}.items():
        taken = []
        for _ in range(8):
            began = time.process_time()
            jax.block_until_ready(product(x, weights))
            taken.append(time.process_time() - began)
        seconds[name] = min(taken)
    assert seconds["kernel"] < 2 * seconds["xla"], seconds
