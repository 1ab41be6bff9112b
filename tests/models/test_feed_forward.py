"""Another feed-forward, written here as anybody could write one: the weighted sum of two experts."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.checkpoints.checkpoint import Checkpoint
from jaxspec.checkpoints.layout import TensorPlan
from jaxspec.checkpoints.layouts import target_layout
from jaxspec.checkpoints.loading import read_parameters
from jaxspec.checkpoints.writing import tensors_of, write_checkpoint
from jaxspec.model_config import ModelConfig
from jaxspec.models.feed_forward import MLP, FeedForward, Projection, SwiGluMLP
from jaxspec.models.layers import causal_metadata
from jaxspec.models.linear import Builder
from jaxspec.models.llama import Llama
from jaxspec.models.registry import build_model, split_model
from jaxspec.testing import random_eagle, random_head, scaled_up, tiny_config, tiny_engine
from jaxspec.tree_shape import PLAIN, TreeShape
from tests.engine.test_equality import PROMPTS, mixed_params, run
from tests.models.heads_in_numpy import attention, mlp, rms_norm


@dataclass(frozen=True)
class TwoExperts(FeedForward):
    width: int

    def module(self, config: ModelConfig, builder: Builder) -> "Experts":
        return Experts(self.of_one(config), builder)

    def projections(self, config: ModelConfig) -> dict[tuple[str | int, ...], Projection]:
        found = {("router",): Projection(config.hidden_size, (("gate", 2),))}
        for number in range(2):
            for path, (inputs, outputs) in SwiGluMLP().projections(self.of_one(config)).items():
                named = tuple((f"experts.{number}.{name}", size) for name, size in outputs)
                found["experts", number, *path] = Projection(inputs, named)
        return found

    def of_one(self, config: ModelConfig) -> ModelConfig:
        return replace(config, intermediate_size=self.width)


class Experts(nnx.Module):
    def __init__(self, config: ModelConfig, builder: Builder):
        self.router = builder.linear("router", config.hidden_size, 2)
        self.experts = nnx.List([MLP(config, builder.inside("experts", number)) for number in range(2)])

    def __call__(self, x):
        shares = jnp.split(jax.nn.softmax(self.router(x), -1), 2, -1)
        return sum(share * expert(x).value() for share, expert in zip(shares, self.experts, strict=True))


CONFIG = tiny_config(num_layers=2, feed_forward=TwoExperts(20))


@pytest.fixture(scope="module")
def target():
    return scaled_up(split_model(Llama(CONFIG, rngs=nnx.Rngs(0))))


def in_numpy(tensors: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """The logits, from the tensors of a checkpoint."""
    settings = {"head_dim": CONFIG.head_dim, "rms_norm_eps": CONFIG.rms_norm_eps, "rope_theta": CONFIG.rope.theta}
    tensors = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}

    def normed(x: np.ndarray, name: str) -> np.ndarray:
        return rms_norm(x, tensors[f"model.{name}.weight"], CONFIG.rms_norm_eps)

    x = tensors["model.embed_tokens.weight"][tokens]
    for index in range(CONFIG.num_layers):
        layer = f"layers.{index}."
        x = x + attention(tensors, f"model.{layer}self_attn.", normed(x, layer + "input_layernorm"), settings)
        inner = normed(x, layer + "post_attention_layernorm")
        shares = np.exp(inner @ tensors[f"model.{layer}mlp.gate.weight"].T)
        shares /= shares.sum(-1, keepdims=True)
        for number in range(2):
            x = x + shares[:, number, None] * mlp(tensors, f"model.{layer}mlp.experts.{number}.", inner)
    return normed(x, "norm") @ tensors["lm_head.weight"].T


def test_logits_equal_the_formula(target):
    module, tokens = target.merge(target.params), PROMPTS[2]
    logits = module.logits(module(jnp.asarray(tokens)[None], causal_metadata(1, len(tokens))).hidden)[0]
    expected = in_numpy(dict(tensors_of(target_layout(CONFIG), target.params)), tokens)
    np.testing.assert_allclose(logits, expected, atol=2e-5 * np.abs(expected).max())


HEADS = {
    "EAGLE3": random_head(CONFIG, layer={"feed_forward": TwoExperts(12)}),
    "EAGLE": random_eagle(CONFIG, feed_forward=TwoExperts(12)),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("head", HEADS)
def test_an_engine_serves_it_with_and_without_a_tree(target, head):
    """The head's layer has experts, too."""
    head = HEADS[head]
    assert "router" in head.params["mlp"]
    params = mixed_params(len(PROMPTS))
    tree, plain = (tiny_engine(spec, target=target, head=head) for spec in (TreeShape(1, 2, 3), PLAIN))
    assert run(tree, PROMPTS, params) == run(plain, PROMPTS, params)


def test_its_tensors_are_written_and_loaded(target, tmp_path):
    layout = target_layout(CONFIG)
    write_checkpoint(tmp_path / "experts", {}, tensors_of(layout, target.params), dtype=jnp.float32)
    with Checkpoint(tmp_path / "experts") as checkpoint:
        plan = TensorPlan("experts", CONFIG, layout)
        plan.check(checkpoint)
        loaded = build_model(CONFIG, read_parameters(plan, checkpoint, jnp.float32, progress=False), jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, target.params)
