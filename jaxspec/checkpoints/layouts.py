"""The layouts of all supported checkpoints: targets, MTP layers, EAGLE-1/2 heads and EAGLE-3 heads."""

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from jaxspec.checkpoints.kinds import MTP_PREFIX, is_mtp_tensor
from jaxspec.checkpoints.layout import CACHE_SCALES, DraftVocabulary, Layout, TensorPlan, decoder_layer, linear, nested, norm, table
from jaxspec.config_json import refuse
from jaxspec.model_config import ModelConfig
from jaxspec.models.eagle import EagleConfig
from jaxspec.models.eagle3 import Eagle3Config, default_captured_layers
from jaxspec.models.families import target_config
from jaxspec.models.mtp import MTPConfig


def mtp_plan(config: dict, names: Collection[str], target: ModelConfig) -> TensorPlan[MTPConfig]:
    """The plan for the MTP layer of a MiMo checkpoint. Raises ValueError if it has several."""
    layers = sorted({name.removeprefix(MTP_PREFIX).split(".")[0] for name in names if is_mtp_tensor(name)})
    if layers != ["0"]:
        raise ValueError(
            f"expected one MTP layer, {MTP_PREFIX}0; this checkpoint has {', '.join(layers)}. "
            "Serve it without speculation, or keep the first layer only"
        )
    base = target_config(config)
    layer = ModelConfig(**{**vars(base), "num_layers": 1, "tie_word_embeddings": False})
    mtp = MTPConfig(layer=layer, target_hidden_size=target.hidden_size)
    return TensorPlan("MiMo", mtp, mtp_layout(mtp), frozenset(name for name in names if not is_mtp_tensor(name)))


def mtp_layout(config: MTPConfig) -> Layout:
    """MiMo's names."""
    prefix, size = MTP_PREFIX + "0.", config.layer.hidden_size
    return {
        **nested("token_layernorm", layout=norm(prefix + "token_layernorm", size)),
        **nested("hidden_layernorm", layout=norm(prefix + "hidden_layernorm", size)),
        **nested("input_proj", layout=linear(2 * size, (prefix + "input_proj", size))),
        **nested("layer", layout=decoder_layer(prefix, config.layer)),
        **nested("final_layernorm", layout=norm(prefix + "final_layernorm", size)),
    }


def target_plan(config: dict, names: Collection[str]) -> TensorPlan[ModelConfig]:
    """The plan for a target. Raises ValueError for a family or attribute that is not supported."""
    model = target_config(config)
    if model.num_layers > len(names):
        raise ValueError(f"config.json: num_hidden_layers is {model.num_layers}, but the files have {len(names)} tensors")
    model = replace(model, kv_scales=any(f"model.layers.0.self_attn.{scale}" in names for scale, _ in CACHE_SCALES))
    idle = ("rotary_emb.inv_freq", "q_scale", "q_zero_point")  # of old Llama 2 files, and of quantised queries
    ignored = {f"model.layers.{i}.self_attn.{name}" for i in range(model.num_layers) for name in idle}
    ignored |= {name for name in names if is_mtp_tensor(name)}  # part of the draft head's plan
    if model.tie_word_embeddings:
        ignored.add("lm_head.weight")
    return TensorPlan(f"Hugging Face, {config['model_type']}", model, target_layout(model, names), frozenset(ignored))


def target_layout(config: ModelConfig, names: Collection[str] = ()) -> Layout:
    """Hugging Face's names. `names`: as of `decoder_layer`."""
    size = config.hidden_size
    layout: Layout = {
        ("embed_tokens",): table("model.embed_tokens.weight", config.vocab_size, size),
        **nested("norm", layout=norm("model.norm", size)),
    }
    for index in range(config.num_layers):
        layout |= nested("layers", index, layout=decoder_layer(f"model.layers.{index}.", config, names=names))
    if not config.tie_word_embeddings:
        layout |= nested("lm_head", layout=linear(size, ("lm_head", config.vocab_size)))
    return layout


EAGLE_LAYER = "layers.0."


