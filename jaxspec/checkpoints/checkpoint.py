"""A checkpoint: a directory or one file of named tensors. Every tensor is checked before any value is read."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoints.gguf_tensors import SUFFIX as GGUF
from jaxspec.checkpoints.gguf_tensors import GgufTensors
from jaxspec.checkpoints.json_files import INDEXES, TENSOR_FILES, check_files, weight_map
from jaxspec.checkpoints.tensor_files import SafetensorsFile, Tensor, TensorFile, TensorInfo
from jaxspec.checkpoints.torch_file import TorchFile
from jaxspec.checks import short

logger = logging.getLogger(__name__)
FORMATS: dict[str, Callable[[Path], TensorFile]] = {
    ".safetensors": SafetensorsFile,
    ".bin": TorchFile,
    ".pt": TorchFile,
    GGUF: GgufTensors,
}
MAX_NAME = 1000
"""Characters of a tensor's name."""
MAX_LISTED = 8
"""The most problems that one error message lists."""


class Needed(NamedTuple):
    """The shape and kind of tensor that a model expects."""

    shape: tuple[int, ...]
    floating: bool = True
    """Floating-point values; False: integers or booleans."""
    or_shapes: tuple[tuple[int, ...], ...] = ()
    """Other shapes that it may have."""


class Checkpoint:
    """The tensors of a checkpoint by name.

    Reads model.safetensors of a directory, or else pytorch_model.bin, each perhaps in shards, or its only file of a supported
    format. A path to a file reads that file. Raises ValueError if there is no such file, if a shard is missing, repeated or
    unlisted, and if a file is damaged or refused.
    """

    def __init__(self, path: Path):
        self.path = path
        self._files: dict[str, TensorFile] = {}
        self.file_of: dict[str, str] = {}
        """Tensor name -> file name."""
        self.infos: dict[str, TensorInfo] = {}
        """Tensor name -> dtype and shape."""
        directory = path if path.is_dir() else path.parent
        if path.is_dir():
            check_files(path)
        listed, index = _find_files(path)
        for file in listed:
            log_link(directory / file)
            opened = self._files[file] = FORMATS[Path(file).suffix](directory / file)
            for name, info in opened.infos.items():
                if len(name) > MAX_NAME:
                    raise ValueError(f"{directory / file} has a tensor whose name has {len(name)} characters: {name[:80]!r}...")
                if name in self.infos:
                    raise ValueError(f"{directory}: tensor {name!r} is in {self.file_of[name]} and again in {file}")
                self.infos[name], self.file_of[name] = info, file
        index = self.file_of if index is None else index
        for name in sorted({*index, *self.file_of}):
            place, found = index.get(name, "no file"), self.file_of.get(name, "no file")
            if place != found:
                raise ValueError(f"{self.path}: the index lists tensor {short(name)} in {place}, but it is in {found}")

    def check(self, needed: Mapping[str, Needed], ignored: Collection[str] = ()) -> None:
        """Raises ValueError naming every tensor that is missing, has the wrong shape or kind, or is unknown."""
        problems = []
        for name, (shape, floating, or_shapes) in needed.items():
            if name not in self.infos:
                problems.append(f"tensor {name!r} is missing (expected with shape {shape})")
                continue
            info, file = self.infos[name], self.file_of[name]
            if info.shape not in (shape, *or_shapes):
                problems.append(f"tensor {name!r} in {file} has shape {info.shape}; expected {shape} from config.json")
            elif floating != bool(jnp.issubdtype(info.dtype, jnp.floating)):
                kind = "floating-point values" if floating else "integers"
                problems.append(f"tensor {name!r} in {file} has dtype {info.dtype}; expected {kind}")
        unknown = sorted(self.infos.keys() - needed.keys() - set(ignored))
        problems += [f"tensor {name!r} in {self.file_of[name]} is unknown: the model has no such parameter" for name in unknown]
        if problems:
            more = [f"and {len(problems) - MAX_LISTED} more"] if len(problems) > MAX_LISTED else []
            raise ValueError(f"{self.path} does not fit: " + "; ".join(problems[:MAX_LISTED] + more))

    def read(self, name: str) -> np.ndarray:
        """A tensor's values. Raises ValueError naming tensor and file if they can't be read."""
        return self._files[self.file_of[name]].read(name)

    def view(self, name: str) -> Tensor:
        """A tensor that is read only where it is accessed. Raises as `read`, at once or on access."""
        file = self._files[self.file_of[name]]
        return file.view(name) if isinstance(file, GgufTensors) else file.read(name)

    def blocks(self, name: str) -> Tensor:
        """The blocks of a tensor that has a format, uint8 [rows, bytes]."""
        file = self._files[self.file_of[name]]
        assert isinstance(file, GgufTensors)
        return file.blocks(name)

    def size(self, names: Iterable[str]) -> int:
        """Bytes of some tensors."""
        return sum(self.infos[name].size for name in names)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def log_link(weights: Path) -> None:
    """Logs where linked weights really are, except for the links of the Hub's cache to its own blobs."""
    if weights.is_symlink() and (real := weights.resolve()).parent.name != "blobs":
        logger.info("%s is a link to %s", weights, real)


def has_tensors(path: Path) -> bool:
    """True for a tensor file and for a directory that contains one."""
    return path.suffix in FORMATS or (path.is_dir() and any(file.suffix in FORMATS for file in path.iterdir()))


def _find_files(path: Path) -> tuple[list[str], dict[str, str] | None]:
    """Names of the files to read, and the index's name -> file if there is one."""
    if path.is_file():
        if path.suffix not in FORMATS:
            raise ValueError(f"{path} is not a tensor file: {', '.join(TENSOR_FILES)} are supported")
        return [path.name], None
    if not path.is_dir():
        raise ValueError(f"{path} does not exist: expected a local directory or file, or a name on the Hub such as org/model")
    for name in INDEXES:
        if (path / name).is_file():
            index = weight_map(path / name)
            there = {each.name for each in path.iterdir() if each.is_file()}  # Path.is_file raises for names that are too long
            if missing := sorted(set(index.values()) - there):
                raise ValueError(f"{path / name} names {missing[0]:.200}, which is missing")
            return sorted(set(index.values())), index
        if (path / (single := name.removesuffix(".index.json"))).is_file():
            return [single], None
    found = sorted(file.name for file in path.iterdir())
    candidates = [name for name in found if Path(name).suffix in FORMATS and (path / name).is_file()]
    if len(candidates) != 1:
        listed = ", ".join(found)[:MAX_NAME] or "nothing"
        raise ValueError(f"{path}: expected model.safetensors, pytorch_model.bin or an index of shards; found {listed}")
    return candidates, None
