"""Exporting: the config.json and the tensor names of a model in each producer's dialect."""

import warnings
from typing import Any, NamedTuple

from jaxspec.checkpoints.block_layouts import block_layout
from jaxspec.checkpoints.layout import Layout
from jaxspec.checkpoints.layouts import LAYER_IDS, SAFEAILAB, SPECULATORS, eagle3_layout, eagle_layout, mtp_layout
from jaxspec.model_config import ModelConfig
from jaxspec.models.block import BlockConfig, DSparkConfig
from jaxspec.models.eagle import EagleConfig
from jaxspec.models.eagle3 import Eagle3Config
from jaxspec.models.head import HeadConfig
from jaxspec.models.mtp import MTPConfig
from jaxspec.rope import RopeConfig

DIALECTS = ("safeailab", "sglang", "speculators", "mimo", "z-lab", "deepspec")
OWN_DIALECTS = {"EAGLE": "safeailab", "EAGLE3": "safeailab", "MTP": "mimo", "DFLASH": "z-lab", "DSPARK": "deepspec"}
"""The dialect of each kind's authors."""
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_SETTINGS = {
    "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
}


class Exported(NamedTuple):
    """A head in a dialect."""

    config: dict
    """The contents of config.json, without a dtype."""
    layout: Layout
    one_file: bool = False
    """The dialect's own engine reads no shards."""
    zeros: tuple[tuple[str, int], ...] = ()
    """Names and lengths of biases that the head does not have, and that the dialect's own engine would leave uninitialised."""


def head_checkpoint(config: HeadConfig, dialect: str) -> Exported:
    """The head's config.json and layout in a dialect. Raises ValueError for one that is unknown or can't hold this head."""
    if dialect not in DIALECTS:
        raise ValueError(f"dialect must be one of {', '.join(DIALECTS)}; got {dialect!r}")
    if isinstance(config, MTPConfig) and dialect == "mimo":
        settings: dict[str, Any] = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
        return Exported(hf_config(config.layer) | settings, mtp_layout(config))
    if isinstance(config, EagleConfig) and dialect == "safeailab":
        settings = {"architectures": ["LlamaForCausalLM"], "bias": config.fc_bias, "qkv_bias": config.layer.qkv_bias}
        return Exported(_sizes(config.layer, dialect) | settings, eagle_layout(config), one_file=True)
    if isinstance(config, EagleConfig) and dialect == "sglang":
        # `bias` would give q, k, v and o biases there, `qkv_bias` is not read, and fc always has one
        settings = {"architectures": [f"{'Qwen2' if config.layer.qkv_bias else 'Llama'}ForCausalLMEagle"]}
        zeros = () if config.fc_bias else (("fc.bias", config.layer.hidden_size),)
        return Exported(hf_config(config.layer) | settings, eagle_layout(config), zeros=zeros)
    if isinstance(config, BlockConfig) and dialect == ("deepspec" if config.predicts_next else "z-lab"):
        return _block(config)
    if isinstance(config, Eagle3Config) and dialect in ("safeailab", "sglang", "speculators"):
        return _speculators(config) if dialect == "speculators" else _eagle3(config, dialect)
    which = " that predict the next token" if isinstance(config, BlockConfig) and config.predicts_next else ""
    raise ValueError(f"{config.algorithm} heads{which} can't be written in the {dialect} dialect")


def warn_of_unread(config: HeadConfig, dialect: str) -> None:
    """Warns of each setting that is written but not read by the dialect's own engine. Raises ValueError for one that the engine
    refuses."""
    engines = {"safeailab": "SafeAILab's code", "sglang": "SGLang 0.5.23", "speculators": "speculators"}
    if dialect not in engines:
        return
    layer, unread = config.layer, dict[str, bool]()
    if dialect != "speculators":
        unread["norms of q and k are"] = layer.qk_norm
    if dialect == "safeailab":
        if layer.rope.kind not in ("default", "linear"):
            raise ValueError(f"the head's rope type is {layer.rope.kind}, and SafeAILab's code knows none but default and linear")
        unread["rope_theta beside a linear scaling is"] = layer.rope.kind == "linear" and layer.rope.theta != RopeConfig.theta
    if isinstance(config, Eagle3Config):
        unread["the bias of fc is"] = config.fc_bias
    if isinstance(config, Eagle3Config) and dialect != "speculators":
        unread |= {"norm_before_residual=true is": config.norm_before_residual, "biases of q, k and v are": layer.qkv_bias}
        unread["every layer but the first is"] = layer.num_layers > 1
        if dialect == "safeailab":
            unread |= {f"{name}=true is": vars(config)[name] for name in ("norm_output", "fc_norm", "norm_before_fc")}
            last = config.captured_layers[-1]
            unread["the choice of the target's layers is"] = config.captured_layers != (2, (last + 3) // 2, last)
    for what in (name for name, is_set in unread.items() if is_set):
        warnings.warn(f"{what} written, but {engines[dialect]} does not read that", stacklevel=3)


def _sizes(layer: ModelConfig, dialect: str) -> dict[str, Any]:
    """`hf_config`, with a linear scaling as SafeAILab's code takes it."""
    scaling = {"type": "linear", "factor": layer.rope.factor}
    return hf_config(layer) | ({"rope_scaling": scaling} if dialect == "safeailab" and layer.rope.kind == "linear" else {})


def _eagle3(config: Eagle3Config, dialect: str) -> Exported:
    if 0 in config.captured_layers:
        raise ValueError(f"the head reads the input of layer 0, which the {dialect} dialect can't name: it names layers by output")
    settings: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if dialect == "sglang" else "LlamaForCausalLM"],
        "draft_vocab_size": config.draft_vocab_size,
        "num_aux_hidden_states": len(config.captured_layers),  # no `bias`, which gives o one in SGLang, uninitialised
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "norm_before_residual": config.norm_before_residual,
        "eagle_config": {
            LAYER_IDS: [layer - 1 for layer in config.captured_layers],
            "use_aux_hidden_state": True,
            "norm_before_fc": config.norm_before_fc,
        },
    }
    if config.target_hidden_size != config.layer.hidden_size:  # with this setting SafeAILab's code reads no embedding
        settings["target_hidden_size"] = config.target_hidden_size
    layout = eagle3_layout(config, SAFEAILAB, **_has_map(config))
    return Exported(_sizes(config.layer, dialect) | settings, layout, dialect == "safeailab")


