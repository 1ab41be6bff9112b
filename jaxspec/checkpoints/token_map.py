"""Token maps: the target's tokens that a head with a small vocabulary may propose, as FR-Spec (arXiv 2502.14856) lists them.

A token map is the most frequent token ids of the target, most frequent first: draft token i is target token map[i]. FR-Spec
publishes `freq_32768.pt`, a Python list that torch.save wrote; a list in JSON, a NumPy array or a lone safetensors tensor will do.
"""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from tokenize import TokenError

import numpy as np

from jaxspec.checkpoints.tensor_files import SafetensorsFile
from jaxspec.checkpoints.torch_file import read_torch_list

MAX_FILE_BYTES = 16 << 20  # a million ids: several times the largest vocabulary


def read_token_map(path: Path, vocab_size: int) -> np.ndarray:
    """Target token ids [draft vocabulary] int32, in the file's order.

    Raises ValueError if the file is of another format, larger than 16 MiB or damaged, or holds anything else than distinct integers
    in [0, vocab_size), one at least.
    """
    if path.suffix not in READERS:
        raise ValueError(f"token map {path}: got suffix {path.suffix!r}; expected one of {', '.join(READERS)}")
    if not path.is_file():
        raise ValueError(f"token map {path} does not exist; expected a local file, or org/repository/file on the Hub")
    if (size := path.stat().st_size) > MAX_FILE_BYTES:
        raise ValueError(f"token map {path}: got {size} bytes; expected at most {MAX_FILE_BYTES}: a list of ids and nothing else")
    try:
        return np.array(_checked_ids(READERS[path.suffix](path), vocab_size), np.int32)
    except (ValueError, RecursionError, SyntaxError, TokenError) as error:  # JSON nested without end, a damaged header of .npy
        raise ValueError(f"token map {path}: {str(error).removeprefix(f'{path}: ')}") from None


def _checked_ids(ids: object, vocab_size: int) -> list[int]:
    if not isinstance(ids, list) or not ids:
        raise ValueError(f"got {'no ids' if ids == [] else type(ids).__name__}; expected a list of one token id at least")
    places: dict[int, int] = {}
    for place, token in enumerate(ids):
        if type(token) is not int:
            raise ValueError(f"got {type(token).__name__} as item {place}; expected integers only: save a flat list of token ids")
        if not 0 <= token < vocab_size:
            raise ValueError(f"got id {token} as item {place}; expected ids in [0, {vocab_size}): is the map for another target?")
        if token in places:
            raise ValueError(f"got id {token} as items {places[token]} and {place}; expected each id once: drop the repeated ones")
        places[token] = place
    return list(places)


def _read_npy(path: Path) -> object:
    """Reads the header apart from the values: np.load would take memory for any length that the header claims."""
    with path.open("rb") as file:
        if (version := np.lib.format.read_magic(file)) != (1, 0):
            raise ValueError(f"got version {version} of the npy format; expected (1, 0), as np.save writes integers")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        if len(shape) != 1 or dtype.kind not in "iu":
            raise ValueError(f"got an array of {dtype} with {len(shape)} dimensions; expected one dimension of integers")
        ids = np.frombuffer(file.read(), dtype)
    if ids.shape != shape:
        raise ValueError(f"got {len(ids)} ids; expected {shape[0]}, as the header says: get the file again")
    return ids.tolist()


def _read_safetensors(path: Path) -> object:
    with closing(SafetensorsFile(path)) as file:
        if len(file.infos) != 1:
            raise ValueError(f"got {len(file.infos)} tensors ({', '.join(file.infos)}); expected one")
        return file.read(*file.infos).tolist()


READERS: dict[str, Callable[[Path], object]] = {
    ".pt": read_torch_list,
    ".json": lambda path: json.loads(path.read_bytes()),
    ".npy": _read_npy,
    ".safetensors": _read_safetensors,
}
