"""What drafts for a target: a head, or a whole small model, which is any target's directory without a head in it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxspec.checkpoints.checkpoint import Checkpoint
from jaxspec.checkpoints.converted import head_directory, is_converted, read_manifest
from jaxspec.checkpoints.json_files import read_config
from jaxspec.checkpoints.kinds import algorithm_of, is_target
from jaxspec.checkpoints.loading import check_head, head_kind, load_head, load_target, target_model_config
from jaxspec.checkpoints.quantization import read_scheme
from jaxspec.checkpoints.tensor_files import errors_named
from jaxspec.model_config import ModelConfig
from jaxspec.models.draft_model import DraftModelConfig
from jaxspec.models.registry import LoadedHead, LoadedTarget, abstract_model, layer_config


def is_draft_model(path: Path) -> bool:
    """Whether a path holds a whole model and no head: the model itself then drafts."""
    if is_converted(path):
        return head_directory(path) is None
    with Checkpoint(path) as checkpoint:
        return is_target(checkpoint.infos) and algorithm_of(checkpoint.infos) is None


def draft_kind(path: Path) -> str | None:
    """The kind of what drafts, as HeadConfig.algorithm says it; None: there is neither a head nor a model."""
    return DraftModelConfig.algorithm if is_draft_model(path) else head_kind(path)


def check_draft(path: Path, target: ModelConfig, token_map: Path | None = None) -> None:
    """Raises the errors of `load_draft` about names, shapes and sizes, without reading any weight."""
    if not is_draft_model(path):
        return check_head(path, target, token_map)
    refuse_token_map(path, token_map)
    with errors_named(path):
        DraftModelConfig.beside(target_model_config(path), target)


def refuse_token_map(path: Path, token_map: Path | None) -> None:
    """Raises ValueError if a token map is given for a whole model."""
    if token_map is not None:
        raise ValueError(f"the token map {token_map} is for heads, and {path} is a whole model with its own output: leave it out")


def inherited_quantization(path: Path, quantization: str | None) -> str | None:
    """The quantization of a draft for which none was asked for: the target's, or None if the draft is quantised already."""
    with errors_named(path):
        if is_converted(path):
            published: object = layer_config(read_manifest(head_directory(path) or path).config).storages
        else:
            published = read_scheme(read_config(path))
    return None if published else quantization


def load_draft(path: Path, target: LoadedTarget, *, token_map: Path | None = None, **how: Any) -> LoadedHead:
    """The head or the model for this target, in the target's dtype; arguments and errors are those of `load_head`.

    A model's vocabulary must be the target's (DraftModelConfig.beside); whether its tokenizer is, the caller checks.
    """
    if not is_draft_model(path):
        return load_head(path, target, token_map=token_map, **how)
    refuse_token_map(path, token_map)
    model = load_target(path, target.dtype, **how)
    with errors_named(path):
        return as_draft(model, target.config)


def as_draft(model: LoadedTarget, target: ModelConfig) -> LoadedHead:
    """The model as a draft of the target. Raises ValueError if it has another vocabulary."""
    head = abstract_model(DraftModelConfig.beside(model.config, target), model.dtype)
    return replace(head, params={"model": model.params})
