"""What a model directory's config.json may say: the types and ranges of what is read of it, and what is refused. No JAX."""

from typing import Any

from jaxspec.checks import MAX_REASON, Check, Fields, Flag, ListOf, Number, OneOrList, Text, Whole, short

MAX_LAYERS = 10_000
SIZE = Whole(1, 2**31 - 1)
TOKEN_ID = Whole(0, 2**31 - 1)

ROPE: dict[str, Check] = {
    "rope_theta": Number(0, 1e15, above=True),
    "rope_type": Text(),
    "type": Text(),
    **dict.fromkeys(["factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"], Number(0, 1e6, above=True)),
    "original_max_position_embeddings": SIZE,
    **dict.fromkeys(["attention_factor", "attn_factor"], Number(0, 1e3, above=True)),
    "mscale": Number(0, 1e3),
    "mscale_all_dim": Number(0, 1e3),
}
MODEL: dict[str, Check] = {
    "model_type": Text(),
    "architectures": ListOf(Text()),
    "vocab_size": SIZE,
    "hidden_size": SIZE,
    "intermediate_size": SIZE,
    "num_hidden_layers": Whole(1, MAX_LAYERS),
    "num_attention_heads": SIZE,
    "num_key_value_heads": SIZE,
    "head_dim": SIZE,
    "rms_norm_eps": Number(0, 1, above=True),
    "rope_theta": ROPE["rope_theta"],
    "rope_scaling": Fields(ROPE),
    "rope_parameters": Fields(ROPE),
    "max_position_embeddings": SIZE,
    "dual_chunk_attention_config": Fields({"original_max_position_embeddings": SIZE}),
    "tie_word_embeddings": Flag(),
    "attention_bias": Flag(),
    "layer_types": ListOf(Text()),
    "eos_token_id": OneOrList(TOKEN_ID),
    "dtype": Text(),
    "torch_dtype": Text(),
    "num_nextn_predict_layers": Whole(0, MAX_LAYERS),
    # of draft heads
    "bias": Flag(),
    "target_hidden_size": SIZE,
    "draft_vocab_size": SIZE,
    "num_aux_hidden_states": SIZE,
    **dict.fromkeys(
        ["eagle_aux_hidden_state_layer_ids", "target_layer_ids", "aux_hidden_states_layer_ids"],
        ListOf(Whole(-MAX_LAYERS, MAX_LAYERS)),
    ),
    **dict.fromkeys(["fc_norm", "use_aux_norm", "norm_before_fc", "norm_before_residual", "norm_output"], Flag()),
}
CONFIG = Fields(MODEL | {"eagle_config": Fields(MODEL), "transformer_layer_config": Fields(MODEL)})
"""The attributes of config.json that are read, those of any kind of model together."""

# Attributes of a Hugging Face config that change the computation, with the only supported value.
_ONLY_SUPPORTED = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "use_mrope": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "clip_qkv": None,
}
_CACHE_SCHEME: dict[str, tuple[Any, ...]] = {
    "num_bits": (8,),
    "type": ("float",),
    "strategy": ("tensor", "attn_head"),
    "dynamic": (False,),
    "symmetric": (True,),
}
"""What a kv_cache_scheme may say, the default first."""


def checked(config: dict[str, Any]) -> dict[str, Any]:
    """The config, if its attributes have the right types and ranges. Raises ValueError, naming the first that has not."""
    return CONFIG.clean("config.json", config)


def require(config: dict, name: str):
    """The attribute, or a ValueError that names it."""
    if name not in config:
        raise ValueError(f"config.json has no {name!r}; it has: {', '.join(sorted(config))[:MAX_REASON]}")
    return config[name]


def require_size(config: dict, name: str, default: int | None = None) -> int:
    """A whole number above 0, the default if it is missing or null. Raises ValueError, naming the attribute."""
    value = require(config, name) if default is None else config.get(name)
    return int(MODEL[name].clean(f"config.json: {name}", default if value is None else value))  # type: ignore[arg-type]


def refuse(config: dict, only: dict) -> None:
    """Raises ValueError if an attribute that changes the computation has a value other than the supported one."""
    for name, supported in only.items():
        if config.get(name, supported) not in (supported, None):
            raise ValueError(f"config.json: {name}={short(config[name])} is not supported (only {supported!r} is)")


def refuse_cache_scheme(scheme: Any) -> None:
    """Raises ValueError, naming the value, unless a kv_cache_scheme, compressed-tensors' or "static", has scales that we read."""
    found = {} if scheme in (None, "static") else Fields({}).clean("config.json: kv_cache_scheme", scheme)
    for name, supported in _CACHE_SCHEME.items():
        if found.get(name, supported[0]) not in supported:
            known = " or ".join(map(repr, supported))
            raise ValueError(f"config.json: kv_cache_scheme: {name}={short(found[name])} is not supported (only {known} is)")


def refuse_unsupported(config: dict) -> None:
    """Refuses unsupported values of the attributes that any model's config may have."""
    refuse(config, _ONLY_SUPPORTED)
    quantization = config.get("quantization_config")  # of weights: checkpoints/quantization.py
    refuse_cache_scheme(quantization.get("kv_cache_scheme") if isinstance(quantization, dict) else None)
    # Qwen configs carry a window that use_sliding_window=false turns off; elsewhere the number alone turns it on.
    used, window = config.get("use_sliding_window"), config.get("sliding_window")
    if used and not ("sliding_window" in config and window is None):  # without one, Qwen's code has 4096
        raise ValueError(f"config.json: use_sliding_window={short(used)} is not supported (only False, or sliding_window null)")
    if used is None and window is not None:
        raise ValueError(f"config.json: sliding_window={short(window)} is not supported (only None is)")
    if others := sorted({kind for kind in config.get("layer_types") or () if kind != "full_attention"}):
        raise ValueError(f"config.json: layer_types has {', '.join(others)[:MAX_REASON]}; only full_attention is supported")
