"""Converts checkpoints: streamed, hashed, and in place only when complete."""

import hashlib
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from tqdm import tqdm

from jaxspec.checkpoints.checkpoint import Checkpoint
from jaxspec.checkpoints.converted import DRAFT, PARAMETERS, Manifest, is_converted, manifest_digest
from jaxspec.checkpoints.draft_models import inherited_quantization
from jaxspec.checkpoints.heads import head_plan, usable_token_map
from jaxspec.checkpoints.json_files import TEMPLATES, read_config
from jaxspec.checkpoints.kinds import algorithm_of
from jaxspec.checkpoints.layout import Keys, Source, TensorPlan
from jaxspec.checkpoints.loading import read_target_plan, target_model_config
from jaxspec.checkpoints.parameter_store import parameter_name
from jaxspec.checkpoints.storing import Storing, planned, stored
from jaxspec.checkpoints.tensor_files import cast, errors_named
from jaxspec.checkpoints.writing import SHARD_BYTES, fresh_directory, write_tensors
from jaxspec.model_config import ModelConfig
from jaxspec.models.head import HeadConfig
from jaxspec.models.registry import layer_config
from jaxspec.planner.models import weights_of

COPIED = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
    "LICENSE", "LICENSE.txt",
)  # fmt: skip
"""Files that a converted checkpoint keeps, beside the templates of TEMPLATES; code and other weights are left behind."""


class Options(NamedTuple):
    dtype: DTypeLike | None = None
    """Floating-point parameters are cast to it; None: they stay as they are."""
    quantization: str | None = None
    """One of config.QUANTIZATIONS, for all matrices; None: as published."""
    progress: bool = False


def convert_target(
    source: Path, output: Path, options: Options, *, draft: Path | None = None, token_map: Path | None = None
) -> None:
    """Converts a target, and its draft head into `output/draft`: the one given, or the MTP layer that the target holds.

    Raises ValueError if something can't be read, does not fit, or `output` exists; nothing is left behind then.
    """
    _refuse_converted(source)
    with fresh_directory(output) as fresh, Checkpoint(source) as checkpoint:
        with errors_named(source):
            plan = read_target_plan(source, checkpoint)
            plan.check(checkpoint)
        own = algorithm_of(checkpoint.infos)
        if draft is not None and own is not None:
            warnings.warn(f"the {own} layer of {source} is left out: --draft takes its place", stacklevel=2)
        head = source if draft is None and own is not None else draft
        if head is None and token_map is not None:
            raise ValueError(f"the token map {token_map} needs a draft head: give --draft")
        if head is not None:
            of_head = options._replace(quantization=inherited_quantization(head, options.quantization))
            _write_head(head, fresh / DRAFT, plan.config, of_head, token_map)
        with errors_named(source):
            _write_model(checkpoint, plan, fresh, options, draft=None if head is None else manifest_digest(fresh / DRAFT))


def convert_head(source: Path, output: Path, target: Path, options: Options, *, token_map: Path | None = None) -> None:
    """Converts a draft head for a target, whose sizes it must fit. Raises as `convert_target`."""
    with fresh_directory(output) as fresh:
        _write_head(source, fresh, target_model_config(target), options, token_map)


def _write_head(source: Path, directory: Path, target: ModelConfig, options: Options, token_map: Path | None) -> None:
    _refuse_converted(source)
    directory.mkdir(exist_ok=True)
    with Checkpoint(source) as checkpoint, errors_named(source):
        plan = head_plan(checkpoint, read_config(source), target)
        plan.check(checkpoint)
        ids = usable_token_map(plan.config, token_map)
        made_for = {name: vars(target)[name] for name in ("hidden_size", "num_layers", "vocab_size")}
        _write_model(checkpoint, plan, directory, options, made_for=made_for, token_map=None if ids is None else ids.tolist())


def _refuse_converted(source: Path) -> None:
    if is_converted(source):
        raise ValueError(f"{source} is a converted checkpoint already: give the original")


def _write_model(
    checkpoint: Checkpoint,
    plan: TensorPlan,
    directory: Path,
    options: Options,
    *,
    made_for: dict[str, int] | None = None,
    token_map: list[int] | None = None,
    draft: str | None = None,
) -> None:
    """Parameters, copies of the small files, and last the manifest."""
    plan = planned(plan, checkpoint, Storing.DENSE, options.quantization)
    if options.quantization is None and any(checkpoint.infos[name].format for name in plan.needed()):
        warnings.warn(f"blocks are written as {options.dtype or 'float32'} numbers: --quantization keeps 8 or 4 bits", stacklevel=3)
    hashes, needed = dict[str, str](), (total := checkpoint.size(plan.needed()))
    if options.dtype is not None or options.quantization is not None:  # what is not quantised has at least 16 bits
        needed = weights_of(plan.config, jnp.dtype(options.dtype or "float16").name).total
    if (free := shutil.disk_usage(directory).free) < needed:
        raise OSError(f"{directory.parent} has {free / 1e6:.0f} MB left on its disk; {needed / 1e6:.0f} MB are to be written")
    bar = tqdm(total=total, desc=f"converting {checkpoint.path.name}", unit="B", unit_scale=True, disable=not options.progress)

    def parameters() -> Iterator[tuple[str, np.ndarray]]:
        for keys, source in plan.layout.items():
            for each, array in _arrays(plan.config, keys, source, checkpoint, options.dtype).items():
                name = parameter_name(each)
                hashes[name] = sha256(array)
                yield name, array
                del array  # else it stays while the next one is made
            bar.update(checkpoint.size(source.needed()))

    with bar:
        (directory / PARAMETERS).mkdir()
        write_tensors(directory / PARAMETERS, parameters(), SHARD_BYTES)
    origin = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    files = {}
    for name in (*COPIED, *(f"{TEMPLATES}/{path.name}" for path in (origin / TEMPLATES).glob("*.jinja"))):
        if (origin / name).is_file():
            (directory / name).parent.mkdir(exist_ok=True)
            files[name] = file_sha256(shutil.copyfile(origin / name, directory / name))
    config = plan.config
    if options.dtype is not None:
        layer = replace(layer_config(config), dtype=jnp.dtype(options.dtype).name)
        config = replace(config, layer=layer) if isinstance(config, HeadConfig) else layer
    Manifest(config, plan.dialect, hashes, files, made_for or {}, token_map, draft).write(directory)


def _arrays(
    config: ModelConfig | HeadConfig, keys: Keys, source: Source, checkpoint: Checkpoint, dtype: DTypeLike | None
) -> dict[Keys, np.ndarray]:
    """A parameter by its keys, or the arrays that it is quantised to."""
    layer = layer_config(config)
    if keys[:-1] not in dict(layer.storages):
        return {keys: cast(source.join(checkpoint.read), dtype)}
    return {name: np.asarray(array) for name, array in stored(keys, source, checkpoint, layer).items()}


def sha256(array: np.ndarray) -> str:
    """SHA-256 of the array's bytes in C order."""
    return hashlib.sha256(array.reshape(-1).view(np.uint8)).hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a small file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
