"""Writes a checkpoint in another producer's dialect: heads in any, converted targets as Hugging Face directories."""

import warnings
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from convert.converting import COPIED
from jaxspec.checkpoints.checkpoint import Checkpoint
from jaxspec.checkpoints.converted import Manifest, check_fit, head_directory, is_converted, read_manifest, stored_arrays
from jaxspec.checkpoints.exporting import Exported, head_checkpoint, warn_of_unread
from jaxspec.checkpoints.heads import head_plan
from jaxspec.checkpoints.json_files import TEMPLATES, read_config
from jaxspec.checkpoints.layout import Keys, Layout
from jaxspec.checkpoints.layouts import mtp_layout, target_layout
from jaxspec.checkpoints.loading import require_head, target_model_config
from jaxspec.checkpoints.tensor_files import errors_named
from jaxspec.checkpoints.writing import write_checkpoint
from jaxspec.model_config import ModelConfig
from jaxspec.models.mtp import MTPConfig

Arrays = Iterator[tuple[Keys, np.ndarray]]


def export_target(source: Path, output: Path, *, progress: bool = False) -> None:
    """A converted target as a Hugging Face directory, every tensor that it kept as it was, MiMo's MTP layer included.

    Warns of a token map, and if the original had an MTP layer that was left out. Raises ValueError if the source is not a converted
    target, or `output` exists.
    """
    if not is_converted(source):
        raise ValueError(
            f"{source} is not a converted checkpoint: convert a GGUF file first; other targets are in this layout already"
        )
    with errors_named(source):
        target = _whole(read_manifest(source).target)
    parts = [(target_layout(target), stored_arrays(source, target, doing="exporting", progress=progress))]
    config = read_config(source)
    head = head_directory(source)
    mtp = None if head is None else read_manifest(head).head
    if head is not None and isinstance(mtp, MTPConfig):
        _warn_of_map(read_manifest(head))
        parts.append((mtp_layout(mtp), stored_arrays(head, mtp, doing="exporting", progress=progress)))
    elif config.get("num_nextn_predict_layers"):
        warnings.warn(
            "the original's MTP layer was left out when it was converted: num_nextn_predict_layers is set to 0", stacklevel=2
        )
        config["num_nextn_predict_layers"] = 0
    for name in config.keys() & {"quantization_config", "compression_config"}:  # no matrix is quantised, but the cache may be
        if (config[name] or {}).get("kv_cache_scheme"):
            config[name]["config_groups"] = {}
        else:
            del config[name]
    config["dtype" if "dtype" in config else "torch_dtype"] = target.dtype
    tensors = (tensor for layout, arrays in parts for tensor in _tensors(layout, arrays))
    copied = tuple(source / name for name in (*COPIED[1:], TEMPLATES) if (source / name).exists())
    write_checkpoint(output, config, tensors, copy=copied, replace=False)


def export_head(source: Path, output: Path, dialect: str, *, target: Path | None = None, progress: bool = False) -> None:
    """The head of `source`, converted or not, or of a converted target, in one of exporting.DIALECTS.

    `target`: its target; required for a head that was not converted, because the default layers depend on it. Warns of what the
    dialect's engine will not read. Raises ValueError if the dialect can't hold this head, it does not fit the target, the source
    can't be read, or `output` exists.
    """
    if not is_converted(source):
        _export_original(source, output, dialect, target)
        return
    where = require_head(source)
    manifest = read_manifest(where)
    if target is not None:
        with errors_named(where):
            check_fit(manifest, target_model_config(target))
    _whole(manifest.head.layer)
    exported = head_checkpoint(manifest.head, dialect)
    warn_of_unread(manifest.head, dialect)
    _warn_of_map(manifest)
    arrays = stored_arrays(where, manifest.head, doing="exporting", progress=progress)
    _write(output, exported, arrays, manifest.head.layer.dtype)


def _warn_of_map(manifest: Manifest) -> None:
    if manifest.token_map is not None:
        warnings.warn("no dialect has a place for a token map: give it again with --speculative-token-map", stacklevel=3)


def _whole(config: ModelConfig) -> ModelConfig:
    """The config. Raises ValueError if its matrices are quantised, which no layout here can hold."""
    if config.storages:
        raise ValueError("the checkpoint is quantised: export one that is not, and quantise it while loading")
    return config


def _export_original(source: Path, output: Path, dialect: str, target: Path | None) -> None:
    if target is None:
        raise ValueError(f"{source} was not converted: give --target, which decides the layers that it reads by default")
    with Checkpoint(source) as checkpoint, errors_named(source):
        plan = head_plan(checkpoint, read_config(source), target_model_config(target))
        plan.check(checkpoint)
        exported = head_checkpoint(plan.config, dialect)
        warn_of_unread(plan.config, dialect)
        arrays = ((keys, part.join(checkpoint.read)) for keys, part in plan.layout.items())
        dtype = next(checkpoint.infos[name].dtype for name, needed in plan.needed().items() if needed.floating)
        _write(output, exported, arrays, str(dtype) if dtype.itemsize > 1 else "float32")  # FP8 is written dequantised


def _write(output: Path, exported: Exported, arrays: Arrays, dtype: str) -> None:
    config, tensors = exported.config | {"torch_dtype": dtype}, _tensors(exported.layout, arrays)
    zeros = ((name, np.zeros(size, jnp.dtype(dtype))) for name, size in exported.zeros)
    write_checkpoint(output, config, chain(tensors, zeros), replace=False, one_file=exported.one_file)


def _tensors(layout: Layout, arrays: Arrays) -> Iterator[tuple[str, np.ndarray]]:
    for keys, array in arrays:
        yield from layout[keys].split(array).items()