def eagle_plan(config: dict, names: Collection[str], target: ModelConfig) -> TensorPlan[EagleConfig]:
    """The plan for an EAGLE head. Its tensors decide which biases it has: configs leave them out or are wrong."""
    refuse(config, {"layernorms": False})
    layer = ModelConfig.from_hf(
        config | {"tie_word_embeddings": False},
        qkv_bias=EAGLE_LAYER + "self_attn.q_proj.bias" in names,
        qk_norm=EAGLE_LAYER + "self_attn.q_norm.weight" in names,
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
    return TensorPlan("EAGLE-1/2, SafeAILab and SGLang", head, eagle_layout(head))


def eagle_layout(config: EagleConfig) -> Layout:
    """SafeAILab's names. A head that took a token map keeps no lm_head of its own on disk: it is rows of the target's."""
    layer, size = config.layer, config.layer.hidden_size
    layout = nested("fc", layout=linear(2 * size, ("fc", size), bias=config.fc_bias))
    layout |= decoder_layer(EAGLE_LAYER, layer, input_norm=None)
    for index in range(1, layer.num_layers):
        layout |= nested("later_layers", index - 1, layout=decoder_layer(f"layers.{index}.", layer))
    if config.own_embedding:
        layout["embed_tokens",] = table("embed_tokens.weight", layer.vocab_size, size)
    return layout


LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
OUTPUT_IDS = ("target_layer_ids", "aux_hidden_states_layer_ids")
"""The same setting at the top level of DeepSpec's and AngelSlim's configs, which name layers by output."""


class Eagle3Names(NamedTuple):
    """The names that differ between producers."""

    first_layer: str = "midlayer."
    later_norm: str = "hidden_norm"
    """The norm before attention in later layers: hidden_norm in SGLang's class, input_layernorm in speculators and vLLM."""
    legacy_stream_norms: bool = False
    """The norms of three streams are called aux_norm_low, _mid and _high instead of fc_norm.0, .1 and .2."""

    def stream_norm(self, index: int) -> str:
        """The name of one stream's norm."""
        return ("aux_norm_low", "aux_norm_mid", "aux_norm_high")[index] if self.legacy_stream_norms else f"fc_norm.{index}"


SAFEAILAB = Eagle3Names()
SPECULATORS = Eagle3Names("layers.0.", "input_layernorm")


def eagle3_plan(config: dict, names: Collection[str], target: ModelConfig) -> TensorPlan[Eagle3Config]:
    """The plan for an EAGLE-3 head. Raises ValueError for settings that are not supported or contradict each other."""
    from_speculators = "speculators_model_type" in config
    sizes = config
    if from_speculators:  # they name the dtype beside the layer
        sizes = {"dtype": config.get("dtype") or config.get("torch_dtype")} | (config.get("transformer_layer_config") or {})
    settings = {**config, **(config.get("eagle_config") or {})}
    refuse(settings, {"speculators_model_type": "eagle3", "use_aux_hidden_state": True, "parallel_drafting": False})
    spelling = names_in(names)
    prefix = spelling.first_layer
    if prefix == "midlayer.":  # there is one midlayer; some configs repeat the target's number of layers here
        sizes = sizes | {"num_hidden_layers": sum(name.endswith(".post_attention_layernorm.weight") for name in names)}
    layer = ModelConfig.from_hf(
        sizes,
        qkv_bias=prefix + "self_attn.q_proj.bias" in names,
        qk_norm=prefix + "self_attn.q_norm.weight" in names,
    )
    head = Eagle3Config(
        layer=ModelConfig(**{**vars(layer), "tie_word_embeddings": False}),
        target_hidden_size=settings.get("target_hidden_size") or layer.hidden_size,
        captured_layers=captured_layers(config, target.num_layers),
        draft_vocab_size=own_vocabulary(settings, layer, target, names),
        own_embedding="embed_tokens.weight" in names,
        fc_bias="fc.bias" in names,
        fc_norm=switch(settings, ("fc_norm", "use_aux_norm"), spelling.stream_norm(0) + ".weight" in names),
        norm_before_fc=switch(settings, ("norm_before_fc",), "input_norm.weight" in names),
        norm_before_residual=switch(settings, ("norm_before_residual",), False),
        norm_output=switch(settings, ("norm_output",), False),
    )
    unused = {f"layers.{i}.input_layernorm.weight" for i in range(1, layer.num_layers)}  # where hidden_norm is used
    dialect = "speculators" if from_speculators else "SafeAILab, SGLang and SpecForge"
    has_token_map = "d2t" in names or head.draft_vocab_size not in (None, layer.vocab_size)
    layout = eagle3_layout(head, spelling, has_token_map=has_token_map, has_members="t2d" in names)
    return TensorPlan(f"EAGLE-3, {dialect}", head, layout, frozenset(unused))


def names_in(names: Collection[str]) -> Eagle3Names:
    """The spelling that a file uses."""
    return Eagle3Names(
        first_layer="midlayer." if "midlayer.hidden_norm.weight" in names else "layers.0.",
        later_norm="hidden_norm" if "layers.1.hidden_norm.weight" in names else "input_layernorm",
        legacy_stream_norms="aux_norm_low.weight" in names,
    )


def switch(settings: dict, names: tuple[str, ...], default: bool) -> bool:
    """The first of these settings in the config; the default, which the tensors decide, if the config has none."""
    return next((bool(settings[name]) for name in names if settings.get(name) is not None), default)


def captured_layers(config: dict, num_layers: int) -> tuple[int, ...]:
    """The target's layers whose *input* the head reads.

    Configs name them in two ways. SGLang, SpecForge and NVIDIA (inside `eagle_config`), DeepSpec and AngelSlim name the layer whose
    output is taken, one less; speculators and vLLM (at the top level of a speculators config) name the layer whose input is taken.

    In:  {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, 32
    Out: (2, 16, 29), as for {"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": [2, 16, 29]}
    """
    inputs, by_input = config.get(LAYER_IDS), "speculators_model_type" in config
    if inputs is not None and not by_input:
        raise ValueError(
            f"config.json has {LAYER_IDS} at its top level, which does not say whether it names layers by their output or their "
            "input: move it into eagle_config (SGLang's meaning: output), or give speculators_model_type (input)"
        )
    outputs = [(config.get("eagle_config") or {}).get(LAYER_IDS), *(config.get(name) for name in OUTPUT_IDS if not by_input)]
    ids = inputs if inputs is not None else next(filter(None, outputs), None)  # []: the default ones
    layers = None if ids is None else tuple(layer + (inputs is None) for layer in ids)
    count = config.get("num_aux_hidden_states") or (len(layers) if layers else 3)
    if layers is None and count == 3:
        return default_captured_layers(num_layers)
    if layers is None or len(layers) != count:
        raise ValueError(f"config.json: num_aux_hidden_states is {count}, but {LAYER_IDS} names {len(layers or ())} layers")
    if not all(0 <= layer <= num_layers for layer in layers):
        raise ValueError(f"config.json: {LAYER_IDS} names layers that a target of {num_layers} layers does not have")
    return layers


def own_vocabulary(settings: dict, layer: ModelConfig, target: ModelConfig, names: Collection[str]) -> int | None:
    """Size of the head's own output vocabulary; None if it uses the target's lm_head.

    An lm_head in the file is the head's own. Without one, only a head that names no draft vocabulary may use the target's:
    engines that use a random matrix instead accept no drafts, without any error.
    """
    size = settings.get("draft_vocab_size")
    if "lm_head.weight" in names:
        return size or layer.vocab_size
    if size is not None:
        raise ValueError(
            f"tensor 'lm_head.weight' is missing (expected with shape {(size, layer.hidden_size)}): the head has its own"
        )
    if layer.hidden_size != target.hidden_size:
        raise ValueError(f"the head has no lm_head, and is {layer.hidden_size} wide: the target's takes {target.hidden_size}")
    if layer.tie_word_embeddings and not target.tie_word_embeddings:
        raise ValueError(
            "config.json: tie_word_embeddings=True without lm_head is supported only if the target's embeddings are tied"
        )
    return None


def eagle3_layout(config: Eagle3Config, spelling: Eagle3Names, *, has_token_map: bool, has_members: bool) -> Layout:
    """The layout in a producer's spelling. `has_token_map`: the file has d2t; `has_members`: it has t2d."""
    layer, size = config.layer, config.layer.hidden_size
    layout = nested("fc", layout=linear(config.feature_size, ("fc", size), bias=config.fc_bias))
    layout |= nested("norm", layout=norm("norm", size))
    layout |= nested("hidden_norm", layout=norm(spelling.first_layer + "hidden_norm", size))
    layout |= decoder_layer(spelling.first_layer, layer, input_size=2 * size)
    for index in range(1, layer.num_layers):
        later = decoder_layer(f"layers.{index}.", layer, input_norm=spelling.later_norm)
        layout |= nested("later_layers", index - 1, layout=later)
    if config.fc_norm:
        for index in range(len(config.captured_layers)):
            layout |= nested("fc_norm", index, layout=norm(spelling.stream_norm(index), config.target_hidden_size))
    if config.norm_before_fc:
        layout |= nested("input_norm", layout=norm("input_norm", config.feature_size))
    if config.own_embedding:
        layout["embed_tokens",] = table("embed_tokens.weight", layer.vocab_size, size)
    if config.draft_vocab_size is not None:
        layout |= nested("lm_head", layout=linear(size, ("lm_head", config.draft_vocab_size)))
        layout["draft_to_target",] = DraftVocabulary(config.draft_vocab_size, layer.vocab_size, has_token_map, has_members)
    return layout
