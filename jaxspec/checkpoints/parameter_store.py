"""A model's parameters as one orbax checkpoint: written in groups by `ParameterWriter`, loaded by `load_parameters`.

Parameters are a nested dict of arrays, as modules have them: {"layers": {0: {"mlp": {"kernel": array}}}}. A parameter's name is
its keys joined by dots: `layers.0.mlp.kernel`. On disk every key is a string; integer keys come back as integers because
`load_parameters` returns the keys of the tree that it is asked for. In the directory, `state/<name>/` is one Zarr array,
uncompressed, with all its values in one file, and `state/_METADATA` lists the names.

Any program with orbax can restore it. Here the files are mapped instead, which is faster (tests hold the two equal;
docs/experiments.md has the times). Missing and truncated files are noticed, flipped bits are not: there are hashes for
that in the manifest.
"""

import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from tqdm import tqdm

from jaxspec.checkpoints.json_files import read_object
from jaxspec.checkpoints.tensor_files import TensorInfo
from jaxspec.checkpoints.writing import remove_directory

STORED_DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32", "float64",
    "float8_e4m3fn",
)  # fmt: skip
ONE_BYTE = ("bool", "int8", "uint8", "float8_e4m3fn")
INDEX_BYTES = 20
"""Zarr's index of the one chunk follows the values: offset, length and a checksum of both."""


class ParameterWriter:
    """Writes parameters to a directory, group by group, with one group in memory. A context manager.

    The directory appears when the `with` block ends without an error. Until then everything is in a sibling, its name plus
    `.unfinished`, which is removed on an error, and by the next writer to the same directory if the process was killed.
    A group costs about 0.1 s beyond the writing, more the more there are: half a gigabyte is a good size. 9 GB were written
    at 500 to 770 MB/s, one large file with the same bytes at 250 to 430 (two EPYC cores, orbax 0.12.8, 2026-11-21).
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.directory = Path(directory).absolute()
        self._unfinished = self.directory.with_name(self.directory.name + ".unfinished")
        self._names: set[str] = set()

    def __enter__(self) -> "ParameterWriter":
        """Raises FileExistsError if there is something at the directory already."""
        if self.directory.exists():
            raise FileExistsError(f"{self.directory} exists already: parameters are written to a new directory")
        shutil.rmtree(self._unfinished, ignore_errors=True)
        self._unfinished.mkdir(parents=True)
        return self

    def add(self, group: dict) -> None:
        """Writes a part of the parameters, a nested dict of NumPy or JAX arrays, none of them empty; returns when it is on disk.
        The arrays are not copied: don't change them meanwhile.

        Raises ValueError naming a parameter that was added before, or whose keys can't be stored.
        """
        arrays = flatten_dict(group)
        for path in arrays:
            if any(not str(key) or set(str(key)) & set("./") for key in path):
                raise ValueError(f"parameter {path} can't be stored: a key is empty or has a dot or a slash in it")
            if parameter_name(path) in self._names:
                raise ValueError(f"parameter {parameter_name(path)!r} was added twice")
            self._names.add(parameter_name(path))
        tree = unflatten_dict({tuple(map(str, path)): np.asarray(array) for path, array in arrays.items()})
        with _orbax() as ocp, _saving(ocp), _silent_if_it_fails():
            ocp.partial.save(self._unfinished / "parameters", tree)

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Moves the parameters to their place. Raises ValueError if there are none."""
        try:
            if error_type is None:
                if not self._names:
                    raise ValueError(f"no parameters were added for {self.directory}")
                with _orbax() as ocp, _saving(ocp):
                    ocp.partial.finalize(self._unfinished / "parameters")
                os.rename(self._unfinished / "parameters", self.directory)
        finally:
            remove_directory(self._unfinished)


class StoredArray(NamedTuple):
    """A parameter on disk."""

    file: Path
    info: TensorInfo

    def values(self) -> np.ndarray:
        """The values as a view of the mapped file. Raises ValueError if the file is missing or has another length."""
        found = self.file.stat().st_size if self.file.is_file() else 0
        if found != self.info.size + INDEX_BYTES:
            raise ValueError(f"{self.file} has {found} bytes; expected {self.info.size + INDEX_BYTES}: the file is damaged")
        return np.memmap(self.file, np.uint8, "r", 0, self.info.size).view(self.info.dtype).reshape(self.info.shape)


def stored_parameters(directory: str | os.PathLike[str]) -> dict[str, StoredArray]:
    """Every parameter of a directory by name, without reading values.

    Raises ValueError if the directory is not what a `ParameterWriter` finished, or its description is damaged.
    """
    state = Path(directory) / "state"
    if not (Path(directory) / "commit_success.txt").is_file() or not state.is_dir():  # orbax's sign that all was written
        raise ValueError(f"{directory} holds no readable parameters: it is not the result of a complete conversion")
    return {path.name: _stored_array(path) for path in sorted(state.iterdir()) if path.is_dir()}


def load_parameters(directory: str | os.PathLike[str], expected: dict) -> dict:
    """All parameters of a directory, each straight from its file onto the device.

    Nothing is copied on the host: an accelerator gets its values from the mapped file, and on a CPU the array is the mapped file,
    whose pages are read when they are first used. A cast makes a copy.

    `expected`: nested dict of jax.ShapeDtypeStruct, exactly the parameters that are stored; the jax.Arrays are returned in its
    place. Floating-point values are cast to its `dtype`; others must be stored with it.

    Raises ValueError naming what is missing, unknown, has another shape or dtype, or can't be read.
    """
    leaves, arrays = flatten_dict(expected), mapped_parameters(directory, expected)
    return unflatten_dict({keys: jax.device_put(values).astype(leaves[keys].dtype) for keys, values in arrays})