def _block(config: BlockConfig) -> Exported:
    """The config of z-lab, which JetSpec shares, or of DeepSpec. Without a setting `causal`, layers with a window are causal."""
    has_window, widths = tuple(size is not None for size in config.windows), {size for size in config.windows if size is not None}
    if len(widths) > 1 or (config.causal != has_window and len(set(config.causal)) > 1):
        raise ValueError("config.json has one place for causal and one for sliding_window, and the head's layers differ")
    settings: dict[str, Any] = {
        "target_layer_ids": [layer - 1 for layer in config.captured_layers],
        "mask_token_id": config.mask_token_id,
    }
    if config.causal != has_window:
        settings |= dict.fromkeys(("causal_head", "causal"), config.causal[0])
    if config.predicts_next:
        rank = config.markov_rank if isinstance(config, DSparkConfig) else 0
        own = {"architectures": ["Qwen3DSparkModel"], "markov_rank": rank, "markov_head_type": "vanilla"} | settings
    else:
        own = {"architectures": ["DFlashDraftModel"], "dflash_config": settings}
    windows = {
        "layer_types": ["full_attention" if size is None else "sliding_attention" for size in config.windows],
        "sliding_window": next(iter(widths), None),
        "use_sliding_window": bool(widths),
    }
    sizes = {"num_target_layers": config.target_layers, "block_size": config.block_size}
    return Exported(hf_config(config.layer) | sizes | windows | own, block_layout(config))


def _speculators(config: Eagle3Config) -> Exported:
    if config.draft_vocab_size is None:
        raise ValueError("the head uses the target's lm_head, and the speculators dialect has no way to say so")
    if config.layer.qkv_bias:
        raise ValueError("the head has biases of q, k and v, and the speculators dialect has no way to say so")
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    settings: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        LAYER_IDS: list(config.captured_layers),
        "fc_norm": config.fc_norm,
        "norm_before_fc": config.norm_before_fc,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "tie_word_embeddings": False,
        "transformer_layer_config": hf_config(config.layer),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": None, "architectures": []},
        },
    }
    return Exported(settings, eagle3_layout(config, SPECULATORS, **_has_map(config)))


def _has_map(config: Eagle3Config) -> dict[str, bool]:
    """A head over the whole vocabulary has neither d2t nor t2d."""
    has_map = config.draft_vocab_size not in (None, config.layer.vocab_size)
    return {"has_token_map": has_map, "has_members": has_map}


def hf_config(config: ModelConfig) -> dict:
    """The contents of a config.json with these sizes, without a dtype."""
    model_type = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
    longest = config.max_position_embeddings
    if config.rope.kind == "linear":  # the length before the scaling
        longest = min(longest, config.rope.original_max_position)
    return {
        "architectures": [ARCHITECTURES[model_type]], "model_type": model_type, "hidden_act": "silu",
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads, "head_dim": config.head_dim,
        "num_key_value_heads": config.num_kv_heads, "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": longest, "tie_word_embeddings": config.tie_word_embeddings,
        **rope_settings(config.rope),
        **({"eos_token_id": list(config.eos_token_ids)} if config.eos_token_ids else {}),
    }  # fmt: skip


def rope_settings(rope: RopeConfig) -> dict[str, Any]:
    """rope_theta and, if the angles are scaled, rope_scaling."""
    if rope.kind == "default":
        return {"rope_theta": rope.theta}
    settings = vars(rope) | {"rope_type": rope.kind, "original_max_position_embeddings": rope.original_max_position}
    names = ("rope_type", "factor", *ROPE_SETTINGS.get(rope.kind, ()))
    return {"rope_theta": rope.theta, "rope_scaling": {name: settings[name] for name in names}}
