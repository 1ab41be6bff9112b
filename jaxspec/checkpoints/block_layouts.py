"""The layouts of block heads: z-lab's DFlash, JetSpec, which is the same with a causal block, and DeepSpec's DSpark.

Checked against z-lab/dflash (dflash/model.py), hao-ai-lab/JetSpec (jetspec/models/draft_head.py), deepseek-ai/DeepSpec
(deepspec/modeling/dspark) and SGLang (dflash_utils.py, models/dspark.py), November 2026. No published checkpoint was loaded.
"""

from collections.abc import Collection
from typing import Any

from jaxspec.checkpoints.kinds import MARKOV
from jaxspec.checkpoints.layout import Layout, TensorPlan, decoder_layer, linear, nested, norm, table
from jaxspec.checks import Fields, Flag, ListOf, Text, Whole, short
from jaxspec.config_json import MAX_LAYERS, MODEL, SIZE, TOKEN_ID, refuse, require
from jaxspec.model_config import ModelConfig
from jaxspec.models.block import BlockConfig, DSparkConfig

BLOCK_SIZE = 16
"""Where a config has none, as in z-lab's code."""
_SETTINGS = Fields(
    {
        "block_size": Whole(1, 1024),
        "mask_token_id": TOKEN_ID,
        "num_target_layers": Whole(1, MAX_LAYERS),
        "target_layer_ids": ListOf(Whole(-1, MAX_LAYERS)),
        "target_hidden_size": SIZE,
        "causal": Flag(),
        "causal_head": Flag(),
        "is_causal": Flag(),
        "layer_types": MODEL["layer_types"],
        "sliding_window": SIZE,
        "use_sliding_window": Flag(),
        "markov_rank": Whole(0, 2**16),
        "markov_head_type": Text(),
    }
)
"""The settings that are read, from a config's dflash_config or else from its top level."""
_ONLY: dict[str, Any] = {
    "attention_bias": False,
    "speculators_model_type": None,
    "draft_shift": False,
    "selector_rank": 0,
    "conv_kernel_size": 0,
    "attention_sink_bias": False,
    "attention_value_scale": None,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 0,
    "input_embedding_scale": 1.0,
}
"""Settings of DFlash 2, Domino, speculators and others, which change the computation."""


def dflash_plan(config: dict, names: Collection[str], target: ModelConfig) -> TensorPlan[BlockConfig]:
    """The plan for DFlash and JetSpec. Raises ValueError for settings that are not supported or contradict each other.

    DeepSpec's DFlash is its DSpark with markov_rank 0, so each position predicts the token after it, too.
    """
    settings = _settings(config, "dflash")
    if rank := settings.get("markov_rank"):
        raise ValueError(f"tensor '{MARKOV}1.weight' is missing: config.json has markov_rank={rank}")
    is_deepspec = rank is not None
    head = BlockConfig(**_fields(config, settings, names, target), predicts_next=is_deepspec)
    dialect = "DFlash, DeepSpec's" if is_deepspec else "JetSpec, z-lab's" if all(head.causal) else "DFlash, z-lab's"
    return TensorPlan(f"{dialect} names", head, block_layout(head), _unread(names) if is_deepspec else frozenset())


def dspark_plan(config: dict, names: Collection[str], target: ModelConfig) -> TensorPlan[DSparkConfig]:
    """The plan for DSpark. Raises ValueError as `dflash_plan`."""
    settings = _settings(config, "dspark")
    refuse(settings, {"markov_head_type": "vanilla"})
    rank = Whole(1).clean("config.json: markov_rank", require(settings, "markov_rank"))
    head = DSparkConfig(**_fields(config, settings, names, target), predicts_next=True, markov_rank=rank)
    return TensorPlan("DSpark, DeepSpec's names", head, block_layout(head), _unread(names))


def _unread(names: Collection[str]) -> frozenset[str]:
    """DeepSpec's unneeded tensors: copies of the target's, and the predictor of a chain's acceptance: trees have scores."""
    confidence = (name for name in names if name.startswith("confidence_head."))
    return frozenset({"embed_tokens.weight", "lm_head.weight", *confidence})


def _settings(config: dict, projector: str) -> dict[str, Any]:
    """A config's settings. Raises ValueError, naming the first that has a wrong type or range, or that is not supported.
    `projector`: SpecForge's word for this kind."""
    inner = Fields({}).clean("config.json: dflash_config", config.get("dflash_config") or {})
    settings = _SETTINGS.clean("config.json", config | {name: value for name, value in inner.items() if value is not None})
    refuse(settings, _ONLY | {"projector_type": projector})
    return settings


