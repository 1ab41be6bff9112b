"""EAGLE-1 / EAGLE-2 heads in SafeAILab's layout, which SGLang's copies share."""

from collections.abc import Collection

from jaxspec.checkpoints.layout import Layout, decoder_layer, linear, table, under
from jaxspec.checkpoints.plan import Plan
from jaxspec.config import ModelConfig, refuse
from jaxspec.models.eagle import EagleConfig

FIRST_LAYER = "layers.0."


def is_eagle(names: Collection[str]) -> bool:
    """An EAGLE-1/2 head has `fc` and a first layer without any norm in front of its attention."""
    in_front = {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight"}
    return "fc.weight" in names and "layers.0.self_attn.q_proj.weight" in names and in_front.isdisjoint(names)


def eagle_plan(config: dict, names: Collection[str], target: ModelConfig) -> Plan[EagleConfig]:
    """The plan for an EAGLE head. Which biases it has, the file says: configs are silent, or wrong, about them."""
    refuse(config, {"layernorms": False})
    layer = ModelConfig.from_hf(
        config | {"tie_word_embeddings": False},
        qkv_bias=FIRST_LAYER + "self_attn.q_proj.bias" in names,
        qk_norm=FIRST_LAYER + "self_attn.q_norm.weight" in names,
    )
    head = EagleConfig(
        layer=layer,
        target_hidden_size=target.hidden_size,
        fc_bias="fc.bias" in names,
        own_embedding="embed_tokens.weight" in names,
    )
    if layer.hidden_size != target.hidden_size:
        raise ValueError(
            f"an EAGLE head is as wide as its target ({target.hidden_size}), this one's hidden_size is {layer.hidden_size}"
        )
    return Plan("EAGLE-1/2, SafeAILab and SGLang", head, eagle_layout(head))


def eagle_layout(config: EagleConfig) -> Layout:
    """SafeAILab's names. A head that took a token map keeps no lm_head of its own on disk: it is rows of the target's."""
    layer, size = config.layer, config.layer.hidden_size
    layout = under("fc", layout=linear(2 * size, ("fc", size), bias=config.fc_bias))
    layout |= decoder_layer(FIRST_LAYER, layer, input_norm=None)
    for index in range(1, layer.num_layers):
        layout |= under("later_layers", index - 1, layout=decoder_layer(f"layers.{index}.", layer))
    if config.own_embedding:
        layout["embed_tokens",] = table("embed_tokens.weight", layer.vocab_size, size)
    return layout
