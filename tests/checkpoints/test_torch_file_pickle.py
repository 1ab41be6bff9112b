"""Pickles that do more than describe tensors: all are refused by name, and none is run."""

import ast
import os
import pickle
import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest

from jaxspec.checkpoints import torch_file
from jaxspec.checkpoints.torch_file import TorchFile, read_torch_list
from tests.checkpoints.torch_programs import (
    FLOATS,
    REBUILD_PARAMETER,
    REBUILD_TENSOR,
    imported,
    integer,
    integers,
    refused,
    save,
    state_dict,
    storage,
    tensor,
    text,
    tuple_of,
)


def test_neither_torch_nor_pickle_is_imported():
    nodes = list(ast.walk(ast.parse(Path(torch_file.__file__).read_text())))
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
    file = save(tmp_path / "m.bin", state_dict(weight=code))
    refused(file, f"byte [0-9]+: refused: pickle opcode {name}, which torch writes for no")


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
    file = save(tmp_path / "m.bin", b"}" + text("a") + persistent_id + b"Qs.")
    refused(file, "refused: persistent id; expected .'storage', type")


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
    file = save(tmp_path / "m.bin", state_dict(weight=value))
    refused(file, r"tensor 'weight': found offset .* expected a tensor inside its storage")


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


def test_the_message_about_a_long_shape_is_short(tmp_path):
    shape = b"(" + integer(2**62) + b"q\x00" + b"h\x00" * 2**20 + b"t"
    with pytest.raises(ValueError, match="found offset") as error:
        TorchFile(save(tmp_path / "m.bin", state_dict(weight=tensor(shape=shape, strides=shape))))
    assert len(str(error.value)) < 2500


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
