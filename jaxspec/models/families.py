"""The target families, by the `model_type` of config.json. Importing this loads no JAX."""

from dataclasses import replace
from typing import NamedTuple

from jaxspec.checks import short
from jaxspec.config_json import checked, require
from jaxspec.model_config import ModelConfig


class Family(NamedTuple):
    """A family's differences from Llama's decoder block."""

    covers: str
    """Models of the family that are known to work, for error messages and docs."""
    qkv_bias: bool = False
    qk_norm: bool = False
    attention_bias_means_more: bool = True
    """In this family `attention_bias: true` also adds a bias to the output projection, which is not supported here."""
    may_switch_window: bool = True
    """In this family `use_sliding_window: false` turns the window off. False: the window's size alone turns it on."""


FAMILIES = {
    "llama": Family("Llama 2, 3, 3.1, 3.2, 3.3 and models with their layout (Vicuna, DeepSeek-R1-Distill-Llama)"),
    "mistral": Family("Mistral (dense, without a sliding window: 7B from v0.2 on)", may_switch_window=False),
    "qwen2": Family("Qwen2, Qwen2.5 (dense)", qkv_bias=True, attention_bias_means_more=False),
    "qwen3": Family("Qwen3 (dense)", qk_norm=True),
    "mimo": Family("MiMo-7B, with its MTP layer as a draft head", qkv_bias=True, attention_bias_means_more=False),
}


def target_config(config: dict) -> ModelConfig:
    """The target that a config.json describes. Raises ValueError, listing the families, for any other model_type."""
    name = require(checked(config), "model_type")
    if name not in FAMILIES:
        listed = "".join(f"\n  {model_type}: {family.covers}" for model_type, family in FAMILIES.items())
        raise ValueError(f"config.json: model_type {short(name)} is not supported; supported are:{listed}")
    family = FAMILIES[name]
    if config.get("attention_bias") and family.attention_bias_means_more:
        raise ValueError(f"config.json: attention_bias=True is not supported for {name} (it adds a bias to the output projection)")
    if config.get("sliding_window") is not None and not family.may_switch_window:
        raise ValueError(
            f"config.json: sliding_window={short(config['sliding_window'])} is not supported for {name} (only None is)"
        )
    model, ends = ModelConfig.from_hf(config, qkv_bias=family.qkv_bias, qk_norm=family.qk_norm), config.get("eos_token_id")
    return replace(model, eos_token_ids=tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,))
