"""The SafeAILab reference's data (tests/fixtures/README.md) and the models it was made with."""

import json
from functools import cache
from pathlib import Path

import jax.numpy as jnp

from jaxspec.models.loading import LoadedModel, load_eagle3, load_llama

FIXTURES = Path(__file__).parent / "fixtures"
TARGET = FIXTURES / "eagle_ref/ckpt/target"
HEAD = FIXTURES / "eagle_ref/ckpt/eagle3_trained_dv128_safetensors"


@cache
def target() -> LoadedModel:
    return load_llama(TARGET, jnp.dtype(jnp.float32))


@cache
def head() -> LoadedModel:
    return load_eagle3(HEAD, target().config, jnp.dtype(jnp.float32))


@cache
def trace() -> dict:
    return json.loads((FIXTURES / "eagle_ref/out/e3_trained_sgl3_4_16_t0.json").read_text())


@cache
def tree_cases() -> dict:
    return json.loads((FIXTURES / "tree_cases.json").read_text())
