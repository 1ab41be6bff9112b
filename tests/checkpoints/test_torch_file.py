"""torch.save's files without torch: the values that torch wrote, and refusals of everything a pickle could do besides."""

import ast
import os
import pickle
import random
import struct
import tracemalloc
import zipfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from jaxspec.checkpoints import torch_file, torch_pickle
from jaxspec.checkpoints.tensor_file import SafetensorsFile
from jaxspec.checkpoints.torch_file import TorchFile, read_torch_list

FIXTURES = Path(__file__).parents[1] / "fixtures/torch_files"


# A pickle's opcodes, written by hand.


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def integer(value: int) -> bytes:
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def tuple_of(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def integers(*values: int) -> bytes:
    return tuple_of(*map(integer, values))


def imported(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


FLOATS = imported("torch", "FloatStorage")
REBUILD_TENSOR = imported("torch._utils", "_rebuild_tensor_v2")
REBUILD_PARAMETER = imported("torch._utils", "_rebuild_parameter")


def storage(key: str = "0", elements: int = 4) -> bytes:
    return tuple_of(text("storage"), FLOATS, text(key), text("cpu"), integer(elements)) + b"Q"


def tensor(elements: int = 4, offset: int = 0, shape: bytes = integers(4), strides: bytes = integers(1), key: str = "0") -> bytes:
    return REBUILD_TENSOR + tuple_of(storage(key, elements), integer(offset), shape, strides, b"\x89", b"}") + b"R"


def state_dict(**values: bytes) -> bytes:
    return b"\x80\x02}(" + b"".join(text(name) + value for name, value in values.items()) + b"u."


def save(
    path: Path, program: bytes, others: tuple[tuple[str, bytes], ...] = (("data/0", bytes(16)),), compression: int = 0
) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in (("data.pkl", program), *others):
            archive.writestr(f"model/{name}", content)
    return path


def refused(path: Path, message: str) -> str:
    """That the file is refused by a message of some length that names it; the message."""
    with pytest.raises(ValueError, match=message) as caught:
        TorchFile(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 600
    return str(caught.value)


@pytest.mark.parametrize("name", ["dtypes", "views", "views_protocol_4", "module", "module_protocol_5"])
def test_tensors_are_those_that_torch_saved(name):
    with (
        closing(TorchFile(FIXTURES / f"{name}.bin")) as file,
        closing(SafetensorsFile(FIXTURES / f"{name}.safetensors")) as expected,
    ):
        assert file.infos == expected.infos
        for tensor_name, info in expected.infos.items():
            found = file.read(tensor_name)
            assert (found.dtype, found.shape) == info
            assert found.flags.owndata and found.flags.c_contiguous and found.flags.writeable
            np.testing.assert_array_equal(found, expected.read(tensor_name))
        with pytest.raises(ValueError, match=f"{name}.bin: tensor 'other': found no such name; expected one of"):
            file.read("other")


def test_names_keep_the_order_of_the_file():
    with closing(TorchFile(FIXTURES / "module.bin")) as file:
        assert list(file.infos) == ["steps", "norm.weight", "norm.bias", "project.weight", "project.bias"]


def test_a_list_or_a_1d_tensor_alone():
    ids = [*range(3000, 0, -2), 128_000, 70_000, 5, 1]
    assert read_torch_list(FIXTURES / "freq.pt") == ids
    assert read_torch_list(FIXTURES / "freq_tensor.pt") == read_torch_list(FIXTURES / "freq_int32_tensor.pt") == ids[-40:]


@pytest.mark.parametrize(("name", "found"), [("matrix.pt", "TorchTensor"), ("module.bin", "dict")])
def test_no_other_object_is_read_as_a_list(name, found):
    with pytest.raises(ValueError, match=f"{name}: found {found}; expected a list or a 1-D tensor, saved alone"):
        read_torch_list(FIXTURES / name)


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


def test_neither_torch_nor_pickle_is_imported():
    sources = [Path(module.__file__).read_text() for module in (torch_file, torch_pickle)]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert "pickletools" in modules and not {"torch", "pickle", "_pickle"} & modules


class Touches:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_os_system_is_refused_by_name_and_not_run(tmp_path, protocol):
    marker = tmp_path / "marker"
    program = pickle.dumps({"weight": Touches(marker)}, protocol)
    pickle.loads(program)
    assert marker.exists()  # the program does what the reader must not do
    marker.unlink()
    path = save(tmp_path / "hostile.bin", program)
    message = refused(path, f"refused: global '{os.system.__module__}.system'" if protocol else "refused: ")
    with pytest.raises(ValueError, match=r"hostile\.bin: .*refused"):
        read_torch_list(path)
    assert "safetensors" in message and not marker.exists()


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (imported("builtins", "eval") + tuple_of(text("1")) + b"R", "builtins.eval"),
        (text("builtins") + text("eval") + b"\x93", "builtins.eval"),
        (b"\x8c\x08builtins\x94\x8c\x04eval\x94\x93", "builtins.eval"),
        (integer(1) + text("eval") + b"\x93", "<int>.eval"),
        (imported("collections", "OrderedDict.fromkeys"), "collections.OrderedDict.fromkeys"),
        (imported("torch._utils", "_rebuild_parameter.__globals__"), "torch._utils._rebuild_parameter.__globals__"),
        (imported("torch", "load"), "torch.load"),
        (imported("torch", "ComplexFloatStorage"), "torch.ComplexFloatStorage"),
        (imported("torch.storage", "UntypedStorage"), "torch.storage.UntypedStorage"),
        (imported("numpy.core.multiarray", "_reconstruct"), "numpy.core.multiarray._reconstruct"),
    ],
)
def test_other_globals_are_refused_by_name(tmp_path, value, name):
    message = f"refused: global '{name}', which a file of plain tensors does without"
    refused(save(tmp_path / "m.bin", state_dict(weight=value)), message)


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (b"(i__builtin__\neval\n", "INST"), (b"(" + FLOATS + b"o", "OBJ"), (FLOATS + b")\x81", "NEWOBJ"),
        (FLOATS + b")}\x92", "NEWOBJ_EX"), (b"\x82\x01", "EXT1"), (b"\x83\x01\x00", "EXT2"), (b"\x84\x01\x00\x00\x00", "EXT4"),
        (b"P../x\n", "PERSID"), (b"I1\n", "INT"), (b"L1L\n", "LONG"), (b"F1\n", "FLOAT"), (b"S'x'\n", "STRING"), (b"g0\n", "GET"),
        (b"\x8b\x01\x00\x00\x00\x01", "LONG4"), (b"N2", "DUP"), (b"NN0", "POP"), (b"(1", "POP_MARK"), (b"C\x01x", "SHORT_BINBYTES"),
        (b"\x96" + bytes(8), "BYTEARRAY8"), (b"\x97", "NEXT_BUFFER"), (b"\x8f", "EMPTY_SET"), (b"(\x91", "FROZENSET"),
        (b"\x8d" + bytes(8), "BINUNICODE8"),
    ],
)  # fmt: skip
def test_other_opcodes_are_refused_by_name(tmp_path, code, name):
    refused(
        save(tmp_path / "m.bin", state_dict(weight=code)), f"byte [0-9]+: refused: pickle opcode {name}, which torch writes for no"
    )


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (b"", "pickle exhausted before seeing STOP"), (state_dict(weight=tensor())[:-1], "pickle exhausted"),
        (b"\xff.", "unknown"), (b"X\xff\xff\xff\xff.", "expected 4294967295 bytes"),
        (b".", "byte 0: found no value on the stack"), (b"](.", "byte 2: found no value"), (b"t.", "byte 0: found no value"),
        (b"q\x00.", "byte 0: found no value"), (b"h\x07.", "byte 0: found no value"), (b"K\x01\x86.", "byte 2: found no value"),
        (b"(K\x01a.", "byte 3: found no value"), (b"}K\x01a.", "found values appended to dict; expected a list"),
        (b"](K\x01K\x02u.", "found 2 keys and values for list"), (b"}(" + text("a") + b"u.", "found 1 keys and values for dict"),
        (b"}(K\x01K\x02u.", "found int as key of a dict; expected the name of a tensor"),
        (b"}(" + (text("a") + tensor()) * 2 + b"u.", "found the name 'a' twice in a dict"),
        (b"}}" + text("__class__") + b"Nsb.", "refused: attributes of dict; expected none but _metadata"),
        (b"]}" + text("_metadata") + b"}sb.", "refused: attributes of list"), (b"}Nb.", "refused: attributes of dict"),
        (FLOATS + b")R.", "refused: call of torch.FloatStorage"), (text("os.system") + b")R.", "refused: call of str"),
        (imported("collections", "OrderedDict") + integers(1) + b"R.", "refused: call of collections.OrderedDict"),
        (REBUILD_TENSOR + b")R.", "refused: call of torch._utils._rebuild_tensor_v2"),
        (REBUILD_PARAMETER + tuple_of(FLOATS, b"\x88", b"}") + b"R.", "refused: call of torch._utils._rebuild_parameter"),
        (state_dict(weight=tensor(shape=tuple_of(text("4")))), "refused: call of torch._utils._rebuild_tensor_v2"),
        (state_dict(weight=tensor(strides=tuple_of(b"G" + bytes(8)))), "refused: call of torch._utils._rebuild_tensor_v2"),
        (state_dict(weight=tensor(shape=b"](K\x04e")), "refused: call of torch._utils._rebuild_tensor_v2"),
        (state_dict(weight=storage()), "tensor 'weight': found Storage; expected a tensor"),
        (state_dict(weight=FLOATS), "tensor 'weight': found Global; expected a tensor"),
    ],
)  # fmt: skip
def test_programs_that_build_no_state_dict_are_refused(tmp_path, program, message):
    refused(save(tmp_path / "m.bin", program), message)


