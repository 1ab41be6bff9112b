"""The parameter store keeps every bit, needs one group of memory, leaves nothing half-written, and names what is wrong."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from orbax.checkpoint import v1 as orbax

from jaxspec.checkpoints.parameter_store import ParameterWriter, load_parameters, mapped_parameters, stored_parameters
from tests.sets import variants

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
    {"scale": np.float32(0.1)},
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


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """Parameters that no test changes."""
    directory = tmp_path_factory.mktemp("store") / "parameters"
    with ParameterWriter(directory) as writer:
        for group in GROUPS:
            writer.add(group)
    return directory


@pytest.fixture
def store(tmp_path) -> Path:
    """One parameter to damage."""
    with ParameterWriter(tmp_path / "parameters") as writer:
        writer.add({"layers": {1: {"kernel": all_bits(jnp.bfloat16, 64, 64)}}})
    return tmp_path / "parameters"


def load_store(store: Path) -> dict:
    return load_parameters(store, {"layers": {1: {"kernel": jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)}}})


def run(script: str, *arguments: object, flags: str = "") -> subprocess.Popen:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-W", "error", "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_round_trip_keeps_every_bit_and_integer_keys(shared):
    loaded = flatten_dict(load_parameters(shared, expected()))
    assert {path: (array.dtype, array.shape, bits(array)) for path, array in loaded.items()} == {
        path: (array.dtype, array.shape, bits(array)) for path, array in PARAMETERS.items()
    }
    assert all(isinstance(array, jax.Array) for array in loaded.values())


def test_orbax_restores_the_same(shared):
    restored = flatten_dict(orbax.load(shared))
    assert {path: bits(array) for path, array in restored.items()} == {
        tuple(map(str, path)): bits(array) for path, array in PARAMETERS.items()
    }


def test_stored_parameters_are_listed(shared):
    found = {name: (leaf.info.shape, leaf.info.dtype) for name, leaf in stored_parameters(shared).items()}
    assert found == {".".join(map(str, path)): (array.shape, array.dtype) for path, array in PARAMETERS.items()}
    assert found[KERNEL] == ((64, 97), jnp.bfloat16)


def test_every_parameter_is_one_file_of_plain_values(shared):
    for path, array in PARAMETERS.items():
        files = [file for file in (shared / "state" / ".".join(map(str, path))).rglob("*") if file.is_file()]
        (file,) = (file for file in files if file.name != "zarr.json")
        assert file.read_bytes()[: array.nbytes] == bits(array)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_values_are_cast_when_they_are_restored(shared, dtype):
    loaded = flatten_dict(load_parameters(shared, expected(dtype)))
    for path, array in PARAMETERS.items():
        floating = jnp.issubdtype(array.dtype, jnp.floating)
        with np.errstate(all="ignore"):  # of the random bits, some are too large for float16, some are NaN
            cast = array.astype(dtype) if floating else array
            np.testing.assert_array_equal(np.asarray(loaded[path]).astype(np.float32), cast.astype(np.float32))
        assert loaded[path].dtype == cast.dtype


SHARDED = """
import sys
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxspec.checkpoints.parameter_store import ParameterWriter, load_parameters

values = np.arange(96.0, dtype=np.float32).reshape(8, 12)
column = jax.device_put(values, NamedSharding(jax.make_mesh((4,), ("model",)), PartitionSpec(None, "model")))
with ParameterWriter(sys.argv[1]) as writer:
    writer.add({"column": column})
loaded = load_parameters(sys.argv[1], {"column": column})["column"]
np.testing.assert_array_equal(loaded, values)
print(len(column.addressable_shards), len(loaded.addressable_shards))
"""


def test_an_array_on_several_devices_is_written_whole(tmp_path):
    process = run(SHARDED, tmp_path / "parameters", flags="--xla_force_host_platform_device_count=4")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out == "4 1\n"


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
        (
            ("draft_to_target",),
            jax.ShapeDtypeStruct((100,), jnp.float32),
            "'draft_to_target' has dtype int32; expected float32",
        ),
    ],
)
def test_what_does_not_fit_is_named(shared, path, leaf, message):
    with pytest.raises(ValueError, match=message):
        load_parameters(shared, changed(path, leaf))


def damage(path: Path, size: int | None) -> None:
    """Removes the file (None) or keeps its first bytes only, for a negative size all but the last ones."""
    data = path.read_bytes()
    path.unlink()
    if size is not None:
        path.write_bytes(data[:size])


@pytest.mark.parametrize("size", [None, 0, -1], ids=["missing", "empty", "truncated"])
@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("c/0/0", r"layers\.1\.kernel.* has \d+ bytes; expected 8212: the file is damaged"),
        ("zarr.json", r"layers\.1\.kernel(/zarr\.json is not valid JSON| is damaged: its zarr\.json)"),
    ],
)
def test_the_parameter_of_a_damaged_file_is_named(store, file, size, message):
    damage(store / "state/layers.1.kernel" / file, size)
    with pytest.raises(ValueError, match=message):
        load_store(store)


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("codecs", [{"name": "zstd"}]),
        ("chunk_grid", {"name": "regular", "configuration": {"chunk_shape": [8, 64]}}),
        ("shape", [64, 32]),
    ],
)
def test_other_zarr_arrays_are_refused(store, change, value):
    """Chunked or compressed ones, as orbax writes by default, are no single file of plain values."""
    path = store / "state/layers.1.kernel/zarr.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {change: value}))
    with pytest.raises(ValueError, match="describes no single file of plain values"):
        load_store(store)


def test_a_directory_that_no_writer_finished_is_no_checkpoint(store, tmp_path):
    (store / "commit_success.txt").unlink()
    for directory in (store, tmp_path, tmp_path / "absent"):
        with pytest.raises(ValueError, match="holds no readable parameters"):
            load_store(directory)


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="half way"), ParameterWriter(tmp_path / "parameters") as writer:
        writer.add(layer(0))
        assert not (tmp_path / "parameters").exists()
        raise RuntimeError("half way")
    assert not list(tmp_path.iterdir())


KILLED = """
import sys, time
import numpy as np
from jaxspec.checkpoints.parameter_store import ParameterWriter

