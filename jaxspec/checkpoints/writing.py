"""Writes checkpoints in safetensors files; readers see a complete directory or none."""

import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.typing import DTypeLike

from jaxspec.checkpoints.layout import Layout
from jaxspec.checkpoints.tensor_files import SAFETENSORS_DTYPES, cast

SHARD_BYTES = 512 << 20
"""A shard holds as many tensors as fit in this, and at least one. Two are in memory: one being written, the next being made."""
ALIGNMENT = 64
"""On CPUs JAX uses a mapped array in place if it begins at a multiple of this, and copies others."""
NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
LENGTH = 8
"""Bytes of the header's length, with which a file begins."""


def tensors_of(layout: Layout, params: dict) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the model's tensors under the layout's names."""
    flat = flatten_dict(params)
    for keys, source in layout.items():
        yield from source.split(np.asarray(flat[keys])).items()


def write_checkpoint(
    directory: Path,
    config: dict,
    tensors: Iterable[tuple[str, np.ndarray]],
    *,
    dtype: DTypeLike | None = None,
    copy: tuple[Path, ...] = (),
    replace: bool = True,
    one_file: bool = False,
) -> None:
    """Writes tensors, taken one by one, config.json, and copies of further files and folders, such as the tokenizer's.

    `dtype`: floating-point tensors are cast to it, and it becomes the config's `torch_dtype`; None: they stay as they are.
    `one_file`: no shards, all tensors are in memory at once. Raises ValueError if the directory exists and may not be replaced.
    """
    settings = config if dtype is None else {**config, "torch_dtype": jnp.dtype(dtype).name}
    with fresh_directory(directory, replace=replace) as fresh:
        write_tensors(fresh, ((name, cast(tensor, dtype)) for name, tensor in tensors), math.inf if one_file else SHARD_BYTES)
        for file in copy:
            (shutil.copytree if file.is_dir() else shutil.copy)(file, fresh / file.name)
        (fresh / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


@contextmanager
def fresh_directory(final: Path, *, replace: bool = False) -> Iterator[Path]:
    """A new directory that becomes `final` when the block ends well; otherwise it is removed.

    A killed process leaves `<final>.incomplete`, which the next attempt overwrites. Raises ValueError if `final` exists, if only as
    a link, and may not be replaced, or if another process writes it.
    """
    if os.path.lexists(final) and not replace:
        raise ValueError(f"{final} exists already: choose another place, or remove it first")
    fresh = final.with_name(final.name + ".incomplete")
    fresh.mkdir(parents=True, exist_ok=True)
    with locked(fresh):
        try:
            for left in fresh.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            yield fresh
            synchronize(fresh)
            shutil.rmtree(final, ignore_errors=True)
            os.rename(fresh, final)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keeps other processes out, at most until this one ends. Raises ValueError if another one is in."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):  # of file systems without locks
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"another process is writing {directory}: wait until it ends, or stop it") from None
        yield
    finally:
        os.close(handle)


def synchronize(directory: Path) -> None:
    """Waits until the directory's files are on the disk, so that the rename can't come first."""
    for path in [*directory.rglob("*"), directory]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_tensors(directory: Path, tensors: Iterable[tuple[str, np.ndarray]], shard_bytes: float) -> None:
    """One model.safetensors, or several files and their index. While a file is written the tensors of the next are taken."""
    files: list[list[str]] = []
    total = 0
    with ThreadPoolExecutor(1) as pool:
        shards = _shards(tensors, shard_bytes)
        coming = pool.submit(next, shards, None)
        while (shard := coming.result()) is not None:
            coming = pool.submit(next, shards, None)
            _write_file(directory / f"{len(files)}.safetensors", shard)
            files.append(list(shard))
            total += sum(tensor.nbytes for tensor in shard.values())
            del shard  # else it stays while the one after the next is made
    if len(files) == 1:
        (directory / "0.safetensors").rename(directory / "model.safetensors")
        return
    index: dict[str, str] = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        (directory / f"{number}.safetensors").rename(directory / file)
        index |= dict.fromkeys(names, file)
    contents = {"metadata": {"total_size": total}, "weight_map": index}
    (directory / "model.safetensors.index.json").write_text(json.dumps(contents, indent=2) + "\n")


def _shards(tensors: Iterable[tuple[str, np.ndarray]], shard_bytes: float) -> Iterator[dict[str, np.ndarray]]:
    """The tensors of each file."""
    shard: dict[str, np.ndarray] = {}
    for name, tensor in tensors:
        if shard and sum(part.nbytes for part in shard.values()) + tensor.nbytes > shard_bytes:
            yield shard
            shard = {}
        shard[name] = np.ascontiguousarray(tensor).reshape(tensor.shape)
        del tensor
    yield shard


def _write_file(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A .safetensors file whose values, unlike in the library's files, begin at multiples of ALIGNMENT where sizes allow it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    # The format has no gaps: odd sizes come last, wide numbers first, so that all begin at multiples of their width.
    names = sorted(tensors, key=lambda name: (tensors[name].nbytes % ALIGNMENT != 0, -tensors[name].itemsize))
    start = 0
    for name in names:
        end = start + tensors[name].nbytes
        header[name] = {"dtype": NAMES[tensors[name].dtype], "shape": tensors[name].shape, "data_offsets": (start, end)}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + LENGTH) % ALIGNMENT)
    try:
        with path.open("wb") as file:
            file.write(len(text).to_bytes(LENGTH, "little") + text)
            for name in names:
                file.write(tensors[name].reshape(-1).view(np.uint8))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
