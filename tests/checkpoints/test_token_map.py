"""Token maps: the ids in the file's order from each format, and messages for files that are no map of the target's tokens."""

import io
import json
import pickle
import shutil
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec.checkpoints import token_map
from jaxspec.checkpoints.tensor_files import SafetensorsFile
from jaxspec.checkpoints.token_map import read_token_map

FIXTURES = Path(__file__).parents[1] / "fixtures/torch_files"
IDS = [*range(3000, 0, -2), 128_000, 70_000, 5, 1]


def npy(values: object, dtype: object = None) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array(values, dtype))
    return file.getvalue()


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def refused(path: Path, message: str, vocab_size: int = 128_001) -> None:
    """That the file is refused by a message that names it once."""
    with pytest.raises(ValueError, match=message) as caught:
        read_token_map(path, vocab_size)
    assert str(caught.value).startswith(f"token map {path}: ") and str(caught.value).count(str(path)) == 1


@pytest.fixture(params=["list.pt", "tensor.pt", "int32_tensor.pt", "map.json", "map.npy", "map.safetensors"])
def map_file(request, tmp_path):
    """The last 40 ids of IDS, or all of them, in each format."""
    path = tmp_path / request.param
    match request.param:
        case "list.pt":
            shutil.copy(FIXTURES / "freq.pt", path)
        case "tensor.pt" | "int32_tensor.pt":
            shutil.copy(FIXTURES / f"freq_{request.param}", path)
        case "map.json":
            path.write_text(json.dumps(IDS))
        case "map.npy":
            np.save(path, np.array(IDS, np.uint32))
        case "map.safetensors":
            save_file({"ids": np.array(IDS)}, path)
    return path


def test_ids_come_in_the_order_of_the_file(map_file):
    ids = read_token_map(map_file, 128_001)
    assert ids.dtype == np.int32
    assert ids.tolist() == (IDS[-40:] if "tensor.pt" in map_file.name else IDS)


def test_a_map_in_safetensors_is_closed(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(SafetensorsFile, "close", lambda file: closed.append(file.path))
    save_file({"ids": np.array([2, 1])}, tmp_path / "map.safetensors")
    assert read_token_map(tmp_path / "map.safetensors", 3).tolist() == [2, 1]
    assert closed == [tmp_path / "map.safetensors"]


def test_ids_end_before_the_vocabulary(map_file):
    refused(map_file, r"got id 128000 as item [0-9]+; expected ids in \[0, 128000\): is the map for another target\?", 128_000)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "got no ids; expected a list of one token id at least"),
        ('{"ids": [1]}', "got dict; expected a list"),
        ("7", "got int; expected a list"),
        ("[1, true]", "got bool as item 1; expected integers only"),
        ("[1.0, 2]", "got float as item 0; expected integers only"),
        ("[NaN]", "got float as item 0"),
        ('[1, "2"]', "got str as item 1; expected integers only"),
        ("[[1, 2]]", "got list as item 0; expected integers only: save a flat list"),
        ("[3, -1]", r"got id -1 as item 1; expected ids in \[0, 128001\)"),
        (f"[{2**32}]", "got id 4294967296 as item 0"),
        ("[4, 9, 2, 9, 4]", "got id 9 as items 1 and 3; expected each id once"),
        ("[1, 2", "Expecting ',' delimiter"),
        ("", "Expecting value"),
        ("[" * 100_000, "recursion"),
        ("[" + "1" * 5000 + "]", "Exceeds the limit"),
    ],
)
def test_json_that_is_no_map_is_refused(tmp_path, content, message):
    refused(write(tmp_path / "map.json", content.encode()), message)


