"""torch.save's files without torch: the values that torch wrote, and archives that it would not write."""

import random
import struct
import zipfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from jaxspec.checkpoints import torch_file
from jaxspec.checkpoints.tensor_files import SafetensorsFile
from jaxspec.checkpoints.torch_file import TorchFile, read_torch_list
from tests.checkpoints.torch_programs import GOOD, REBUILD_PARAMETER, integers, refused, save, state_dict, tensor, tuple_of

FIXTURES = Path(__file__).parents[1] / "fixtures/torch_files"


@pytest.mark.parametrize("name", ["dtypes", "views", "views_protocol_4", "module", "module_protocol_5"])
def test_tensors_are_those_that_torch_saved(name):
    with (
        closing(TorchFile(FIXTURES / f"{name}.bin")) as file,
        closing(SafetensorsFile(FIXTURES / f"{name}.safetensors")) as expected,
    ):
        assert file.infos == expected.infos
        for tensor_name, info in expected.infos.items():
            found = file.read(tensor_name)
            assert (found.dtype, found.shape) == info[:2]
            assert found.flags.c_contiguous
            np.testing.assert_array_equal(found, expected.read(tensor_name))
        with pytest.raises(ValueError, match=f"{name}.bin: tensor 'other': found no such name; expected one of"):
            file.read("other")


def test_values_are_mapped(tmp_path):
    """So a process that needs a part of a tensor holds no more."""
    values = np.arange(4, dtype=np.float32)
    with closing(TorchFile(save(tmp_path / "m.bin", GOOD, (("data/0", values.tobytes()),)))) as file:
        found = file.read("weight")
    np.testing.assert_array_equal(found, values)
    assert not found.flags.owndata and not found.flags.writeable


def test_names_keep_the_order_of_the_file():
    with closing(TorchFile(FIXTURES / "module.bin")) as file:
        assert list(file.infos) == ["steps", "norm.weight", "norm.bias", "project.weight", "project.bias"]


def test_a_list_or_a_1d_tensor_alone():
    ids = [*range(3000, 0, -2), 128_000, 70_000, 5, 1]
    assert read_torch_list(FIXTURES / "freq.pt") == ids
    assert read_torch_list(FIXTURES / "freq_tensor.pt") == read_torch_list(FIXTURES / "freq_int32_tensor.pt") == ids[-40:]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("legacy.bin", "found torch's format before 1.6; .* torch.save of torch >= 1.6"),
        ("nested.bin", "tensor 'state_dict': found dict; expected a tensor: save the state dict alone"),
        ("freq.pt", "found list; expected a state dict"),
        ("freq_tensor.pt", "found TorchTensor; expected a state dict"),
        ("uint16.bin", "refused: global 'torch._utils._rebuild_tensor_v3'"),
        ("sparse.bin", "refused: global 'torch._utils._rebuild_sparse_tensor'"),
        ("negated.bin", "refused: call of torch._utils._rebuild_tensor_v2 with arguments that"),
        ("expanded.bin", r"tensor 'weight': found offset 0, shape \(1000,\), strides \(0,\) in 1 elements; expected .* no larger"),
    ],
)
def test_what_torch_saves_besides_plain_state_dicts_is_refused(name, message):
    refused(FIXTURES / name, message)


def test_a_file_made_by_hand_is_read(tmp_path):
    values = np.arange(4, dtype=np.float32)
    frozen = REBUILD_PARAMETER + tuple_of(tensor(), b"\x88", b"}") + b"R"
    # Nothing steps along a dimension of length 1: its stride is free.
    lonely = tensor(offset=3, shape=integers(1, 1), strides=integers(10**300, 2**63))
    program = state_dict(a=frozen, b=lonely, c=tensor(shape=integers(0, 1 << 40), strides=integers(1, 10**300)))
    with closing(TorchFile(save(tmp_path / "made.bin", program, (("data/0", values.tobytes()), ("byteorder", b"little"))))) as file:
        np.testing.assert_array_equal(file.read("a"), values)
        np.testing.assert_array_equal(file.read("b"), [[3]])
        assert file.read("c").shape == (0, 1 << 40)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("others", "message"),
    [
        ((("data/0", bytes(16)),) * 2, "found 3 entries with 2 names; expected each name once"),
        ((("data/0", bytes(16)), ("byteorder", b"big")), "found byte order b'big'; expected little"),
        ((), "tensor 'weight': found None bytes in entry data/0"),
    ],
)
def test_archives_that_torch_does_not_write_are_refused(tmp_path, others, message):
    refused(save(tmp_path / "m.bin", GOOD, others), message)


@pytest.mark.parametrize(
    ("names", "count"), [((), 0), (("weights.npy",), 0), (("a/b/data.pkl", "data.pkl"), 0), (("a/data.pkl", "b/data.pkl"), 2)]
)
def test_an_archive_has_one_pickle(tmp_path, names, count):
    with zipfile.ZipFile(tmp_path / "m.bin", "w") as archive:
        for name in names:
            archive.writestr(name, GOOD)
    refused(tmp_path / "m.bin", f"found {count} entries NAME/data.pkl; expected one")


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressed_entries_are_refused(tmp_path, compression):
    refused(save(tmp_path / "m.bin", GOOD, compression=compression), "refused: entry 'model/data.pkl' is compressed")