@pytest.mark.parametrize(
    "persistent_id",
    [
        tuple_of(text("storage"), FLOATS, text("../0"), text("cpu"), integer(4)),
        tuple_of(text("storage"), FLOATS, text("/etc/passwd"), text("cpu"), integer(4)),
        tuple_of(text("storage"), FLOATS, text(""), text("cpu"), integer(4)),
        tuple_of(text("storage"), FLOATS, integer(0), text("cpu"), integer(4)),
        tuple_of(text("storage"), FLOATS, text("0"), text("cpu"), text("4")),
        tuple_of(text("storage"), FLOATS, text("0"), text("cpu")),
        tuple_of(text("storage"), text("torch.FloatStorage"), text("0"), text("cpu"), integer(4)),
        tuple_of(text("storage"), imported("collections", "OrderedDict"), text("0"), text("cpu"), integer(4)),
        tuple_of(text("module"), FLOATS, text("0"), text("cpu"), integer(4)),
        text("0"),
    ],
)
def test_persistent_ids_that_torch_does_not_write_are_refused(tmp_path, persistent_id):
    refused(
        save(tmp_path / "m.bin", b"}" + text("a") + persistent_id + b"Qs."), "refused: persistent id; expected .'storage', type"
    )


@pytest.mark.parametrize(
    "value",
    [
        tensor(offset=1), tensor(offset=-1), tensor(offset=2**70), tensor(shape=integers(5)), tensor(shape=integers(-1)),
        tensor(strides=integers(2)), tensor(strides=integers(-1)), tensor(strides=integers(2**63)), tensor(strides=integers()),
        tensor(strides=integers(1, 1)), tensor(shape=integers(), strides=integers(), offset=4),
        tensor(shape=integers(8), strides=integers(0)), tensor(shape=integers(2**31, 2**31), strides=integers(0, 0)),
        tensor(shape=integers(2, 3), strides=integers(1, 1)), tensor(shape=integers(*[1] * 33), strides=integers(*[1] * 33)),
        tensor(shape=integers(0), offset=5), tensor(shape=integers(0, 2**62), strides=integers(1, 1)),
        tensor(shape=integers(0, -1), strides=integers(1, 1)),
    ],
)  # fmt: skip
def test_tensors_outside_their_storage_or_larger_are_refused(tmp_path, value):
    refused(
        save(tmp_path / "m.bin", state_dict(weight=value)), r"tensor 'weight': found offset .* expected a tensor inside its storage"
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (tensor(elements=5), "found 16 bytes in entry data/0; expected 5 of float32"),
        (tensor(elements=3, shape=integers(3)), "found 16 bytes in entry data/0; expected 3 of float32"),
        (tensor(elements=-4), "found 16 bytes in entry data/0; expected -4 of float32"),
        (tensor(elements=2**62), "found 16 bytes in entry data/0"),
        (tensor(key="1"), "found None bytes in entry data/1; expected 4 of float32"),
    ],
)
def test_storages_must_have_exactly_their_bytes(tmp_path, value, message):
    refused(save(tmp_path / "m.bin", state_dict(weight=value)), f"tensor 'weight': {message}")