def test_json_of_other_encodings_is_refused(tmp_path):
    refused(write(tmp_path / "map.json", b"[1, \xff]"), "can't decode byte 0xff")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (npy([1.0, 2.0]), "got an array of float64 with 1 dimensions; expected one dimension of integers"),
        (npy([True, False]), "got an array of bool"),
        (npy([[1, 2]]), "got an array of int64 with 2 dimensions"),
        (npy(1), "got an array of int64 with 0 dimensions"),
        (npy([1, 2], object), "got an array of object"),
        (npy([1, 2], "m8[s]"), "got an array of timedelta64"),
        (npy([], np.int64), "got no ids"),
        (pickle.dumps([1, 2]), "magic string is not correct"),
        (npy([1, 2]).replace(b"NUMPY\x01", b"NUMPY\x02"), r"got version \(2, 0\) of the npy format"),
        (npy([1, 2])[:-1], "buffer size must be a multiple of element size"),
        (npy([1, 2])[:-8], "got 1 ids; expected 2, as the header says"),
        (npy([1, 2]).replace(b"(2,), }" + b" " * 30, b"(" + b"9" * 30 + b",), } "), "got 2 ids; expected 9+, as the header says"),
        (npy([1, 2]).replace(b"(2,), }", b"(2,)\0, }"), "null bytes"),
        (npy([1, 2]).replace(b"'<i8'", b"',i8'"), "invalid syntax"),
        (b"", "EOF"),
    ],
)
def test_arrays_that_are_no_map_are_refused(tmp_path, content, message):
    refused(write(tmp_path / "map.npy", content), message)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": np.array([1]), "b": np.array([2])}, r"got 2 tensors \(a, b\); expected one"),
        ({}, "got 0 tensors"),
        ({"a": np.array([1.0], ml_dtypes.bfloat16)}, "got float as item 0"),
        ({"a": np.array([[1]])}, "got list as item 0"),
        ({"a": np.array([5, 5], np.uint8)}, "got id 5 as items 0 and 1"),
    ],
)
def test_safetensors_that_are_no_map_are_refused(tmp_path, tensors, message):
    save_file(tensors, tmp_path / "map.safetensors")
    refused(tmp_path / "map.safetensors", message)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("matrix.pt", "found TorchTensor; expected a list or a 1-D tensor, saved alone"),
        ("floats.pt", "got float as item 0"),
        ("legacy.bin", "found torch's format before 1.6"),
        ("module.bin", "found dict; expected a list or a 1-D tensor"),
    ],
)
def test_torch_files_that_are_no_map_are_refused(tmp_path, name, message):
    refused(Path(shutil.copy(FIXTURES / name, tmp_path / "map.pt")), message)


@pytest.mark.parametrize("item", [b"\x88", b"N", b"G" + bytes(8), b"ctorch\nFloatStorage\n", b"]", b"X\x01\x00\x00\x001"])
def test_items_that_are_no_integers_are_refused(tmp_path, item):
    with zipfile.ZipFile(tmp_path / "map.pt", "w") as archive:
        archive.writestr("map/data.pkl", b"\x80\x02](K\x01" + item + b"e.")
    refused(tmp_path / "map.pt", "got [A-Za-z]+ as item 1; expected integers only")


@pytest.mark.parametrize("name", ["freq.txt", "freq", "freq.bin", "freq.pkl"])
def test_other_suffixes_are_refused_with_the_supported_ones(tmp_path, name):
    refused(write(tmp_path / name, b"[1]"), r"got suffix '.*'; expected one of \.pt, \.json, \.npy, \.safetensors")


def test_large_files_are_refused_before_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(token_map, "MAX_FILE_BYTES", 5)
    assert read_token_map(write(tmp_path / "map.json", b"[1,2]"), 3).tolist() == [1, 2]
    refused(write(tmp_path / "map.json", b"[1, 2]"), "got 6 bytes; expected at most 5: a list of ids and nothing else")


def test_a_missing_file_is_no_damaged_one(tmp_path):
    with pytest.raises(ValueError, match=r"map\.json does not exist; expected a local file"):
        read_token_map(tmp_path / "map.json", 10)
