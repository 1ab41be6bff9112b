"""`python -m convert --inspect` says what a checkpoint is, and fails in one line."""

import pytest

from convert.__main__ import main
from jaxspec.testing import random_head, tiny_target, write_head, write_target
from tests.reference import HEAD, TARGET


def test_targets_and_heads_are_told_apart(capsys):
    assert main(["--inspect", str(TARGET)]) == 0
    target = capsys.readouterr().out
    assert (
        "target (Llama layout)" in target and "8 x hidden 64" in target and "328,768 in 75 tensors" in target
    )  # 2*256*64 + 8*(3*64*64 + 3*64*128 + 2*64) + 64
    assert main(["--inspect", str(HEAD), "--target", str(TARGET)]) == 0
    head = capsys.readouterr().out
    assert "midlayer" in head and "256, draft 128" in head and "fits  yes" in head


def test_a_head_for_another_target_is_an_error(tmp_path, capsys):
    head = write_head(tmp_path / "head", random_head(tiny_target().config))
    assert main(["--inspect", str(head), "--target", str(TARGET)]) == 2
    assert "does not fit the target" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"12345678", b"\xff" * 8 + b"{}", (2).to_bytes(8, "little") + b"{]"])
def test_broken_files_are_named(tmp_path, capsys, content):
    directory = write_target(tmp_path / "target", tiny_target())
    (directory / "model.safetensors").write_bytes(content)
    assert main(["--inspect", str(directory)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "model.safetensors is not a safetensors file" in error and "Traceback" not in error
