"""Reading a checkpoint directory: config.json and one or many safetensors files, every tensor checked and accounted for."""

import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from tqdm import tqdm


def read_config(directory: Path) -> dict:
    """The parsed config.json. Raises ValueError if the directory has none or it is not a JSON object."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory} is not a model directory: it has no config.json")
    return read_object(path)


def read_end_of_sequence(directory: Path) -> dict:
    """The `eos_token_id` of generation_config.json, where chat models list their end-of-turn tokens; {} if it has none."""
    path = Path(directory) / "generation_config.json"
    found = read_object(path).get("eos_token_id") if path.is_file() else None
    return {} if found is None else {"eos_token_id": found}


def read_object(path: Path) -> dict:
    """A JSON object from a file. Raises ValueError if it holds anything else."""
    try:
        parsed = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{path} holds a {type(parsed).__name__}, a JSON object was expected")
    return parsed


class Checkpoint:
    """The tensors of a directory by name. Take each one that the model needs, then call `finish`."""

    def __init__(self, directory: Path, *, progress: bool = False):
        self.directory = Path(directory)
        self._file_of = self._index()
        self._open: dict[str, safe_open] = {}
        self._bar = tqdm(total=len(self._file_of), desc=f"loading {self.directory.name}", unit="tensor", disable=not progress)

    def _index(self) -> dict[str, str]:
        """Name -> file name, from the index of a sharded checkpoint or from the single file."""
        index = self.directory / "model.safetensors.index.json"
        if index.is_file():
            file_of = json.loads(index.read_text())["weight_map"]
            for file in set(file_of.values()):
                if Path(file).name != file:
                    raise ValueError(f"{index} names {file!r}: a file in the same directory was expected")
                if not (self.directory / file).is_file():
                    raise ValueError(f"{index} names {file}, which is missing")
            return file_of
        files = sorted(self.directory.glob("*.safetensors"))
        if len(files) != 1:
            found = ", ".join(sorted(path.name for path in self.directory.iterdir())) or "nothing"
            raise ValueError(f"{self.directory}: one .safetensors file or an index was expected, found {found}")
        try:
            with safe_open(files[0], "np") as handle:
                return dict.fromkeys(handle.keys(), files[0].name)
        except SafetensorError as error:
            raise ValueError(f"{files[0]} can't be read: {error}") from None

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def take(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """The tensor, which must have this shape. Raises ValueError naming tensor, shapes and file otherwise."""
        file = self._file_of.pop(name, None)
        if file is None:
            raise ValueError(f"{self.directory} has no tensor {name!r} (expected with shape {shape}), or it was read already")
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.directory / file, "np").__enter__()
            except SafetensorError as error:
                raise ValueError(f"{self.directory / file} can't be read: {error}") from None
        tensor = self._open[file].get_tensor(name)
        if tensor.shape != shape:
            raise ValueError(f"{file}: tensor {name!r} has shape {tensor.shape}, {shape} was expected from config.json")
        self._bar.update()
        return tensor

    def ignore(self, *names: str) -> None:
        """Tensors that the model may have but that this project doesn't need."""
        for name in names:
            self._file_of.pop(name, None)

    def finish(self) -> None:
        """Closes the files. Raises ValueError if tensors are left that the model has no place for."""
        for handle in self._open.values():
            handle.__exit__(None, None, None)
        self._bar.close()
        if self._file_of:
            names = sorted(self._file_of)
            raise ValueError(f"{self.directory} has {len(names)} tensors that the model has no place for: {', '.join(names[:5])}")
