"""Stored parameters keep every bit, are mapped and not copied, need two shards of memory to write, and name what is wrong."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import deserialize

from jaxspec.checkpoints.parameter_store import load_parameters, mapped_parameters, parameter_name
from jaxspec.checkpoints.writing import write_tensors

KERNEL = "layers.1.self_attn.qkv_proj.kernel"


def all_bits(dtype, *shape: int) -> np.ndarray:
    """Values with random bits: numbers, infinities, subnormal ones and NaNs with any payload."""
    dtype = jnp.dtype(dtype)
    count = int(np.prod(shape)) * dtype.itemsize
    return np.random.default_rng(count).integers(0, 256, count, np.uint8).view(dtype).reshape(shape)


def layer(index: int) -> dict:
    attention = {"qkv_proj": {"kernel": all_bits(jnp.bfloat16, 64, 96 + index), "bias": all_bits(jnp.float16, 96)}}
    return {"layers": {index: {"self_attn": attention, "norm": {"weight": jnp.asarray(all_bits(jnp.float32, 64))}}}}


GROUPS = [
    {"embed_tokens": all_bits(jnp.bfloat16, 64, 512).T, "draft_to_target": jnp.arange(100, dtype=jnp.int32)},  # .T: no copy is made
    layer(0),
    layer(1),
    {"odd": all_bits(jnp.uint16, 3), "odd_bytes": all_bits(jnp.int8, 3), "scale": np.float32(0.1)},
    {"fp8": all_bits(jnp.float8_e4m3fn, 64, 3), "state": {"0": np.arange(5, dtype=np.int32)}},
]
PARAMETERS = {path: np.asarray(array) for group in GROUPS for path, array in flatten_dict(group).items()}


def expected(dtype=None) -> dict:
    """What to load; floating-point parameters in another dtype if it is given."""

    def leaf(array):
        cast = dtype is not None and jnp.issubdtype(array.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(array.shape, dtype if cast else array.dtype)

    return unflatten_dict({path: leaf(array) for path, array in PARAMETERS.items()})


def changed(path: tuple, leaf: jax.ShapeDtypeStruct | None) -> dict:
    """The expected parameters with one more, another, or one less (None)."""
    leaves = {**flatten_dict(expected()), path: leaf}
    return unflatten_dict({path: leaf for path, leaf in leaves.items() if leaf is not None})


def bits(array) -> bytes:
    return np.asarray(array).tobytes()


def write(directory: Path, shard_bytes: float = 2**30) -> Path:
    directory.mkdir()
    write_tensors(directory, ((parameter_name(path), array) for path, array in PARAMETERS.items()), shard_bytes)
    return directory


@pytest.fixture(scope="module", params=[2**30, 20_000], ids=["one file", "shards"])
def shared(request, tmp_path_factory) -> Path:
    """Parameters that no test changes."""
    return write(tmp_path_factory.mktemp("store") / "parameters", request.param)


def test_round_trip_keeps_every_bit_and_integer_keys(shared):
    loaded = flatten_dict(load_parameters(shared, expected()))
    assert {path: (array.dtype, array.shape, bits(array)) for path, array in loaded.items()} == {
        path: (array.dtype, array.shape, bits(array)) for path, array in PARAMETERS.items()
    }
    assert all(isinstance(array, jax.Array) for array in loaded.values())


def test_the_library_reads_the_same(shared):
    read = {name: each for file in shared.glob("*.safetensors") for name, each in deserialize(file.read_bytes())}
    assert {name: (tuple(each["shape"]), bytes(each["data"])) for name, each in read.items()} == {
        parameter_name(path): (array.shape, bits(array)) for path, array in PARAMETERS.items()
    }


def test_an_array_on_a_cpu_is_the_mapped_file(shared):
    """But for sizes that are no multiples of what JAX asks for."""
    views = {keys: array.ctypes.data for keys, array in mapped_parameters(shared, expected())}
    small = {("odd",), ("odd_bytes",), ("scale",), ("state", "0"), ("draft_to_target",)}
    assert {keys for keys, place in views.items() if place % 64} <= small
    assert all(place % PARAMETERS[keys].itemsize == 0 for keys, place in views.items())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_values_are_cast_when_they_are_restored(shared, dtype):
    loaded = flatten_dict(load_parameters(shared, expected(dtype)))
    for path, array in PARAMETERS.items():
        floating = jnp.issubdtype(array.dtype, jnp.floating)
        with np.errstate(all="ignore"):  # of the random bits, some are too large for float16, some are NaN
            cast = array.astype(dtype) if floating else array
            np.testing.assert_array_equal(np.asarray(loaded[path]).astype(np.float32), cast.astype(np.float32))
        assert loaded[path].dtype == cast.dtype


@pytest.mark.parametrize(
    ("path", "leaf", "message"),
    [
        (("layers", 2, "bias"), jax.ShapeDtypeStruct((96,), jnp.float32), "misses 1 parameters: layers.2.bias$"),
        (("layers", 0, "norm", "weight"), None, "1 unknown parameters: layers.0.norm.weight$"),
        (
            ("layers", 1, "self_attn", "qkv_proj", "kernel"),
            jax.ShapeDtypeStruct((97, 64), jnp.bfloat16),
            rf"'{KERNEL}' has shape \(64, 97\); expected \(97, 64\)",
        ),
        (("draft_to_target",), jax.ShapeDtypeStruct((100,), jnp.float32), "'draft_to_target' has dtype int32; expected float32"),
    ],
)
def test_what_does_not_fit_is_named(shared, path, leaf, message):
    with pytest.raises(ValueError, match=message):
        load_parameters(shared, changed(path, leaf))


@pytest.mark.parametrize(
    ("size", "message"),
    [(None, "names model-00002-of-0000.*, which is missing"), (0, "can't be read"), (100, "can't be read"), (-1, "can't be read")],
    ids=["missing", "empty", "header cut", "truncated"],
)
def test_a_damaged_file_is_named(tmp_path, size, message):
    path = write(tmp_path / "parameters", 20_000) / "model-00002-of-00003.safetensors"
    data = path.read_bytes()
    path.unlink()
    if size is not None:
        path.write_bytes(data[:size])
    with pytest.raises(ValueError, match=message):
        load_parameters(tmp_path / "parameters", expected())


@pytest.mark.parametrize("place", [".", "absent"])
def test_a_directory_without_parameters_is_named(tmp_path, place):
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_parameters(tmp_path / place, expected())


MEMORY = """
import sys
from pathlib import Path
import jax
import jax.numpy as jnp
import numpy as np
from jaxspec.checkpoints import writing
from jaxspec.checkpoints.parameter_store import load_parameters

