"""MiMo's MTP layer: tensors `model.mtp_layers.0.*` inside the target's checkpoint."""

from collections.abc import Collection

from jaxspec.checkpoints.layout import Layout, decoder_layer, linear, norm, under
from jaxspec.checkpoints.plan import Plan
from jaxspec.config import ModelConfig
from jaxspec.models.mtp import MTPConfig
from jaxspec.models.registry import target_config

PREFIX = "model.mtp_layers."


def is_mtp_tensor(name: str) -> bool:
    """Whether a tensor belongs to an MTP layer."""
    return name.startswith(PREFIX)


def mtp_plan(config: dict, names: Collection[str], target: ModelConfig) -> Plan[MTPConfig]:
    """The plan for the MTP layer of a MiMo checkpoint. Raises ValueError if it has several."""
    layers = sorted({name.removeprefix(PREFIX).split(".")[0] for name in names if is_mtp_tensor(name)})
    if layers != ["0"]:
        raise ValueError(
            f"one MTP layer, {PREFIX}0, was expected; this checkpoint has {', '.join(layers)}. "
            "Serve it without speculation, or keep the first layer only"
        )
    base = target_config(config)
    layer = ModelConfig(**{**vars(base), "num_layers": 1, "tie_word_embeddings": False})
    mtp = MTPConfig(layer=layer, target_hidden_size=target.hidden_size)
    return Plan("MiMo", mtp, mtp_layout(mtp), frozenset(name for name in names if not is_mtp_tensor(name)))


def mtp_layout(config: MTPConfig) -> Layout:
    """MiMo's names."""
    prefix, size = PREFIX + "0.", config.layer.hidden_size
    return {
        **under("token_layernorm", layout=norm(prefix + "token_layernorm", size)),
        **under("hidden_layernorm", layout=norm(prefix + "hidden_layernorm", size)),
        **under("input_proj", layout=linear(2 * size, (prefix + "input_proj", size))),
        **under("layer", layout=decoder_layer(prefix, config.layer)),
        **under("final_layernorm", layout=norm(prefix + "final_layernorm", size)),
    }
