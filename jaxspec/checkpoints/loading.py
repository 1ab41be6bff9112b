"""Loading models: Hugging Face directories, heads in any dialect, and converted checkpoints."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike
from tqdm import tqdm

from jaxspec.checkpoints.checkpoint import Checkpoint
from jaxspec.checkpoints.converted import PARAMETERS, check_fit, head_directory, is_converted, load_converted, read_manifest
from jaxspec.checkpoints.heads import PACKAGE, attach_head, head_plan, usable_token_map
from jaxspec.checkpoints.json_files import read_config, read_end_of_sequence
from jaxspec.checkpoints.kinds import algorithm_of, is_target
from jaxspec.checkpoints.layout import Keys, TensorPlan
from jaxspec.checkpoints.layouts import target_plan
from jaxspec.checkpoints.parameter_store import check_stored, parameter_name
from jaxspec.checkpoints.quantization import quantised_plan
from jaxspec.checkpoints.storing import Storing, planned, stored
from jaxspec.checkpoints.tensor_files import errors_named
from jaxspec.checkpoints.token_map import read_token_map
from jaxspec.model_config import ModelConfig
from jaxspec.models.registry import LoadedHead, LoadedTarget, abstract_model, build_model, layer_config
from jaxspec.placement import ONE_DEVICE, Placement

COMPARED = 1024
"""Rows that are compared at a time."""


def load_target(
    path: Path,
    dtype: DTypeLike,
    *,
    storing: Storing = Storing.DENSE,
    quantization: str | None = None,
    placement: Placement = ONE_DEVICE,
    progress: bool = False,
) -> LoadedTarget:
    """A target, with activations in this dtype, stored as `storing.planned` chooses, on the devices of an engine.

    Raises ValueError naming the path and what is missing, unknown, misshapen, damaged or unsupported.
    """
    if is_converted(path):
        manifest = read_manifest(path)
        with errors_named(path):
            how: dict[str, Any] = {"storing": storing, "quantization": quantization, "placement": placement, "progress": progress}
            return finite(load_converted(path, manifest.target, dtype, **how))
    with Checkpoint(path) as checkpoint, errors_named(path):
        plan = read_target_plan(path, checkpoint)
        plan.check(checkpoint)
        plan = planned(plan, checkpoint, storing, quantization)
        params = read_parameters(plan, checkpoint, dtype, placement, progress=progress)
        return finite(build_model(plan.config, params, dtype, placement.weights))


def load_head(
    path: Path,
    target: LoadedTarget,
    *,
    token_map: Path | None = None,
    storing: Storing = Storing.DENSE,
    quantization: str | None = None,
    placement: Placement = ONE_DEVICE,
    progress: bool = False,
) -> LoadedHead:
    """A draft head for this target, in the target's dtype, stored as `storing.planned` chooses, on the same devices.

    Args:
        path: a head's directory or file; a target's directory if the head is inside (MTP).
        token_map: FR-Spec's list of the tokens worth drafting; a head with its own draft vocabulary warns and ignores it.

    Raises ValueError if the head does not fit the target, or as `load_target`.
    """
    if is_converted(path):
        manifest = read_manifest(directory := require_head(path))
        with errors_named(path):
            check_fit(manifest, target.config)
            hot_tokens = usable_token_map(manifest.head, token_map)
            if hot_tokens is None and manifest.token_map is not None:
                hot_tokens = np.asarray(manifest.token_map, np.int32)
            how: dict[str, Any] = {"storing": storing, "quantization": quantization, "placement": placement, "progress": progress}
            loaded = load_converted(directory, manifest.head, target.dtype, **how)
            return finite(attach_head(loaded.config, loaded.params, target, hot_tokens, placement))
    with Checkpoint(path) as checkpoint, errors_named(path):
        plan = head_plan(checkpoint, read_config(path), target.config)
        plan.check(checkpoint)
        plan = planned(plan, checkpoint, storing, quantization)
        hot_tokens = usable_token_map(plan.config, token_map)
        params = read_parameters(plan, checkpoint, target.dtype, placement, progress=progress)
        return finite(attach_head(plan.config, params, target, hot_tokens, placement))


def check_head(path: Path, target: ModelConfig, token_map: Path | None = None) -> None:
    """Raises the errors of `load_head` about names, shapes and sizes, without reading any weight."""
    with errors_named(path):
        if is_converted(path):
            manifest = read_manifest(directory := require_head(path))
            check_fit(manifest, target)
            head = manifest.head
            with Checkpoint(directory / PARAMETERS) as stored_head:
                check_stored(stored_head, abstract_model(head, np.float32).params)
        else:
            with Checkpoint(path) as checkpoint:
                plan = head_plan(checkpoint, read_config(path), target)
                plan.check(checkpoint)
                head = plan.config
    if token_map is not None and head.draft_vocab_size is None:
        read_token_map(token_map, target.vocab_size)


def require_head(path: Path) -> Path:
    """The directory of a converted checkpoint's head. Raises ValueError if there is none."""
    head = head_directory(path)
    if head is None:
        raise ValueError(f"{path} is a converted target without a draft head")
    return head