def _fields(config: dict, settings: dict, names: Collection[str], target: ModelConfig) -> dict[str, Any]:
    """The fields that all kinds have."""
    if settings.get("mask_token_id") is None:
        raise ValueError("config.json has no mask_token_id, neither at its top level nor in dflash_config")
    if "hidden_dim_adapter.proj.weight" in names:
        raise ValueError("hidden_dim_adapter is not supported: the head must be as wide as its target")
    if (layers := settings.get("num_target_layers")) not in (None, target.num_layers):
        raise ValueError(f"the draft head does not fit: its num_target_layers is {layers}, the target has {target.num_layers}")
    full = {"layer_types": None, "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": False}
    layer = ModelConfig.from_hf(
        config | full,
        qkv_bias="layers.0.self_attn.q_proj.bias" in names,
        qk_norm="layers.0.self_attn.q_norm.weight" in names,
    )
    windows = _windows(settings, layer.num_layers)
    said = next((settings[name] for name in ("causal_head", "causal", "is_causal") if settings.get(name) is not None), None)
    return {
        "layer": layer,
        "target_hidden_size": settings.get("target_hidden_size") or layer.hidden_size,
        "captured_layers": _captured_layers(settings, layer.num_layers, target.num_layers),
        "target_layers": target.num_layers,
        "block_size": settings.get("block_size") or BLOCK_SIZE,
        "mask_token_id": settings["mask_token_id"],
        "causal": tuple(window is not None for window in windows) if said is None else (bool(said),) * layer.num_layers,
        "windows": windows,
    }


def _windows(settings: dict, num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer.

    In:  {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 2048}
    Out: (2048, None)
    """
    kinds = settings.get("layer_types")
    if kinds is None:
        if settings.get("use_sliding_window"):
            raise ValueError("config.json: use_sliding_window=True needs layer_types, which say where the window is")
        return (None,) * num_layers
    if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"config.json: layer_types must be full_attention or sliding_attention for {num_layers} layers, got {short(kinds)}"
        )
    if "sliding_attention" not in kinds:
        return (None,) * num_layers
    if (size := settings.get("sliding_window")) is None:
        raise ValueError("config.json: layer_types has sliding_attention, but there is no sliding_window")
    return tuple(size if kind == "sliding_attention" else None for kind in kinds)


def _captured_layers(settings: dict, num_layers: int, target_layers: int) -> tuple[int, ...]:
    """The target's layers whose *input* the head reads. Configs name the layers that output it; -1 is the embedding.

    In:  "target_layer_ids": [-1, 9]
    Out: (0, 10)
    """
    ids = settings.get("target_layer_ids")
    if ids is None:
        ids = default_layer_ids(num_layers, target_layers)
    if not all(-1 <= layer < target_layers - 1 for layer in ids):
        raise ValueError(
            f"config.json: target_layer_ids must be from -1 to {target_layers - 2} for a target of {target_layers} layers (some "
            f"engines norm the output of the last, others don't), got {short(ids)}"
        )
    return tuple(1 + layer for layer in ids)


def default_layer_ids(count: int, target_layers: int) -> list[int]:
    """The target's layers whose output a head of `count` layers reads. Raises ValueError below 4 layers.

    In: 5, 36  Out: [1, 9, 17, 25, 33]
    """
    last = target_layers - 3
    if last < 1:
        raise ValueError(f"config.json has no target_layer_ids, and a target of {target_layers} layers has no default ones")
    return [round(1 + index * (last - 1) / (count - 1)) for index in range(count)] if count > 1 else [target_layers // 2]


def block_layout(config: BlockConfig) -> Layout:
    """z-lab's tensor names; for DSpark's Markov biases, DeepSpec's."""
    layer, size = config.layer, config.layer.hidden_size
    layout = nested("fc", layout=linear(config.feature_size, ("fc", size)))
    layout |= nested("hidden_norm", layout=norm("hidden_norm", size))
    layout |= nested("norm", layout=norm("norm", size))
    for index in range(layer.num_layers):
        layout |= nested("layers", index, layout=decoder_layer(f"layers.{index}.", layer))
    if isinstance(config, DSparkConfig):
        layout["markov_in",] = table(f"{MARKOV}1.weight", layer.vocab_size, config.markov_rank)
        layout |= nested("markov_out", layout=linear(config.markov_rank, (f"{MARKOV}2", layer.vocab_size)))
    return layout