def mapped_parameters(
    directory: str | os.PathLike[str], expected: dict, title: str = "", *, progress: bool = False
) -> Iterator[tuple[tuple, np.ndarray]]:
    """Yields every parameter of `expected` by its keys, as it is stored: a view of the mapped file. Raises as `load_parameters`.

    `title` is the label of the progress bar.
    """
    stored = check_stored(directory, expected)
    total = sum(array.info.size for array in stored.values())
    with tqdm(total=total, desc=title, unit="B", unit_scale=True, disable=not progress) as bar:
        for keys in flatten_dict(expected):
            found = stored[parameter_name(keys)]
            yield keys, found.values()
            bar.update(found.info.size)


def _stored_array(path: Path) -> StoredArray:
    """A parameter from its Zarr description (zarr.json, Zarr 3), which must be of the one form that `_saving` makes."""
    description = read_object(path / "zarr.json") if (path / "zarr.json").is_file() else {}
    shape, dtype = description.get("shape"), description.get("data_type")
    values: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "little"}}
    index = [values, {"name": "crc32c"}]
    if dtype in ONE_BYTE:  # whose bytes have no order
        values = {"name": "bytes"}
    plain = {"chunk_shape": shape, "codecs": [values], "index_codecs": index}
    if (
        not (isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape))
        or dtype not in STORED_DTYPES
        or description.get("codecs") != [{"name": "sharding_indexed", "configuration": plain}]
        or description.get("chunk_grid") != {"name": "regular", "configuration": {"chunk_shape": shape}}
    ):
        raise ValueError(f"{path} is damaged: its zarr.json is missing or describes no single file of plain values")
    return StoredArray(path.joinpath("c", *("0" for _ in shape)), TensorInfo(jnp.dtype(dtype), tuple(shape)))


def check_stored(directory: str | os.PathLike[str], expected: dict) -> dict[str, StoredArray]:
    """The stored parameters. Raises ValueError unless they match `expected` (jax.ShapeDtypeStructs), up to float dtypes."""
    stored = stored_parameters(directory)
    leaves = {parameter_name(path): leaf for path, leaf in flatten_dict(expected).items()}
    missing, unknown = sorted(leaves.keys() - stored.keys()), sorted(stored.keys() - leaves.keys())
    if missing:
        raise ValueError(f"{directory} misses {len(missing)} parameters: {', '.join(missing[:5])}")
    if unknown:
        raise ValueError(f"{directory} has {len(unknown)} unknown parameters: {', '.join(unknown[:5])}")
    for name, leaf in leaves.items():
        found = stored[name].info
        if found.shape != leaf.shape:
            raise ValueError(f"{directory}: parameter {name!r} has shape {found.shape}; expected {leaf.shape}")
        castable = jnp.issubdtype(found.dtype, jnp.floating) and jnp.issubdtype(leaf.dtype, jnp.floating)
        if found.dtype != leaf.dtype and not castable:
            raise ValueError(f"{directory}: parameter {name!r} has dtype {found.dtype}; expected {leaf.dtype}")
    return stored


def parameter_name(keys: tuple) -> str:
    """A parameter's name on disk, in manifests and in messages.

    In:  ("layers", 0, "mlp", "kernel")
    Out: "layers.0.mlp.kernel"
    """
    return ".".join(map(str, keys))


def _saving(ocp: Any) -> Any:
    """How parameters are stored, chosen by measurement: orbax's defaults write half as fast, with three groups in memory."""
    context = ocp.Context()
    context.array.saving.use_compression = False  # bfloat16 weights would shrink by a fifth and could not be mapped
    context.array.saving.use_ocdbt = False  # a file per parameter: faster to write, and the values can be mapped
    context.memory.deepcopy_host_arrays = False
    return context


@contextmanager
def _silent_if_it_fails() -> Iterator[None]:
    """If a write fails, orbax leaves its other writes running. Each prints a traceback when it ends, because its event loop is
    closed or its error is never read. The first error says enough. A write can end after the block, so the silence stays."""
    hook, said = sys.unraisablehook, logging.getLogger("asyncio")

    def others(problem: Any) -> None:
        if str(problem.exc_value) != "Event loop is closed":
            hook(problem)

    def is_of_others(record: logging.LogRecord) -> bool:
        return "orbax" not in record.getMessage()  # a task names orbax's code, a future's error the file that orbax wrote

    sys.unraisablehook = others
    said.addFilter(is_of_others)
    yield
    sys.unraisablehook = hook
    said.removeFilter(is_of_others)


@contextmanager
def _orbax() -> Iterator[Any]:
    """The orbax module. Inside the block, only errors in its log reach the program's handlers.

    Imported at first use: with TensorStore it takes 0.2 to 0.5 s after JAX (two EPYC cores, orbax 0.12.8, 2026-11-21).
    Orbax logs through absl, which configures the root logger unless it has a handler: an empty handler prevents that.
    """

    def is_error(record: logging.LogRecord) -> bool:  # a function of its own per block, so that threads don't disturb each other
        return record.levelno >= logging.ERROR

    root, nothing = logging.getLogger(), logging.NullHandler()
    with ExitStack() as stack:
        root.addHandler(nothing)
        stack.callback(root.removeHandler, nothing)
        from absl.logging import get_absl_logger

        get_absl_logger().addFilter(is_error)
        stack.callback(get_absl_logger().removeFilter, is_error)
        from orbax.checkpoint import v1

        yield v1
