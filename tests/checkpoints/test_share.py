"""A process that loads one of four shares of a model holds no more than that, and computes with the others what one computes."""

import sys
from pathlib import Path

import pytest

from tests.checkpoints.share import CASES, measure


@pytest.mark.exhaustive
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("name", CASES)
def test_a_process_holds_its_share(tmp_path_factory: pytest.TempPathFactory, name: str):
    found = measure(name, folder_of(tmp_path_factory))
    print(name, found)
    assert found.peak <= 1.1
    assert found.difference < 1e-5


def folder_of(factory: pytest.TempPathFactory) -> Path:
    """The same for all cases of a run, whose files have much in common."""
    folder = factory.getbasetemp() / "share"
    folder.mkdir(exist_ok=True)
    return folder
