"""The JSON files of a model directory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxspec.checks import MAX_REASON, short
from jaxspec.config_json import MODEL, checked

TEMPLATES = "additional_chat_templates"
"""The folder of a model directory that transformers reads more templates from."""
MAX_JSON_BYTES = 64 << 20
"""An index of a very large model is about 1 MB."""


def find_config(path: Path) -> Path | None:
    """The config.json of a directory, or beside a tensor file; a path to any .json file is that file. None: there is none."""
    file = path if path.suffix == ".json" else (path if path.is_dir() else path.parent) / "config.json"
    return file if path.exists() and file.is_file() else None


INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
"""Indexes of shards; the first that a directory has is read."""
TENSOR_FILES = (".safetensors", ".bin", ".pt")
WEIGHTS = (*TENSOR_FILES, ".gguf", ".pth")
"""Suffixes of files that may be links to anywhere, as people keep them on other disks: what they hold is never shown."""


def check_files(directory: Path, *folders: str) -> None:
    """Raises ValueError if reading the directory would read anything outside of it, or never end.

    Links to files elsewhere are refused, such as a chat template that is /etc/passwd, and so is what is neither file nor directory,
    such as a named pipe. The Hub's cache links files to its blobs, which count as the directory's own. `folders`: names of folders
    that are read besides TEMPLATES.
    """
    home = directory.resolve()
    own = (home, home.parents[1] / "blobs") if home.parent.name == "snapshots" else (home,)
    for path in (*directory.iterdir(), *(directory / TEMPLATES).glob("*")):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path} is not a regular file")
        is_read = path.is_file() or path.name in (TEMPLATES, *folders)
        if is_read and path.suffix not in WEIGHTS and not any(map(path.resolve().is_relative_to, own)):
            raise ValueError(f"{path} is a link to something outside of its directory, which only weights may be: copy it")


def read_config(path: Path) -> dict:
    """The parsed config.json, as `find_config` finds it. Raises ValueError if there is none or it is not a JSON object."""
    file = find_config(path)
    if file is None:
        found = "it has no config.json" if path.exists() else "it does not exist"
        raise ValueError(f"{path} is not a model directory: {found}")
    if path.is_dir():
        check_files(path)
    return checked(read_object(file))


def weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name, as an index of shards says; the files may be missing. Raises ValueError for anything but names of
    tensor files in the same directory."""
    files = read_object(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"{index} has no weight_map from tensor names to file names")
    for file in sorted(set(files.values())):
        if Path(file).name != file or Path(file).suffix not in TENSOR_FILES:
            raise ValueError(f"{index} names {short(file)}: expected a tensor file in the same directory")
    return files


def read_end_of_sequence(directory: Path, config: dict[str, Any]) -> list[int]:
    """The end-of-sequence tokens of this config.json and of generation_config.json, where chat models list their end-of-turn
    tokens. Either file may be left over from the model that this one was finetuned from."""
    path = directory / "generation_config.json"
    found: Any = read_object(path).get("eos_token_id") if path.is_file() else None
    if found is not None:
        found = MODEL["eos_token_id"].clean("generation_config.json: eos_token_id", found)
    lists = [ids if isinstance(ids, list | tuple) else [ids] for ids in (found, config.get("eos_token_id")) if ids is not None]
    return list(dict.fromkeys(token for ids in lists for token in ids))


def read_object(path: Path, hook: Callable[[list[tuple[str, Any]]], dict] | None = None) -> dict:
    """A JSON object from a file. Raises ValueError if it holds anything else. `hook` makes each object of its pairs."""
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; expected at most {MAX_JSON_BYTES}")
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=hook)
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    except ValueError as error:  # wrong JSON or UTF-8, or a number with thousands of digits
        raise ValueError(f"{path} is not valid JSON: {str(error)[:MAX_REASON]}") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{path} holds a {type(parsed).__name__}; expected a JSON object")
    return parsed