with ParameterWriter(sys.argv[1]) as writer:
    writer.add({"first": np.ones(1000)})
    writer.add({"second": np.ones(1000)})
    print("two groups", flush=True)
    time.sleep(60)
"""


def test_a_writer_that_is_killed_leaves_nothing_that_loads_and_does_not_disturb_the_next(tmp_path):
    directory = tmp_path / "parameters"
    process = run(KILLED, directory)
    assert process.stdout.readline() == "two groups\n", process.communicate()
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert [path.name for path in tmp_path.iterdir()] == ["parameters.unfinished"]
    for path in (directory, tmp_path / "parameters.unfinished", *(tmp_path / "parameters.unfinished").iterdir()):
        with pytest.raises(ValueError, match="holds no readable parameters"):
            stored_parameters(path)
    with ParameterWriter(directory) as writer:
        writer.add({"third": np.ones(10, np.float32)})
    assert list(stored_parameters(directory)) == ["third"]
    assert [path.name for path in tmp_path.iterdir()] == ["parameters"]


def test_a_writer_refuses_what_it_could_not_give_back(tmp_path, store):
    with pytest.raises(FileExistsError), ParameterWriter(store):
        pass
    with pytest.raises(ValueError, match="no parameters were added"), ParameterWriter(tmp_path / "none"):
        pass
    one = np.ones(1, np.float32)
    for groups, message in (
        ([{"layers": {0: one}}, {"layers": {0: one}}], "'layers.0' was added twice"),
        ([{"layers": {0: one, "0": one}}], "'layers.0' was added twice"),
        ([{"a.b": one}], "can't be stored"),
        ([{"a": {"../b": one}}], "can't be stored"),
        ([{"": one}], "can't be stored"),
    ):
        with pytest.raises(ValueError, match=message), ParameterWriter(tmp_path / "refused") as writer:
            for group in groups:
                writer.add(group)
    assert [path.name for path in tmp_path.iterdir()] == ["parameters"]


MEMORY = """
import sys
from pathlib import Path
import jax
import jax.numpy as jnp
import numpy as np
from jaxspec.checkpoints.parameter_store import ParameterWriter, load_parameters

def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field + ":"))

GROUPS, SHAPE = 10, (2, 10 * 2**20)
SIZE = 2 * SHAPE[0] * SHAPE[1]  # 40 MiB: the C library gives blocks of up to 32 MiB back late
directory = Path(sys.argv[1])
with ParameterWriter(directory / "first") as writer:  # imports and threads are not what is measured
    writer.add({"weight": np.ones(10, np.float32)})
load_parameters(directory / "first", {"weight": jax.ShapeDtypeStruct((10,), np.float32)})
before = memory("VmRSS")
with ParameterWriter(directory / "parameters") as writer:
    for index in range(GROUPS):
        writer.add({"layers": {index: {"kernel": np.full(SHAPE, index, jnp.bfloat16)}}})
print((memory("VmHWM") - before) / SIZE)
leaf = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)
before = memory("VmRSS")
loaded = load_parameters(directory / "parameters", {"layers": {index: {"kernel": leaf} for index in range(GROUPS)}})
print((memory("VmHWM") - before) / SIZE / GROUPS)
assert [float(loaded["layers"][index]["kernel"][1, -1]) for index in range(GROUPS)] == list(range(GROUPS))
"""


@pytest.mark.variants
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_one_group_is_in_memory_when_writing_and_none_when_loading(tmp_path):
    process = run(MEMORY, tmp_path)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    groups, models = map(float, out.split())
    assert 1 <= groups < 1.75 and models < 0.25  # the model stays in its files


QUIET = """
import logging, sys
import numpy as np
import jax
from jaxspec.checkpoints.parameter_store import ParameterWriter, load_parameters

assert "orbax" not in sys.modules
if sys.argv[2] == "configured":
    logging.basicConfig(level=logging.INFO)
before = list(logging.getLogger().handlers)
with ParameterWriter(sys.argv[1]) as writer:
    writer.add({"first": np.ones(8, np.float32)})
    writer.add({"second": np.ones(8, np.float32)})
leaf = jax.ShapeDtypeStruct((8,), np.float32)
load_parameters(sys.argv[1], {"first": leaf, "second": leaf})
assert logging.getLogger().handlers == before and not logging.getLogger("absl").filters
logging.basicConfig(level=logging.INFO)
logging.getLogger("absl").warning("others are heard")
"""


@pytest.mark.parametrize("logs", [variants("configured"), "untouched"])
def test_orbax_is_imported_late_and_is_quiet(tmp_path, logs):
    process = run(QUIET, tmp_path / "parameters", logs)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert (out, err) == ("", "WARNING:absl:others are heard\n")


def test_the_progress_bar_counts_bytes(shared, capsys):
    list(mapped_parameters(shared, expected(), progress=True))
    total = sum(array.nbytes for array in PARAMETERS.values())
    shown = capsys.readouterr().err
    assert "100%" in shown and f"{total / 1000:.1f}k/{total / 1000:.1f}k" in shown
