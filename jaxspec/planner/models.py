"""The config and the weights' sizes of a model, from config.json and file headers; no weights are read."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from jaxspec.checkpoints.checkpoint import Checkpoint, has_tensors
from jaxspec.checkpoints.converted import head_directory, is_converted, read_manifest
from jaxspec.checkpoints.draft_models import is_draft_model, refuse_token_map
from jaxspec.checkpoints.heads import PLANS, check_sizes, head_plan, usable_token_map
from jaxspec.checkpoints.hub import is_whole
from jaxspec.checkpoints.json_files import read_config
from jaxspec.checkpoints.kinds import algorithm_of, is_model_config, usual_tensors
from jaxspec.checkpoints.layout import TensorPlan
from jaxspec.checkpoints.layouts import target_layout
from jaxspec.checkpoints.loading import read_target_plan
from jaxspec.checkpoints.quantization import quantised_plan
from jaxspec.checkpoints.storing import Storing, config_stored_as, planned, with_storage
from jaxspec.checkpoints.tensor_files import errors_named
from jaxspec.model_config import ModelConfig
from jaxspec.models.block import BlockConfig
from jaxspec.models.draft_model import DraftModelConfig
from jaxspec.models.eagle3 import Eagle3Config
from jaxspec.models.families import target_config
from jaxspec.models.head import HeadConfig
from jaxspec.models.registry import abstract_model
from jaxspec.models.sharing import Shares, axis_of


@dataclass(frozen=True)
class Weights:
    """Bytes of a target's or head's weights, grouped by how often they are read."""

    parameters: int
    """Count, not bytes."""
    embedding: int
    """Tables; a forward reads only its tokens' rows. A tied embedding is also the output projection."""
    output: int
    """The model's own output projection, read for logits."""
    fusion: int
    """EAGLE-3's projection of the target's features, read once per cycle."""
    layers: int
    """Everything else, read by every forward."""

    @property
    def projection(self) -> int:
        """The output projection, which may be the embedding."""
        return self.output or self.embedding

    @property
    def total(self) -> int:
        return self.embedding + self.output + self.fusion + self.layers


def weights_of(config: ModelConfig | HeadConfig, dtype: str, shares: Shares | None = None) -> Weights:
    """The sizes of the config's module on all devices together, with its matrices stored as the config says. What devices don't
    divide counts once for each. `shares` None: one device."""
    if isinstance(config, DraftModelConfig):
        return weights_of(config.layer, dtype, shares)
    sizes = {"embedding": 0, "output": 0, "fusion": 0, "layers": 0}
    groups = {"embed_tokens": "embedding", "draft_to_target": "embedding", "markov_in": "embedding", "lm_head": "output"}
    if isinstance(config, Eagle3Config | BlockConfig):
        groups["fc"] = "fusion"
    for keys, array in flatten_dict(abstract_model(config, jnp.dtype(dtype)).params).items():
        copies = 1 if shares is None or ((axis := axis_of(keys)) and shares.divides(axis)) else shares.devices
        sizes[groups.get(keys[0], "layers")] += copies * array.size * array.dtype.itemsize
    dense = jax.tree.leaves(abstract_model(unquantised(config), jnp.dtype(dtype)).params)
    parameters = sum(array.size for array in dense if jnp.issubdtype(array.dtype, jnp.floating))  # a token map is none
    return Weights(parameters, **sizes)


def unquantised(config: ModelConfig | HeadConfig) -> Any:
    """The config of the same model, its matrices in the dtype of activations."""
    return with_storage(config, None)


def read_target(path: Path, quantization: str | None = None) -> ModelConfig:
    """The target of a model directory, Hugging Face's or converted, or of a lone config.json, stored as on a GPU.

    Raises ValueError if there is none or it is not supported.
    """
    with errors_named(path):
        if is_converted(path):
            return config_stored_as(abstract_model(read_manifest(path).target, jnp.float32), Storing.DENSE, quantization)
        if path.is_dir() and is_whole(path):
            with Checkpoint(path) as checkpoint:
                plan: TensorPlan = read_target_plan(path, checkpoint)
        else:
            model = target_config(config := read_config(path))
            plan = quantised_plan(TensorPlan("Hugging Face", model, target_layout(model)), config, {})
        return planned(plan, None, Storing.DENSE, quantization).config


def read_head(path: Path, target: ModelConfig, token_map: Path | None = None, quantization: str | None = None) -> HeadConfig:
    """The draft head or model in a directory or file, or of a lone config.json, beside this target.

    Raises ValueError if it is neither a head nor a model, or does not fit.
    """
    own_map: list[int] | None = None
    with errors_named(path):
        if is_whole_model(path):
            refuse_token_map(path, token_map)
            return DraftModelConfig.beside(read_target(path, quantization), target)
        if where := head_directory(path) if is_converted(path) else None:
            manifest = read_manifest(where)
            own_map = manifest.token_map
            head = config_stored_as(abstract_model(manifest.head, jnp.float32), Storing.DENSE, quantization)
        elif has_tensors(path):
            with Checkpoint(path) as checkpoint:
                plan = head_plan(checkpoint, read_config(path), target)
                plan.check(checkpoint)
                head = planned(plan, None, Storing.DENSE, quantization).config
        else:
            config = read_config(path)
            names = usual_tensors(config)
            algorithm = algorithm_of(names) or "EAGLE"
            plan = quantised_plan(PLANS[algorithm](config, names, target), config, {})
            head = planned(plan, None, Storing.DENSE, quantization).config
        check_sizes(head, target)
    hot_tokens = own_map if token_map is None else usable_token_map(head, token_map)
    return head if hot_tokens is None else replace(head, draft_vocab_size=len(hot_tokens))


def is_whole_model(path: Path) -> bool:
    """Whether a path holds a whole model that drafts, not a head; of a config.json alone by `is_model_config`."""
    if is_converted(path) or has_tensors(path):
        return is_draft_model(path)
    return is_model_config(read_config(path))
