"""The JSON files of a model directory: reading them, and checking the attributes of config.json."""

import json
from pathlib import Path
from typing import Any

from jaxspec.checks import Check, Fields, Flag, ListOf, Number, OneOrList, Text, Whole, short

MAX_JSON_BYTES = 64 << 20
"""An index of a very large model is about 1 MB."""
MAX_REASON = 200
"""Characters of a library's error message."""
MAX_LAYERS = 10_000
SIZE = Whole(1, 2**31 - 1)
TOKEN_ID = Whole(0, 2**31 - 1)

ROPE: dict[str, Check] = {
    "rope_theta": Number(0, 1e15, above=True),
    "rope_type": Text(),
    "type": Text(),
    "factor": Number(0, 1e6, above=True),
    "low_freq_factor": Number(0, 1e6, above=True),
    "high_freq_factor": Number(0, 1e6, above=True),
    "original_max_position_embeddings": SIZE,
    "beta_fast": Number(0, 1e6, above=True),
    "beta_slow": Number(0, 1e6, above=True),
    "attention_factor": Number(0, 1e3, above=True),
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
    "eagle_aux_hidden_state_layer_ids": ListOf(Whole(-MAX_LAYERS, MAX_LAYERS)),
    "fc_norm": Flag(),
    "use_aux_norm": Flag(),
    "norm_before_fc": Flag(),
    "norm_before_residual": Flag(),
    "norm_output": Flag(),
}
CONFIG = Fields(MODEL | {"eagle_config": Fields(MODEL), "transformer_layer_config": Fields(MODEL)})
"""The attributes of config.json that are read, those of any kind of model together."""

# Attributes of a Hugging Face config that change the computation, with the only supported value.
_ONLY_SUPPORTED = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "use_mrope": False,
    "quantization_config": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "clip_qkv": None,
}


def find_config(path: Path) -> Path | None:
    """The config.json of a directory, or beside a tensor file; a path to any .json file is that file. None: there is none."""
    file = path if path.suffix == ".json" else (path if path.is_dir() else path.parent) / "config.json"
    return file if path.exists() and file.is_file() else None


def check_regular(directory: Path) -> None:
    """Raises ValueError if the directory has something that is neither file nor directory: reading a named pipe never ends."""
    for path in directory.iterdir():
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path} is not a regular file")


def read_config(path: Path) -> dict:
    """The parsed config.json, as `find_config` finds it. Raises ValueError if there is none or it is not a JSON object."""
    file = find_config(path)
    if file is None:
        found = "it has no config.json" if path.exists() else "it does not exist"
        raise ValueError(f"{path} is not a model directory: {found}")
    return checked(read_object(file))


def checked(config: dict[str, Any]) -> dict[str, Any]:
    """The config, if its attributes have the right types and ranges. Raises ValueError, naming the first that has not."""
    return CONFIG.clean("config.json", config)


def read_end_of_sequence(directory: Path, config: dict[str, Any]) -> list[int]:
    """The end-of-sequence tokens of this config.json and of generation_config.json, where chat models list those of a turn. Either
    may be left over from the model that it was finetuned from."""
    path = directory / "generation_config.json"
    found: Any = read_object(path).get("eos_token_id") if path.is_file() else None
    if found is not None:
        found = MODEL["eos_token_id"].clean("generation_config.json: eos_token_id", found)
    lists = [ids if isinstance(ids, list | tuple) else [ids] for ids in (found, config.get("eos_token_id")) if ids is not None]
    return list(dict.fromkeys(token for ids in lists for token in ids))


def read_object(path: Path) -> dict:
    """A JSON object from a file. Raises ValueError if it holds anything else."""
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; expected at most {MAX_JSON_BYTES}")
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    except ValueError as error:  # JSON, UTF-8, or a number of thousands of digits
        raise ValueError(f"{path} is not valid JSON: {str(error)[:MAX_REASON]}") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{path} holds a {type(parsed).__name__}; expected a JSON object")
    return parsed


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


def refuse_unsupported(config: dict) -> None:
    """Refuses unsupported values of the attributes that any model's config may have."""
    refuse(config, _ONLY_SUPPORTED)
    # Qwen configs carry a window that use_sliding_window=false turns off; elsewhere the number alone turns it on.
    used, window = config.get("use_sliding_window"), config.get("sliding_window")
    if used and not ("sliding_window" in config and window is None):  # without one, Qwen's code has 4096
        raise ValueError(f"config.json: use_sliding_window={short(used)} is not supported (only False, or sliding_window null)")
    if used is None and window is not None:
        raise ValueError(f"config.json: sliding_window={short(window)} is not supported (only None is)")
    others = sorted({kind for kind in config.get("layer_types") or () if kind != "full_attention"})
    if others:
        raise ValueError(f"config.json: layer_types has {', '.join(others)[:MAX_REASON]}; only full_attention is supported")
