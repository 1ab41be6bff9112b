"""Targets in Hugging Face's layout: Llama, Qwen2, Qwen3, MiMo."""

from collections.abc import Collection

from jaxspec.checkpoints.layout import Layout, decoder_layer, linear, norm, table, under
from jaxspec.checkpoints.mtp_layout import is_mtp_tensor
from jaxspec.checkpoints.plan import Plan
from jaxspec.config import ModelConfig
from jaxspec.models.registry import target_config


def is_target(names: Collection[str]) -> bool:
    """Whether the tensors are those of a whole model."""
    return "model.embed_tokens.weight" in names and "model.norm.weight" in names


def target_plan(config: dict, names: Collection[str]) -> Plan[ModelConfig]:
    """The plan for a target. Raises ValueError for a family or attribute that is not supported."""
    model = target_config(config)
    ignored = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(model.num_layers)}  # old Llama 2 files
    ignored |= {name for name in names if is_mtp_tensor(name)}  # another plan's: the draft head inside a MiMo
    if model.tie_word_embeddings:
        ignored.add("lm_head.weight")
    return Plan(f"Hugging Face, {config['model_type']}", model, target_layout(model), frozenset(ignored))


def target_layout(config: ModelConfig) -> Layout:
    """Hugging Face's names."""
    size = config.hidden_size
    layout: Layout = {
        ("embed_tokens",): table("model.embed_tokens.weight", config.vocab_size, size),
        **under("norm", layout=norm("model.norm", size)),
    }
    for index in range(config.num_layers):
        layout |= under("layers", index, layout=decoder_layer(f"model.layers.{index}.", config))
    if not config.tie_word_embeddings:
        layout |= under("lm_head", layout=linear(size, ("lm_head", config.vocab_size)))
    return layout