def patch(path: Path, place: int, content: bytes) -> Path:
    data = bytearray(path.read_bytes())
    data[place : place + len(content)] = content
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("field", "content"),
    [(10, b"\x08\x00"), (20, struct.pack("<II", 2**30, 2**30)), (20, struct.pack("<I", 12)), (24, struct.pack("<I", 2**30))],
    ids=["method", "sizes", "size in the archive", "size"],
)
def test_an_entry_is_stored_plainly_and_shorter_than_the_file(tmp_path, field, content):
    path = save(tmp_path / "m.bin", state_dict(weight=tensor()))
    patch(path, path.read_bytes().rindex(b"PK\x01\x02") + field, content)  # in the directory, where the storage comes last
    refused(path, "refused: entry 'model/data/0' is compressed; expected all stored plainly")


def test_values_that_would_follow_the_end_of_the_file_are_refused(tmp_path):
    path = save(tmp_path / "m.bin", state_dict(weight=tensor(elements=80)))
    patch(path, path.read_bytes().rindex(b"PK\x01\x02") + 20, struct.pack("<II", 320, 320))
    with closing(TorchFile(path)) as file, pytest.raises(ValueError, match=r"tensor 'weight': found entry data/0 damaged"):
        file.read("weight")


@pytest.mark.parametrize(
    ("record", "field", "content"),
    [(b"PK\x05\x06", 12, struct.pack("<I", 2**30)), (b"PK\x01\x02", 8, struct.pack("<H", 1 << 11)), (b"PK\x01\x02", 6, b"\xff")],
    ids=["directory before the start", "name of no encoding", "later zip version"],
)
def test_damaged_directories_are_refused(tmp_path, record, field, content):
    path = save(tmp_path / "m.bin", GOOD, (("data/0\u00e4", b""),))
    whole = path.read_bytes().replace("\u00e4".encode(), b"\xff\xff")
    path.write_bytes(whole)
    refused(patch(path, whole.rindex(record) + field, content), "found no whole zip archive")


def test_encrypted_entries_are_refused(tmp_path):
    path = save(tmp_path / "m.bin", GOOD)
    patch(path, path.read_bytes().index(b"PK\x01\x02") + 8, b"\x01")
    refused(path, "found entry data.pkl damaged .*encrypted")


def test_damaged_values_are_found_when_they_are_read(tmp_path):
    path = save(tmp_path / "m.bin", GOOD, (("data/0", b"0123456789abcdef"),))
    with closing(TorchFile(patch(path, path.read_bytes().index(b"0123456789abcdef"), b"x"))) as file:
        assert file.infos["weight"].shape == (4,)
        with pytest.raises(ValueError, match=r"m\.bin: tensor 'weight': found entry data/0 damaged \(Bad CRC-32"):
            file.read("weight")


def test_a_damaged_pickle_is_not_parsed(tmp_path):
    path = save(tmp_path / "m.bin", GOOD)
    refused(patch(path, path.read_bytes().index(b"weight"), b"W"), "found entry data.pkl damaged .Bad CRC-32")


@pytest.mark.parametrize("content", [b"", b"PK", b"not a zip archive", b"\x80\x02}q\x00."])
def test_files_of_other_formats_are_refused(tmp_path, content):
    path = tmp_path / "m.bin"
    path.write_bytes(content)
    refused(path, "found no whole zip archive .* expected a file of torch.save: get it again or save a state dict")


@pytest.mark.parametrize("reader", [TorchFile, read_torch_list])
@pytest.mark.parametrize("name", ["nested.bin", "sparse.bin", "compressed.bin"])
def test_refused_files_are_closed(tmp_path, monkeypatch, reader, name):
    closed = []
    monkeypatch.setattr(torch_file.Archive, "close", lambda archive: closed.append(archive._zip.close()))
    path = save(tmp_path / name, GOOD, compression=zipfile.ZIP_DEFLATED) if name == "compressed.bin" else FIXTURES / name
    with pytest.raises(ValueError, match=name):
        reader(path)
    assert len(closed) == 1


def test_a_missing_file_is_no_damaged_one(tmp_path):
    with pytest.raises(FileNotFoundError):
        TorchFile(tmp_path / "m.bin")


@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")  # pickletools, of strings that are refused next
@pytest.mark.parametrize("of_pickle", [True, False])
def test_any_damage_is_a_value_error_that_names_the_file(tmp_path, of_pickle):
    whole = (FIXTURES / "views_protocol_4.bin").read_bytes()
    with zipfile.ZipFile(FIXTURES / "views_protocol_4.bin") as archive:
        program = archive.read("views_protocol_4/data.pkl")
    chance = random.Random(0)
    path = tmp_path / "m.bin"
    for _ in range(300):
        damaged = bytearray(program if of_pickle else whole)
        place = chance.randrange(len(damaged))
        damaged[place : place + chance.randrange(3)] = chance.randbytes(chance.randrange(3))
        if of_pickle:
            save(path, bytes(damaged))
        else:
            path.write_bytes(damaged)
        try:
            with closing(TorchFile(path)) as file:
                for name, info in file.infos.items():
                    assert file.read(name).shape == info.shape
        except ValueError as error:
            assert str(path) in str(error)