def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field + ":"))

GROUPS, SHAPE = 10, (2, 10 * 2**20)
SIZE = 2 * SHAPE[0] * SHAPE[1]  # 40 MiB: the C library gives blocks of up to 32 MiB back late
directory = Path(sys.argv[1])

def write(name, arrays, shard_bytes):
    (directory / name).mkdir()
    writing.write_tensors(directory / name, arrays, shard_bytes)

write("first", [("weight", np.ones(16, np.float32))], 100)  # imports and threads are not what is measured
load_parameters(directory / "first", {"weight": jax.ShapeDtypeStruct((16,), np.float32)})
before = memory("VmRSS")
write("parameters", ((f"layers.{index}.kernel", np.full(SHAPE, index, jnp.bfloat16)) for index in range(GROUPS)), SIZE)
print((memory("VmHWM") - before) / SIZE)
leaf = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)
before = memory("RssAnon")
loaded = load_parameters(directory / "parameters", {"layers": {index: {"kernel": leaf} for index in range(GROUPS)}})
print((memory("RssAnon") - before) / SIZE / GROUPS)
assert [float(loaded["layers"][index]["kernel"][1, -1]) for index in range(GROUPS)] == list(range(GROUPS))
"""


@pytest.mark.variants
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_few_shards_are_in_memory_when_writing_and_none_when_loading(tmp_path):
    command = [sys.executable, "-W", "error", "-c", MEMORY, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    shards, models = map(float, done.stdout.split())
    print(shards, models)
    assert 1 <= shards < 3.5 and models < 0.25  # the model stays in its files


def test_the_progress_bar_counts_bytes(shared, capsys):
    list(mapped_parameters(shared, expected(), progress=True))
    total = sum(array.nbytes for array in PARAMETERS.values())
    shown = capsys.readouterr().err
    assert "100%" in shown and f"{total / 1000:.1f}k/{total / 1000:.1f}k" in shown
