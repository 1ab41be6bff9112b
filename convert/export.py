"""Writes a checkpoint in another producer's dialect: heads in any, converted targets as Hugging Face directories."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from convert.converting import COPIED
from jaxspec.checkpoints.checkpoint import Checkpoint
from jaxspec.checkpoints.converted import converted_head, stored_arrays
from jaxspec.checkpoints.exporting import Exported, head_checkpoint
from jaxspec.checkpoints.heads import head_plan
from jaxspec.checkpoints.json_files import read_config
from jaxspec.checkpoints.layout import Layout
from jaxspec.checkpoints.layout import Path as ParameterPath
from jaxspec.checkpoints.loading import naming, target_model_config
from jaxspec.checkpoints.manifest import DRAFT, is_converted, read_manifest
from jaxspec.checkpoints.mtp_layout import mtp_layout
from jaxspec.checkpoints.targets import target_layout
from jaxspec.checkpoints.writing import write_checkpoint
from jaxspec.models.mtp import MTPConfig

Arrays = Iterator[tuple[ParameterPath, np.ndarray]]


def export_target(source: Path, output: Path, *, progress: bool = False) -> None:
    """A converted target as a Hugging Face directory, every tensor as it was, MiMo's MTP layer included.

    Raises ValueError if the source is no converted target, or `output` exists.
    """
    if not is_converted(source):
        raise ValueError(f"{source} is no converted checkpoint: a target that was not converted is in this layout already")
    manifest = read_manifest(source)
    parts = [(target_layout(manifest.target), stored_arrays(source, manifest.target, progress=progress))]
    if is_converted(source / DRAFT) and isinstance(mtp := read_manifest(source / DRAFT).config, MTPConfig):
        parts.append((mtp_layout(mtp), stored_arrays(source / DRAFT, mtp, progress=progress)))
    config = read_config(source)
    config["dtype" if "dtype" in config else "torch_dtype"] = manifest.target.dtype
    tensors = (tensor for layout, arrays in parts for tensor in _tensors(layout, arrays))
    write_checkpoint(output, config, tensors, copy=_other_files(source), replace=False)


def export_head(source: Path, output: Path, dialect: str, *, target: Path | None = None, progress: bool = False) -> list[str]:
    """A head in a dialect of `DIALECTS`; returns warnings for people.

    Args:
        source: the head, converted or not.
        output: must not exist.
        dialect: safeailab, sglang or speculators.
        target: its target, which a head that was not converted needs: it tells which layers are meant by default.
        progress: show a progress bar.

    Raises:
        ValueError: the dialect can't hold this head, or the source can't be read.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        if is_converted(source):
            where = converted_head(source)
            if where is None:
                raise ValueError(f"{source} is a converted target without a draft head")
            head = read_manifest(where).head
            _write(output, head_checkpoint(head, dialect), stored_arrays(where, head, progress=progress), head.layer.dtype)
        else:
            _export_original(source, output, dialect, target)
    return [str(warning.message) for warning in caught]


def _export_original(source: Path, output: Path, dialect: str, target: Path | None) -> None:
    if target is None:
        raise ValueError(f"{source} was not converted: give --target, which tells what layers it reads by default")
    with Checkpoint(source) as checkpoint, naming(source):
        plan = head_plan(checkpoint, read_config(source), target_model_config(target))
        plan.check(checkpoint)
        arrays = ((path, part.join(checkpoint.read)) for path, part in plan.layout.items())
        dtype = str(checkpoint.infos["fc.weight"].dtype)
        head = replace(plan.config, layer=replace(plan.config.layer, dtype=dtype))
        _write(output, head_checkpoint(head, dialect), arrays, dtype)


def _write(output: Path, exported: Exported, arrays: Arrays, dtype: str) -> None:
    write_checkpoint(output, exported.config | {"torch_dtype": dtype}, _tensors(exported.layout, arrays), replace=False)


def _tensors(layout: Layout, arrays: Arrays) -> Iterator[tuple[str, np.ndarray]]:
    for path, array in arrays:
        yield from layout[path].split(array).items()


def _other_files(source: Path) -> tuple[Path, ...]:
    return tuple(source / name for name in COPIED if name != "config.json" and (source / name).is_file())