def finite[Model: LoadedTarget | LoadedHead](model: Model) -> Model:
    """The model. Raises ValueError if a norm or bias is not a number. (Checking matrices would take too long.)"""
    for keys, values in flatten_dict(model.params).items():
        parts = (np.asarray(shard.data, np.float32) for shard in values.addressable_shards) if values.ndim == 1 else ()
        if not all(np.isfinite(part).all() for part in parts):
            raise ValueError(f"parameter {parameter_name(keys)} has values that are not finite numbers: get the file again")
    return model


def target_model_config(path: Path) -> ModelConfig:
    """The config of a target. Raises ValueError if the path holds no supported target."""
    if is_converted(path):
        with errors_named(path):
            return read_manifest(path).target
    with Checkpoint(path) as checkpoint, errors_named(path):
        return read_target_plan(path, checkpoint).config


def head_kind(path: Path) -> str | None:
    """The kind of draft head in a head's or target's directory: as HeadConfig.algorithm; None: there is none."""
    if is_converted(path):
        head = head_directory(path)
        return None if head is None else read_manifest(head).kind
    with Checkpoint(path) as checkpoint:
        return algorithm_of(checkpoint.infos)


def read_target_plan(path: Path, checkpoint: Checkpoint) -> TensorPlan:
    """The plan for a target's directory. Raises ValueError if it is something else."""
    names = checkpoint.infos
    if not is_target(names):
        what = f"a draft head ({algorithm_of(names)})" if algorithm_of(names) else f"{', '.join(sorted(names)[:6])}, ..."
        raise ValueError(f"this is not a target, which has model.embed_tokens and model.norm, but {what}")
    directory = path if path.is_dir() else path.parent
    config = read_config(path)
    config["eos_token_id"] = read_end_of_sequence(directory, config)
    if config.get("tie_word_embeddings") and is_really_untied(checkpoint):
        warnings.warn(
            f"{path}: tie_word_embeddings is true, but lm_head.weight differs from the embedding, so it is used",
            skip_file_prefixes=(PACKAGE,),
        )
        config["tie_word_embeddings"] = False
    return quantised_plan(target_plan(config, checkpoint.infos), config, checkpoint.infos)


def is_really_untied(checkpoint: Checkpoint) -> bool:
    """Whether the files have an output projection that is not the embedding."""
    if "lm_head.weight" not in checkpoint.infos:
        return False
    head, embedding = (checkpoint.read(name) for name in ("lm_head.weight", "model.embed_tokens.weight"))
    if head.dtype != embedding.dtype or head.shape != embedding.shape:
        return True
    stretches = (slice(start, start + COMPARED) for start in range(0, len(head), COMPARED))  # no copy as large as an embedding
    return not all(np.array_equal(head[each].view(np.uint8), embedding[each].view(np.uint8)) for each in stretches)


def read_parameters(
    plan: TensorPlan, checkpoint: Checkpoint, dtype: DTypeLike, placement: Placement = ONE_DEVICE, *, progress: bool
) -> dict:
    """All parameters as a nested dict of arrays, each in the dtype that it has in a model with activations of this dtype.

    Only one parameter at a time is in memory twice, never a whole shard; of one that devices divide, only their parts are.
    """
    config = layer_config(plan.config)
    params, expected = dict[Keys, Any](), flatten_dict(abstract_model(plan.config, dtype).params)
    total = checkpoint.size(plan.needed())
    with tqdm(total=total, desc=f"loading {checkpoint.path.name}", unit="B", unit_scale=True, disable=not progress) as bar:
        for keys, source in plan.layout.items():
            params |= placement.parameters(stored(keys, source, checkpoint, config), config, expected)
            bar.update(checkpoint.size(source.needed()))
    return unflatten_dict(params)
