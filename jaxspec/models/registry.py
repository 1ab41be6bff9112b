"""The target families that run here, by the `model_type` of their config.json. All share one decoder block (models/llama.py)."""

from typing import NamedTuple

from jaxspec.config import ModelConfig, require


class Family(NamedTuple):
    """What sets a family's block apart from Llama's."""

    covers: str
    """Models of the family that are known to fit, for people."""
    qkv_bias: bool = False
    qk_norm: bool = False
    attention_bias_means_more: bool = True
    """`attention_bias: true` adds a bias that this project has no place for (on the output projection)."""


FAMILIES = {
    "llama": Family("Llama 2, 3, 3.1, 3.2, 3.3 and models with their layout (Vicuna, DeepSeek-R1-Distill-Llama)"),
    "qwen2": Family("Qwen2, Qwen2.5 (dense)", qkv_bias=True, attention_bias_means_more=False),
    "qwen3": Family("Qwen3 (dense)", qk_norm=True),
    "mimo": Family("MiMo-7B, with its MTP layer as a draft head", qkv_bias=True, attention_bias_means_more=False),
}


def target_config(config: dict) -> ModelConfig:
    """The target that a config.json describes. Raises ValueError listing the families if there is none for its model_type."""
    name = require(config, "model_type")
    if name not in FAMILIES:
        listed = "".join(f"\n  {model_type}: {family.covers}" for model_type, family in FAMILIES.items())
        raise ValueError(f"config.json: model_type {name!r} is not supported; supported are:{listed}")
    family = FAMILIES[name]
    if config.get("attention_bias") and family.attention_bias_means_more:
        raise ValueError(f"config.json: attention_bias=True is not supported for {name} (it adds a bias to the output projection)")
    return ModelConfig.from_hf(config, qkv_bias=family.qkv_bias, qk_norm=family.qk_norm)
