"""The JSON files of a model directory."""

import json
from pathlib import Path

MAX_JSON_BYTES = 64 << 20
"""An index of a very large model is about 1 MB."""


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
        raise ValueError(f"{path} has {path.stat().st_size} bytes; at most {MAX_JSON_BYTES} were expected")
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{path} holds a {type(parsed).__name__}, a JSON object was expected")
    return parsed
