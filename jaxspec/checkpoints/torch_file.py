"""PyTorch's `.bin` and `.pt` files, read without torch and without running a pickle.

`torch.save` (`_save` in torch/serialization.py, since torch 1.6) writes an uncompressed zip archive: `NAME/data.pkl`, a pickle of
the saved object that only refers to storages (see torch_pickle.py), and `NAME/data/KEY`, the values of one storage.
"""

import zipfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from jaxspec.checkpoints.tensor_file import TensorInfo
from jaxspec.checkpoints.torch_pickle import ADVICE, PickleMachine, TorchTensor, kind_of

MAX_PICKLE_BYTES = 16 << 20  # some 100,000 tensors; the machine may take 80 times as much memory as a hostile pickle has bytes
LEGACY_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # how a file of torch before 1.6 begins, after the pickle protocol's two bytes


class Archive:
    """The zip file around pickle and storages. `sizes`: bytes of each entry, which must lie in it once, whole and uncompressed."""

    def __init__(self, path: Path):
        try:
            self._zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            with path.open("rb") as file:
                found = "torch's format before 1.6" if LEGACY_MAGIC in file.read(64) else f"no whole zip archive ({error})"
            raise ValueError(f"found {found}; expected a file of torch.save: get it again or {ADVICE}") from None
        try:
            self._folder = self._checked_folder(path.stat().st_size)
        except ValueError:
            self.close()
            raise
        self.sizes = {entry.filename.removeprefix(self._folder): entry.file_size for entry in self._zip.infolist()}

    def _checked_folder(self, file_size: int) -> str:
        """NAME/, which precedes the name of each entry."""
        for entry in self._zip.infolist():
            if entry.compress_type != zipfile.ZIP_STORED or not entry.file_size == entry.compress_size <= file_size:
                raise ValueError(f"refused: entry {entry.filename!r} is compressed; expected all stored plainly; {ADVICE}")
        names = self._zip.namelist()
        if len(set(names)) != len(names):
            raise ValueError(f"found {len(names)} entries with {len(set(names))} names; expected each name once; {ADVICE}")
        pickles = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError(f"found {len(pickles)} entries NAME/data.pkl; expected one, as torch.save writes; {ADVICE}")
        return pickles[0].removesuffix("data.pkl")

    def read(self, name: str) -> bytes:
        """The entry's bytes. Raises ValueError if they can't be read whole or have another checksum than the archive says."""
        try:
            return self._zip.read(self._folder + name)
        except (zipfile.BadZipFile, EOFError, OSError, RuntimeError) as error:  # OSError: before the start; RuntimeError: encrypted
            raise ValueError(f"found entry {name} damaged ({error}); expected it whole: get the file again or {ADVICE}") from None

    def close(self) -> None:
        self._zip.close()

    def saved_object(self) -> object:
        """What torch.save was given, as `PickleMachine` builds it."""
        if "byteorder" in self.sizes and (order := self.read("byteorder")) != b"little":
            raise ValueError(f"found byte order {order[:16]!r}; expected little; {ADVICE}")
        if self.sizes["data.pkl"] > MAX_PICKLE_BYTES:
            raise ValueError(f"found {self.sizes['data.pkl']} bytes of data.pkl; expected at most {MAX_PICKLE_BYTES}; {ADVICE}")
        return PickleMachine().run(self.read("data.pkl"))

    def checked_tensor(self, value: object) -> TorchTensor:
        """The value, if it is a tensor whose values are in the archive. Raises ValueError otherwise."""
        if not isinstance(value, TorchTensor):
            raise ValueError(f"found {kind_of(value)}; expected a tensor: save the state dict alone, without anything around it")
        storage, size = value.storage, self.sizes.get(f"data/{value.storage.key}")
        if size != storage.elements * storage.dtype.itemsize:
            raise ValueError(f"found {size} bytes in entry data/{storage.key}; expected {storage.elements} of {storage.dtype}")
        if not value.is_inside_storage():
            found = f"offset {value.offset}, shape {value.shape}, strides {value.strides} in {storage.elements} elements"
            raise ValueError(f"found {found}; expected a tensor inside its storage and no larger than it")
        return value

    def values(self, tensor: TorchTensor) -> np.ndarray:
        """The values of a checked tensor."""
        return tensor.values(self.read(f"data/{tensor.storage.key}"))


class TorchFile:
    """A state dict that torch.save wrote, as a `TensorFile`. Reading a tensor reads all of the storage it may share with others.

    Raises ValueError, naming file and tensor, if the file isn't whole, isn't torch's, or holds more than plain tensors by name.
    """

    def __init__(self, path: Path):
        self.path = path
        with _errors_named(path):
            self._archive = Archive(path)
            try:
                self._tensors = self._checked_tensors(self._archive.saved_object())
            except ValueError:
                self.close()
                raise
        self.infos = {name: TensorInfo(tensor.storage.dtype, tensor.shape) for name, tensor in self._tensors.items()}

    def _checked_tensors(self, saved: object) -> dict[str, TorchTensor]:
        if not isinstance(saved, dict):
            raise ValueError(f"found {kind_of(saved)}; expected a state dict: tensors by name")
        tensors = {}
        for name, value in saved.items():
            with _errors_named(f"tensor {name!r}"):
                tensors[name] = self._archive.checked_tensor(value)
        return tensors

    def read(self, name: str) -> np.ndarray:
        with _errors_named(f"{self.path}: tensor {name!r}"):
            if name not in self._tensors:
                raise ValueError(f"found no such name; expected one of {list(self._tensors)}")
            return self._archive.values(self._tensors[name])

    def close(self) -> None:
        self._archive.close()


def read_torch_list(path: Path) -> list[object]:
    """The list, or the 1-D tensor as a list, that torch.save wrote alone. Raises ValueError, naming the file, for anything else."""
    with _errors_named(path), closing(Archive(path)) as archive:
        match archive.saved_object():
            case list() as items:
                return items
            case TorchTensor(shape=(_,)) as tensor:
                return archive.values(archive.checked_tensor(tensor)).tolist()
            case other:
                raise ValueError(f"found {kind_of(other)}; expected a list or a 1-D tensor, saved alone")


@contextmanager
def _errors_named(place: object) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