def test_small_programs_cannot_take_much_memory_or_time(tmp_path):
    shared = b")" + b"".join(b"q%ch%c\x86" % (number, number) for number in range(100))  # a tuple of 2 ** 100 leaves
    programs = {
        b"}" + shared + b"Ns.": "found tuple as key of a dict",
        b"}" + text("weight") + shared + b"s.": "tensor 'weight': found tuple; expected a tensor",
        shared + b"Q.": "refused: persistent id",
        shared + shared + b"\x93.": "refused: global '<tuple>.<tuple>'",
        shared + b")R.": "refused: call of tuple",
        b"}" + text("weight") + b"N" + b"\x85" * 100_000 + b"s.": "tensor 'weight': found tuple; expected a tensor",
        b"(" * 100_000 + b".": "found no value on the stack",
    }
    for number, (program, message) in enumerate(programs.items()):
        refused(save(tmp_path / f"{number}.bin", program), message)


def test_memo_index_may_be_any(tmp_path):
    """pickle's own memo is an array that a large index makes grow; here it is a dict."""
    program = state_dict(a=tensor() + b"r\xff\xff\xff\xff", b=b"j\xff\xff\xff\xff")
    path = save(tmp_path / "m.bin", program)
    tracemalloc.start()
    with closing(TorchFile(path)) as file:
        assert list(file.infos) == ["a", "b"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_pickle_too_large_is_refused_before_it_is_read(tmp_path, monkeypatch):
    program = state_dict(weight=tensor())
    monkeypatch.setattr(torch_file, "MAX_PICKLE_BYTES", len(program) - 1)
    refused(save(tmp_path / "m.bin", program), f"found {len(program)} bytes of data.pkl; expected at most {len(program) - 1}")


GOOD = state_dict(weight=tensor())


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


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.999])
def test_files_cut_short_are_refused(tmp_path, part):
    whole = (FIXTURES / "views.bin").read_bytes()
    path = tmp_path / "m.bin"
    path.write_bytes(whole[: int(len(whole) * part)])
    refused(path, "found no whole zip archive")


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
