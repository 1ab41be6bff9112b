"""Tiny models on disk, with a tokenizer whose token i is the byte i."""

from pathlib import Path
from typing import NamedTuple

import pytest

from jaxspec.testing import random_eagle, tiny_target, write_head, write_target
from tests.server.fakes import byte_tokenizer


class TinyModel(NamedTuple):
    """Directories."""

    target: Path
    head: Path

    @property
    def flags(self) -> list[str]:
        return ["--model-path", str(self.target), "--draft", str(self.head)]


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> TinyModel:
    """A random target and a random head, which is hardly ever right."""
    directory = tmp_path_factory.mktemp("tiny")
    target = tiny_target(num_layers=2)
    where = TinyModel(write_target(directory / "target", target), write_head(directory / "head", random_eagle(target.config)))
    byte_tokenizer().save_pretrained(where.target)
    return where
