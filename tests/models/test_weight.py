"""Another way to store matrices, written here as anybody could write one: int8 with a scale per column, in target and head."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxspec.model_config import ModelConfig
from jaxspec.models.layers import causal_metadata
from jaxspec.models.linear import parameters
from jaxspec.models.registry import LoadedModel
from jaxspec.testing import engine_target, random_eagle, random_head, tiny_engine
from jaxspec.tree_shape import PLAIN, TreeShape
from pallas_kernels.weight import Dense, Weight
from tests.engine.test_equality import PROMPTS, mixed_params, run
from tests.sets import exhaustive

IDS = jnp.array([5, 0, 127, 64])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scaled(Weight):
    kernel: jax.Array
    """[k, n] int8."""
    scale: jax.Array
    """[n], of each column."""

    @property
    def shape(self):
        return self.kernel.shape

    def dot(self, x, dtype=None, matmul="xla"):
        product = jnp.dot(x, self.kernel.astype(x.dtype), preferred_element_type=dtype)
        return product * self.scale.astype(product.dtype)

    def columns(self, ids):
        return Scaled(self.kernel[:, ids], self.scale[ids])


def scaled(matrix: jax.Array) -> Scaled:
    scale = jnp.abs(matrix).max(0) / 127
    return Scaled(jnp.round(matrix / scale).astype(jnp.int8), scale.astype(matrix.dtype))


def in_int8(model: LoadedModel) -> tuple[LoadedModel, LoadedModel]:
    """The model with all kernels in int8, and an ordinary one with the same numbers."""
    stored, dense = {}, {}
    for path, array in flatten_dict(model.params).items():
        if path[-1] == "kernel":
            weight = scaled(array)
            stored |= {(*path[:-1], name): part for name, part in parameters(weight).items()}
            dense[path] = weight.dense(array.dtype)
        else:
            stored[path] = dense[path] = array
    if isinstance(model.config, ModelConfig):
        config = replace(model.config, storage=scaled)
    else:
        config = replace(model.config, layer=replace(model.config.layer, storage=scaled))
    return replace(model, config=config, params=unflatten_dict(stored)), replace(model, params=unflatten_dict(dense))


@pytest.fixture(scope="module")
def target():
    return in_int8(engine_target(qkv_bias=True))


def test_a_weight_does_what_its_matrix_does():
    matrix, x = (jax.random.normal(jax.random.key(seed), size) for seed, size in enumerate(((8, 6), (2, 3, 8))))
    weight, ids = scaled(matrix), jnp.array([4, 0, 4])
    values = weight.kernel * np.asarray(weight.scale)
    np.testing.assert_allclose(values, matrix, atol=np.abs(matrix).max() / 250)
    same, dense = Dense(jnp.asarray(values)), weight.dense(jnp.float32)
    np.testing.assert_allclose(dense, values, rtol=1e-6)
    for stored in (weight, same):
        np.testing.assert_allclose(stored.columns(ids).dense(jnp.float32), values[:, ids], rtol=1e-6)
    np.testing.assert_allclose(weight.dot(x), same.dot(x), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(weight.swiglu(x), same.swiglu(x), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(weight.parts(x[0]).sum(0), same.parts(x[0]).sum(0), rtol=1e-5, atol=1e-5)
    assert weight.dot(x.astype(jnp.bfloat16)).dtype == weight.dense(jnp.bfloat16).dtype == jnp.bfloat16
    assert weight.dot(x.astype(jnp.bfloat16), jnp.float32).dtype == jnp.float32


def test_logits_are_those_of_the_same_numbers_in_float32(target):
    tokens, rows = jnp.asarray(PROMPTS[2])[None], causal_metadata(1, len(PROMPTS[2]))
    found, expected = (model.merge(model.params) for model in target)
    hidden = expected(tokens, rows).hidden
    logits = expected.logits(hidden)
    np.testing.assert_allclose(found.logits(found(tokens, rows).hidden), logits, atol=1e-4 * np.abs(logits).max())
    np.testing.assert_allclose(found.output_columns(IDS).dot(hidden), logits[..., IDS], atol=1e-5 * np.abs(logits).max())


@pytest.mark.exhaustive
def test_the_text_is_that_of_the_same_numbers_in_float32(target):
    stored, same = (run(tiny_engine(PLAIN, target=each), PROMPTS, mixed_params(len(PROMPTS))) for each in target)
    assert stored == same


@pytest.mark.variants
@pytest.mark.parametrize("make", [random_eagle, exhaustive(random_head)])
def test_an_engine_serves_it_with_and_without_a_tree(target, make):
    stored, _ = target
    head, _ = in_int8(make(stored.config))
    params = mixed_params(len(PROMPTS))
    engine = tiny_engine(TreeShape(1, 2, 3), target=stored, head=head)
    kernels = [array for path, array in flatten_dict(engine.runner.params).items() if path[-1] == "kernel"]
    assert len(kernels) == 4 * 2 + 1 + (6 if make is random_head else 5) and {str(array.dtype) for array in kernels} == {"int8"}
    caches = jax.tree.leaves((engine.runner.state.cache, engine.runner.state.draft.cache))
    assert {str(array.dtype) for array in caches} == {"float32"}
    assert run(engine, PROMPTS, params) == run(tiny_engine(PLAIN, target=stored), PROMPTS, params)
