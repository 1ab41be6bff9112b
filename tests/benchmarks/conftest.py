"""A tiny model on disk, for benchmarks that run from their command line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxspec.testing import random_eagle, tiny_target, write_head, write_target


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> list[str]:
    """Options that name a tiny model, its random head, and two prompts of token ids."""
    directory = tmp_path_factory.mktemp("benchmarks")
    target = tiny_target(max_position_embeddings=128, num_layers=2)
    prompts = directory / "prompts.jsonl"
    prompts.write_text('{"token_ids": [5, 9, 17]}\n{"token_ids": [40, 2]}\n')
    return [
        *("--model", str(write_target(directory / "target", target))),
        *("--draft", str(write_head(directory / "head", random_eagle(target.config)))),
        *("--prompts", str(prompts), "--num-prompts", "2"),
    ]


@pytest.fixture
def newest(tmp_path) -> Callable[[], dict]:
    """The newest record of `tmp_path`/out.jsonl."""

    def read(path: Path = tmp_path / "out.jsonl") -> dict:
        return json.loads(path.read_text().splitlines()[-1])

    return read


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch) -> None:
    """No warnings about the load of the machine that runs the tests."""
    monkeypatch.setattr("os.getloadavg", lambda: (0.1, 0.1, 0.1))
