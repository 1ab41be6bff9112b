"""Describes a checkpoint from names, shapes and config alone; no weights are loaded."""

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from jaxspec.checkpoints.checkpoint import Checkpoint
from jaxspec.checkpoints.converted import DRAFT, PARAMETERS, check_fit, is_converted, read_manifest
from jaxspec.checkpoints.heads import head_plan
from jaxspec.checkpoints.json_files import read_config
from jaxspec.checkpoints.kinds import algorithm_of, is_target
from jaxspec.checkpoints.layout import TensorPlan
from jaxspec.checkpoints.layouts import LAYER_IDS
from jaxspec.checkpoints.loading import read_target_plan, target_model_config
from jaxspec.checkpoints.tensor_files import TensorInfo, errors_named
from jaxspec.model_config import ModelConfig
from jaxspec.models.block import BlockConfig
from jaxspec.models.eagle3 import Eagle3Config
from jaxspec.models.head import HeadConfig
from jaxspec.models.registry import layer_config

LAYERS_OF_STAND_IN = 10_000
"""A head inspected without its target is planned for one that has every layer it may name."""


def describe(path: Path, target: Path | None = None) -> str:
    """A few lines: what it is, its sizes and parameters and, for a head, whether it fits the target. Raises ValueError, saying why,
    if it can't be read, is not supported, or does not fit."""
    if is_converted(path):
        return _describe_converted(path, target)
    with Checkpoint(path) as checkpoint, errors_named(path):
        if is_target(checkpoint.infos):
            plan: TensorPlan = read_target_plan(path, checkpoint)
        else:
            config = read_config(path)
            plan = head_plan(checkpoint, config, _stand_in(config) if target is None else target_model_config(target))
        plan.check(checkpoint)
        dtypes = _count(checkpoint.infos.values())
        lines = {"what": f"{_kind(plan.config)} ({plan.dialect})", **_sizes(plan.config)}
        files = len(set(checkpoint.file_of.values()))
        lines["parameters"] = f"{dtypes.total():,} in {len(checkpoint.infos)} tensors, {files} file{'s' * (files > 1)}"
        lines["dtypes"] = _listed(dtypes)
        if isinstance(plan.config, ModelConfig) and algorithm_of(checkpoint.infos):
            lines["draft head"] = f"comes with an {algorithm_of(checkpoint.infos)} layer"
        if target is not None:
            lines["fits"] = _fits(plan.config, target)
        return _table(lines)


def _describe_converted(path: Path, target: Path | None) -> str:
    manifest = read_manifest(path)
    with errors_named(path):
        if target is not None:
            fits = _fits(manifest.config, target)
            check_fit(manifest, target_model_config(target))
    with Checkpoint(path / PARAMETERS) as checkpoint:
        stored = checkpoint.infos
    dtypes = _count(stored.values())
    lines = {"what": f"{_kind(manifest.config)} (converted from {manifest.dialect})", **_sizes(manifest.config)}
    lines |= {"parameters": f"{dtypes.total():,} in {len(stored)} arrays", "dtypes": _listed(dtypes)}
    if is_converted(path / DRAFT):
        lines["draft head"] = f"comes with an {read_manifest(path / DRAFT).kind} head"
    if manifest.token_map is not None:
        lines["token map"] = f"{len(manifest.token_map)} tokens"
    if target is not None:
        lines["fits"] = fits
    return _table(lines)


def _count(arrays: Iterable[TensorInfo]) -> Counter[str]:
    """Parameters per dtype, or per format of blocks."""
    dtypes = Counter[str]()
    for array in arrays:
        dtypes[array.format or str(array.dtype)] += math.prod(array.shape)
    return dtypes


def _listed(dtypes: Counter[str]) -> str:
    return ", ".join(f"{dtype} {count:,}" for dtype, count in dtypes.most_common())


def _fits(config: ModelConfig | HeadConfig, target: Path) -> str:
    if isinstance(config, ModelConfig):
        raise ValueError("--target is for draft heads; this is a target itself")
    return f"yes: every tensor of the head has its place beside {target.name}"


def _kind(config: ModelConfig | HeadConfig) -> str:
    return "target" if isinstance(config, ModelConfig) else f"{config.algorithm} draft head"


def _sizes(config: ModelConfig | HeadConfig) -> dict[str, str]:
    """The config in readable lines."""
    layer = layer_config(config)
    extras = [name for name, has in (("q/k/v biases", layer.qkv_bias), ("q/k norms", layer.qk_norm)) if has]
    lines = {
        "layers": f"{layer.num_layers} x hidden {layer.hidden_size}, intermediate {layer.intermediate_size}",
        "attention": ", ".join([f"{layer.num_heads} heads, {layer.num_kv_heads} KV heads of {layer.head_dim}", *extras]),
        "vocabulary": f"{layer.vocab_size}",
        "rope": f"{layer.rope.kind}, theta {layer.rope.theta:g}",
    }
    if isinstance(config, HeadConfig):
        lines["vocabulary"] += f", draft {config.draft_vocab_size or 'the same'}"
        own = [name for name, has in (("embedding", config.own_embedding), ("lm_head", config.draft_vocab_size is not None)) if has]
        lines["brings"] = " and ".join(own) or "neither embedding nor lm_head: it uses the target's"
        lines["reads"] = "the target's hidden after its final norm"
    if isinstance(config, BlockConfig):
        lines["reads"] = f"the residual stream entering layers {', '.join(map(str, config.captured_layers))} of the target"
        lines["block"] = f"{config.block_size} positions, {config.max_steps} drafts; mask token {config.mask_token_id}"
        text = (f"{window} positions" if window else "all of the text" for window in config.windows)
        block = ("what is before it in the block" if causal else "all of the block" for causal in config.causal)
        lines["sees"] = "; ".join(dict.fromkeys(f"{each} and {own}" for each, own in zip(text, block, strict=True)))
    if isinstance(config, Eagle3Config):
        default = max(config.captured_layers) >= LAYERS_OF_STAND_IN // 2
        layers = "2, N/2 and N-3" if default else ", ".join(map(str, config.captured_layers))
        lines["reads"] = f"the residual stream entering layers {layers} of the target"
        names = ("fc_bias", "fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
        lines["switches"] = ", ".join(name for name in names if getattr(config, name)) or "none"
    return lines


def _stand_in(config: dict) -> ModelConfig:
    """A target as the head's config describes it; where that names no size, the target has the head's own."""
    own = config.get("transformer_layer_config") or config
    size = config.get("target_hidden_size") or own.get("hidden_size")
    layers = config.get("num_target_layers") or LAYERS_OF_STAND_IN
    standing = {"num_hidden_layers": layers, "hidden_size": size, "tie_word_embeddings": True}
    standing |= {"layer_types": None, "sliding_window": None, "use_sliding_window": False}
    return ModelConfig.from_hf({key: value for key, value in own.items() if key != LAYER_IDS} | standing)


def _table(lines: dict[str, str]) -> str:
    return "\n".join(f"{name:>11}  {value}" for name, value in lines.items())
