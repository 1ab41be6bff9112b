"""Shared by the planner's tests."""

import pytest

from jaxspec.planner.estimate import Pair, pair
from jaxspec.planner.models import read_head, read_target
from tests.planner.configs import EAGLE3_LLAMA_8B, LLAMA_8B, config_file


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> Pair:
    """Llama-3.1-8B and its EAGLE-3 head."""
    directory = tmp_path_factory.mktemp("configs")
    target = read_target(config_file(directory / "target.json", LLAMA_8B))
    return pair(target, read_head(config_file(directory / "head.json", EAGLE3_LLAMA_8B), target), "bfloat16")
