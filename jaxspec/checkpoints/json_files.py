"""The JSON files of a model directory: reading them, and checking the attributes of config.json."""

import json
from pathlib import Path

MAX_JSON_BYTES = 64 << 20
"""An index of a very large model is about 1 MB."""

# Attributes of a Hugging Face config that change the computation, with the only supported value.
_ONLY_SUPPORTED = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "pretraining_tp": 1,
    "partial_rotary_factor": 1.0,
    "use_sliding_window": False,
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


def read_config(path: Path) -> dict:
    """The parsed config.json, as `find_config` finds it. Raises ValueError if there is none or it is not a JSON object."""
    file = find_config(path)
    if file is None:
        found = "it has no config.json" if path.exists() else "it does not exist"
        raise ValueError(f"{path} is not a model directory: {found}")
    return read_object(file)


def read_end_of_sequence(directory: Path) -> dict:
    """The `eos_token_id` of generation_config.json, where chat models list their end-of-turn tokens; {} if it has none."""
    path = directory / "generation_config.json"
    found = read_object(path).get("eos_token_id") if path.is_file() else None
    return {} if found is None else {"eos_token_id": found}


def read_object(path: Path) -> dict:
    """A JSON object from a file. Raises ValueError if it holds anything else."""
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; expected at most {MAX_JSON_BYTES}")
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{path} holds a {type(parsed).__name__}; expected a JSON object")
    return parsed


def require(config: dict, name: str):
    """The attribute, or a ValueError that names it."""
    if name not in config:
        raise ValueError(f"config.json has no {name!r}; it has: {', '.join(sorted(config))}")
    return config[name]


def require_size(config: dict, name: str, default: int | None = None) -> int:
    """A whole number above 0, the default if it is missing or null. Raises ValueError, naming the attribute."""
    value = require(config, name) if default is None else config.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json: {name} must be a whole number >= 1, got {value!r}")
    return value


def refuse(config: dict, only: dict) -> None:
    """Raises ValueError if an attribute that changes the computation has a value other than the supported one."""
    for name, supported in only.items():
        if config.get(name, supported) not in (supported, None):
            raise ValueError(f"config.json: {name}={config[name]!r} is not supported (only {supported!r} is)")


def refuse_unsupported(config: dict) -> None:
    """Refuses unsupported values of the attributes that any model's config may have."""
    refuse(config, _ONLY_SUPPORTED)
    # Qwen configs carry a window that use_sliding_window=false turns off; elsewhere the number alone turns it on.
    if config.get("sliding_window") is not None and "use_sliding_window" not in config:
        raise ValueError(f"config.json: sliding_window={config['sliding_window']!r} is not supported (only None is)")
    others = sorted({kind for kind in config.get("layer_types") or () if kind != "full_attention"})
    if others:
        raise ValueError(f"config.json: layer_types has {', '.join(others)}; only full_attention is supported")
