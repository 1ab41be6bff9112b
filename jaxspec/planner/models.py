"""The config and the weights' sizes of a model, from config.json and file headers; no weights are read."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from jaxspec.checkpoints.block_layouts import MARKOV
from jaxspec.checkpoints.checkpoint import Checkpoint, has_tensors
from jaxspec.checkpoints.converted import head_directory, is_converted, read_manifest
from jaxspec.checkpoints.heads import PLANS, algorithm_of, head_plan, usable_token_map
from jaxspec.checkpoints.json_files import read_config
from jaxspec.checkpoints.layout import TensorPlan
from jaxspec.checkpoints.layouts import MTP_PREFIX, target_layout
from jaxspec.checkpoints.quantization import quantised_plan
from jaxspec.checkpoints.storing import Storing, planned, with_storage
from jaxspec.checkpoints.tensor_files import errors_named
from jaxspec.config import ModelConfig
from jaxspec.models.block import BlockConfig
from jaxspec.models.eagle3 import Eagle3Config
from jaxspec.models.head import HeadConfig
from jaxspec.models.registry import abstract_model, target_config


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
    def total(self) -> int:
        return self.embedding + self.output + self.fusion + self.layers


def weights_of(config: ModelConfig | HeadConfig, dtype: str) -> Weights:
    """The sizes of the config's module on the device, its matrices stored as the config says."""
    sizes = {"embedding": 0, "output": 0, "fusion": 0, "layers": 0}
    groups = {"embed_tokens": "embedding", "draft_to_target": "embedding", "markov_in": "embedding", "lm_head": "output"}
    if isinstance(config, Eagle3Config | BlockConfig):
        groups["fc"] = "fusion"
    for keys, array in flatten_dict(abstract_model(config, jnp.dtype(dtype)).params).items():
        sizes[groups.get(keys[0], "layers")] += array.size * array.dtype.itemsize
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
    if is_converted(path):
        model = read_manifest(path).target
        return planned(TensorPlan("converted", model, target_layout(model)), None, Storing.DENSE, quantization).config
    with errors_named(path):
        model = target_config(config := read_config(path))
        plan = quantised_plan(TensorPlan("Hugging Face", model, target_layout(model)), config, {})
        return planned(plan, None, Storing.DENSE, quantization).config


def read_head(path: Path, target: ModelConfig, token_map: Path | None = None, quantization: str | None = None) -> HeadConfig:
    """The draft head in a directory or file, or of a lone config.json, beside this target.

    Raises ValueError if it is not a head, or does not fit.
    """
    with errors_named(path):
        if is_converted(path):
            where = head_directory(path)
            if where is None:
                raise ValueError("this is a converted target without a draft head")
            head = read_manifest(where).head
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
            if algorithm == "EAGLE" and head.layer.num_layers >= target.num_layers:
                raise ValueError(f"this is the config of a whole model of {head.layer.num_layers} layers, not of a draft head")
        found = (head.target_hidden_size, head.layer.vocab_size)
        if found != (target.hidden_size, target.vocab_size):
            raise ValueError(
                f"the draft head is for a target of hidden size {found[0]} and vocabulary {found[1]}, "
                f"not {target.hidden_size} and {target.vocab_size}"
            )
    hot_tokens = usable_token_map(head, token_map)
    return head if hot_tokens is None else replace(head, draft_vocab_size=len(hot_tokens))


def usual_tensors(config: dict) -> Collection[str]:
    """The tensors that heads with this config usually have, to recognize the kind of head from config.json alone."""
    shared = {"lm_head.weight", "d2t", "t2d"}
    if "dflash_config" in config or any("DFlash" in name or "DSpark" in name for name in config.get("architectures") or ()):
        norms = {"hidden_norm.weight", "layers.0.input_layernorm.weight", "layers.0.self_attn.q_norm.weight"}
        return {"fc.weight", *norms} | ({f"{MARKOV}1.weight"} if config.get("markov_rank") else set())
    if "speculators_model_type" in config:
        return {"layers.0.hidden_norm.weight", "embed_tokens.weight", *shared}
    if "draft_vocab_size" in config or any("Eagle3" in name for name in config.get("architectures") or ()):
        return {"midlayer.hidden_norm.weight", "midlayer.mlp.up_proj.weight", *shared}
    if config.get("num_nextn_predict_layers"):
        return {f"{MTP_PREFIX}0.input_proj.weight"}
    bias = {"fc.bias"} if config.get("bias", True) else set()
    return {"fc.weight", "layers.0.self_attn.q_proj.weight", "embed_tokens.weight"} | bias
