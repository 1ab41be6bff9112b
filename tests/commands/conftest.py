"""Tiny models on disk, with a tokenizer whose token i is the byte i."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from jaxspec.commands.chat_loop import Piece
from jaxspec.commands.serve_options import parse_arguments
from jaxspec.testing import random_eagle, tiny_target, write_head, write_target
from tests.server.fakes import byte_tokenizer


class TinyModel(NamedTuple):
    """Directories."""

    target: Path
    head: Path

    @property
    def flags(self) -> list[str]:
        return ["--model-path", str(self.target), "--draft", str(self.head)]


def text_of(pieces: list[Piece]) -> str:
    return "".join(text for piece in pieces for text, _ in piece.spans)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """The one line that a wrong command line of the server is answered with."""

    def answer(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> str:
        with pytest.raises(SystemExit) as end:
            parse_arguments(argv, environment)
        [line] = capsys.readouterr().err.splitlines()
        assert end.value.code == 2 and line.startswith("jaxspec serve: error: ")
        return line

    return answer


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> TinyModel:
    """A random target and a random head, which is hardly ever right."""
    directory = tmp_path_factory.mktemp("tiny")
    target = tiny_target(num_layers=2)
    where = TinyModel(write_target(directory / "target", target), write_head(directory / "head", random_eagle(target.config)))
    byte_tokenizer().save_pretrained(where.target)
    return where
