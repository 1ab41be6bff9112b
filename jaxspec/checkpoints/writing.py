"""Writes checkpoints in Hugging Face's file format; readers see a complete directory or none."""

import json
import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.typing import DTypeLike
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jaxspec.checkpoints.layout import Layout
from jaxspec.checkpoints.tensor_files import cast

SHARD_BYTES = 1 << 30
"""A shard holds as many tensors as fit in this, and at least one. It is in memory while it is written."""
ATTEMPTS = 50
"""To remove a directory, 0.1 s apart."""


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
        ready = ((name, np.ascontiguousarray(cast(tensor, dtype))) for name, tensor in tensors)
        _write_shards(fresh, ready, math.inf if one_file else SHARD_BYTES)
        for file in copy:
            (shutil.copytree if file.is_dir() else shutil.copy)(file, fresh / file.name)
        (fresh / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


@contextmanager
def fresh_directory(final: Path, *, replace: bool = False) -> Iterator[Path]:
    """A new directory that becomes `final` when the block ends well; otherwise it is removed.

    A killed process leaves `<final>.incomplete`, which the next attempt overwrites. Raises ValueError if `final` exists and may not
    be replaced.
    """
    if final.exists() and not replace:
        raise ValueError(f"{final} exists already: choose another place, or remove it first")
    fresh = final.with_name(final.name + ".incomplete")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        yield fresh
        synchronize(fresh)
        shutil.rmtree(final, ignore_errors=True)
        os.rename(fresh, final)
    finally:
        remove_directory(fresh)


def remove_directory(directory: Path) -> None:
    """Removes a directory if it exists. Retries for some seconds: after a failed write, other writes of orbax continue and may
    still add files."""
    for _ in range(ATTEMPTS):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(0.1)


def synchronize(directory: Path) -> None:
    """Waits until the directory's files are on the disk, so that the rename can't come first."""
    for path in [*directory.rglob("*"), directory]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _write_shards(directory: Path, tensors: Iterable[tuple[str, np.ndarray]], shard_bytes: float) -> None:
    """One model.safetensors, or several files and their index."""
    files: list[list[str]] = []
    shard: dict[str, np.ndarray] = {}

    def end_shard() -> None:
        path = directory / f"{len(files)}.safetensors"
        try:
            save_file(shard, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{path} can't be written: {error}") from None
        path.chmod(0o644)  # save_file makes it private
        files.append(list(shard))
        shard.clear()

    total = 0
    for name, tensor in tensors:
        if shard and sum(part.nbytes for part in shard.values()) + tensor.nbytes > shard_bytes:
            end_shard()
        shard[name] = tensor
        total += tensor.nbytes
    end_shard()
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
