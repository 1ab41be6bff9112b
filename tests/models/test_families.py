"""Every target family against logits made with transformers (tests/fixtures/targets/make.py)."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints.loading import load_target
from jaxspec.models.layers import causal_metadata
from tests.reference import FIXTURES

FAMILIES = sorted(path.parent.name for path in (FIXTURES / "targets").glob("*/golden.npz"))


def test_all_families_are_there():
    assert FAMILIES == ["llama2", "llama3", "llama31", "llama32", "mimo", "qwen2", "qwen3", "qwen3_yarn", "vicuna_16k"]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family):
    directory = FIXTURES / "targets" / family
    golden, loaded = np.load(directory / "golden.npz"), load_target(directory, jnp.float32)
    model, ids = loaded.merge(loaded.params), jnp.asarray(golden["ids"], jnp.int32)
    logits = model.logits(model(ids, causal_metadata(*ids.shape)).hidden)
    assert np.ptp(golden["logits"]) > 5  # far from the tolerance
    np.testing.assert_allclose(logits, golden["logits"], atol=2e-4, rtol=0)
