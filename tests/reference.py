"""The SafeAILab reference's data (tests/fixtures/README.md) and the models it was made with."""

import json
from functools import cache
from pathlib import Path

import jax.numpy as jnp

from jaxspec.checkpoints.loading import load_head, load_target
from jaxspec.models.registry import LoadedModel

FIXTURES = Path(__file__).parent / "fixtures"
CHECKPOINTS = FIXTURES / "eagle_ref/ckpt"
TARGET = CHECKPOINTS / "target"
HEAD = CHECKPOINTS / "eagle3_trained_dv128_safetensors"
MIMO = CHECKPOINTS / "mimo_tiny"


@cache
def target() -> LoadedModel:
    return load_target(TARGET, jnp.dtype(jnp.float32))


@cache
def head(name: str = HEAD.name) -> LoadedModel:
    return load_head(CHECKPOINTS / name, target())


@cache
def trace(case: str = "e3_trained_sgl3_4_16_t0") -> dict:
    return json.loads((FIXTURES / f"eagle_ref/out/{case}.json").read_text())


@cache
def tree_cases() -> dict:
    return json.loads((FIXTURES / "tree_cases.json").read_text())
