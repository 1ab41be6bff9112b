"""The parts of the two trainings: unrolling against a naive loop, the schedule, and checkpoints that load again."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.checkpoints.layouts import SAFEAILAB, eagle3_layout, target_layout
from jaxspec.checkpoints.loading import load_head, load_target
from jaxspec.checkpoints.writing import tensors_of, write_checkpoint
from jaxspec.model_config import ModelConfig
from jaxspec.models.eagle3 import Eagle3, Eagle3Config, default_captured_layers
from jaxspec.models.layers import AttentionMetadata, causal_metadata
from jaxspec.models.llama import Llama
from jaxspec.models.registry import split_model
from jaxspec.train.optimizer import muon, scale_of
from jaxspec.train.ttt import (
    DECAY,
    LOSSES,
    TRAINING,
    Rows,
    accuracies,
    chain_attention,
    distances,
    metadata,
    teach,
    unlikely_match,
    unroll,
    whole_rows,
)
from pallas_kernels.tree_attention import tree_attention
from tests.fixtures.demo.make import batches

TARGET = {
    "model_type": "llama", "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 7,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "tie_word_embeddings": True,
}  # fmt: skip
HEAD = {**TARGET, "num_hidden_layers": 1, "tie_word_embeddings": False, "draft_vocab_size": 12}
HEAD_CONFIG = Eagle3Config(
    layer=ModelConfig.from_hf({**HEAD, "num_hidden_layers": 1}),
    target_hidden_size=16,
    captured_layers=default_captured_layers(7),
    draft_vocab_size=12,
)
IDS = np.arange(1, 37, 3)


@pytest.fixture(scope="module")
def models():
    def scaled(model):  # the default weights are so small that every attention weight is nearly equal
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        return nnx.merge(graph, jax.tree.map(lambda array: 12.0 * array if array.ndim == 2 else array, params), rest)

    target = scaled(Llama(ModelConfig.from_hf(TARGET), rngs=nnx.Rngs(0)))
    head = scaled(Eagle3(HEAD_CONFIG, rngs=nnx.Rngs(1)))
    head.draft_to_target[...] = jnp.asarray(IDS, jnp.int32)
    return target, head


def one_chain(head, target, tokens, features, first, steps):
    """What drafting computes from position `first`: a causal pass over the true pairs, then one row per step."""
    width = first + 1
    rows = causal_metadata(1, width)
    out = head(target.embed(tokens[:, 1 : width + 1]), head.project(features[:, :width]), rows)
    hidden, logits = out.hidden[:, -1:], [head.logits(out.hidden[:, -1:], target)]
    for step in range(1, steps):
        token = tokens[:, width + step : width + step + 1]
        seen = jnp.ones((1, 1, width + step), bool)
        row = AttentionMetadata(jnp.array([[first + step]]), rows.page_table, rows.start, rows.length, seen)
        out = head(target.embed(token), hidden, row, None, out.window)
        hidden = out.hidden
        logits.append(head.logits(hidden, target))
    return jnp.concatenate(logits, 1)[0]


@pytest.mark.variants
def test_unrolling_is_drafting_from_every_position_at_once(models):
    target, head = models
    length, steps = 6, 3
    tokens = jax.random.randint(jax.random.key(0), (1, length), 0, 40)
    rows = whole_rows(1, length)._replace(tokens=tokens)
    taught = jax.jit(lambda rows: teach(target, HEAD_CONFIG.captured_layers, rows))(rows)
    learner = split_model(head).merge(split_model(head).params, TRAINING)
    out = jax.jit(lambda taught: unroll(learner, target, taught, rows, steps))(taught)

    # The losses and what was right, from the chains one by one.
    choice, probs = taught.choice[0], np.asarray(jax.nn.softmax(target.logits(taught.hidden)[0][:, IDS]))
    losses, correct = np.zeros(steps), np.zeros((steps, length), bool)
    for first in range(length - 1):
        of_first = partial(one_chain, head, target, first=first, steps=min(steps, length - 1 - first))
        chain = jax.jit(of_first)(tokens, taught.features)
        for step, logits in enumerate(chain):
            at = first + 1 + step
            losses[step] += -np.sum(probs[at] * np.array(jax.nn.log_softmax(logits))) * (choice[at] in IDS) / length
            correct[step, first] = IDS[np.argmax(logits)] == choice[at]
    np.testing.assert_allclose(out.losses, losses, rtol=1e-5)
    np.testing.assert_allclose(out.loss, sum(DECAY**step * loss for step, loss in enumerate(losses)), rtol=1e-5)
    np.testing.assert_array_equal(out.correct[:, 0], correct)


def test_losses_by_hand():
    logits, teacher = np.random.default_rng(0).normal(size=(2, 6, 9)).astype(np.float32) * 3
    p, q = (np.exp(each) / np.exp(each).sum(-1, keepdims=True) for each in (teacher, logits))
    np.testing.assert_allclose(LOSSES["cross-entropy"](teacher, logits), -(p * np.log(q)).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(LOSSES["lk"](jax.nn.log_softmax(teacher), logits), -np.log(np.minimum(p, q).sum(-1)), rtol=1e-4)
    some = jax.nn.log_softmax(teacher)[..., :4], logits[..., :4]  # what is accepted of drafts from a vocabulary of four tokens
    q = np.exp(some[1]) / np.exp(some[1]).sum(-1, keepdims=True)
    np.testing.assert_allclose(LOSSES["lk"](*some), -np.log(np.minimum(p[..., :4], q).sum(-1)), rtol=1e-4)
    far = np.array([200.0, 0, -200]), np.array([-200.0, 0, 200])
    assert np.isfinite(LOSSES["lk"](*far)) and np.isfinite(jax.grad(LOSSES["lk"], 1)(*far)).all()


def test_the_gradient_of_a_loss_is_that_of_its_definition(models):
    """It is made together with the loss, chunk by chunk. The target's probabilities are those of its whole vocabulary."""
    target, head = models
    random = np.random.default_rng(1)
    goal, hidden = (jnp.asarray(random.normal(size=size), jnp.float32) for size in ((2, 3, 16), (2, 3, 2, 16)))
    weights = jnp.asarray(random.uniform(size=(2, 3, 2)), jnp.float32)
    logits = jax.nn.log_softmax(target.logits(goal))[..., IDS][:, :, None]
    log_sum = jax.nn.logsumexp(target.logits(goal), -1, keepdims=True)

    def simple(hidden):
        return jnp.sum(weights * unlikely_match(logits, head.logits(hidden, target)) * DECAY ** jnp.arange(2))

    def ours(hidden):
        return distances(head, target, goal[:, :, None], log_sum, hidden, weights, "lk", DECAY)[0]

    for one, other in zip(*(jax.value_and_grad(each)(hidden) for each in (simple, ours)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_unrolled_mask():
    rows = metadata(whole_rows(2, 3), step=2)
    expected = [[1, 0, 0, 1, 0, 0, 1, 0, 0], [1, 1, 0, 0, 1, 0, 0, 1, 0], [1, 1, 1, 0, 0, 1, 0, 0, 1]]
    np.testing.assert_array_equal(rows.mask, np.array([expected] * 2, bool))
    np.testing.assert_array_equal(rows.positions, [[2, 3, 4]] * 2)


@pytest.mark.parametrize("step", [0, 1, 3])
def test_chain_attention_is_tree_attention_with_the_unrolled_mask(step):
    batch, width, heads, kv_heads, head_dim = 2, 5, 4, 2, 8
    rows = whole_rows(batch, width)._replace(segments=np.array([[1, 1, 2, 2, 0], [1, 1, 1, 1, 1]], np.int32))
    _, pages, start, length, mask = metadata(rows, step)
    keys = jax.random.split(jax.random.key(step), 3)
    q = jax.random.normal(keys[0], (batch, width, heads, head_dim))
    k, v = (jax.random.normal(key, (batch, (step + 1) * width, kv_heads, head_dim)) for key in keys[1:])
    none = jnp.zeros((1, 1, kv_heads, head_dim))
    arguments = q, none, none, pages, start, length, k, v, mask
    np.testing.assert_allclose(chain_attention(*arguments), tree_attention(*arguments), atol=1e-6)


def test_conversations_in_one_row_do_not_see_each_other():
    zeros = np.zeros((1, 4), np.int32)
    rows = metadata(Rows(zeros, np.array([[1, 2, 2, 0]]), zeros, zeros > 0), step=0)
    np.testing.assert_array_equal(rows.mask[0], np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [1, 1, 1, 0]], bool))


def test_accuracies_count_leading_right_drafts():
    correct = np.array([[[1, 1, 0, 1, 0]], [[1, 0, 1, 0, 0]]], bool)
    counted = np.array([[[1, 1, 1, 1, 1]], [[1, 1, 1, 1, 0]]], bool)
    assert accuracies(correct, counted) == {"accuracy": [0.75, 0.5], "given_chain_right": [0.75, 0.333], "accept_length": 2.0}
    assert accuracies(correct, counted & False)["accept_length"] == 1.0


def test_the_rate_depends_on_the_step_only():
    scales = [scale_of(step, 200) for step in range(200)]
    assert scales[0] < 0.06 and max(scales) == 1.0 and 0 < scales[-1] < 0.02 and scales[50] == 1.0 > scales[70]


def test_checkpoints_load_again(models, tmp_path):
    target, head = models
    for _ in range(2):  # the second replaces the first
        tensors = tensors_of(target_layout(target.config), split_model(target).params)
        write_checkpoint(tmp_path / "target", TARGET, tensors, dtype=jnp.float32)
    layout = eagle3_layout(HEAD_CONFIG, SAFEAILAB, has_token_map=True, has_members=True)
    write_checkpoint(tmp_path / "head", HEAD, tensors_of(layout, split_model(head).params), dtype=jnp.float32)
    loaded_target = load_target(tmp_path / "target", jnp.float32)
    for model, loaded in ((target, loaded_target), (head, load_head(tmp_path / "head", loaded_target))):
        jax.tree.map(np.testing.assert_array_equal, split_model(model).params, loaded.params)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head", "target"]


def test_batches_cover_every_window_once_per_epoch():
    source = batches(np.arange(41, dtype=np.int32), length=4, tokens=8)
    epoch = np.concatenate([next(source) for _ in range(5)])
    assert epoch.shape == (10, 5)
    assert sorted(epoch[:, 0]) == list(range(0, 40, 4))
    np.testing.assert_array_equal(epoch - epoch[:, :1], [[0, 1, 2, 3, 4]] * 10)


@pytest.mark.variants
def test_muon_orthogonalizes_kernels_inside_layers_only():
    shapes = {
        "embed_tokens": (9, 4),
        "layers": {0: {"up": {"kernel": (4, 9)}}},
        "lm_head": {"kernel": (4, 9)},
        "norm": {"weight": (4,)},
    }
    normal = partial(jax.random.normal, jax.random.key(0))
    gradient = jax.tree.map(normal, shapes, is_leaf=lambda x: isinstance(x, tuple))
    optimizer = muon(1.0, 1e-3)
    zeros = jax.tree.map(jnp.zeros_like, gradient)
    updates, _ = jax.jit(optimizer.update)(gradient, optimizer.init(zeros), zeros)
    singular = np.linalg.svd(updates["layers"][0]["up"]["kernel"] / np.sqrt(9 / 4), compute_uv=False)
    assert singular.min() > 0.5 and singular.max() < 1.5
    for update in (updates["embed_tokens"], updates["lm_head"]["kernel"], updates["norm"]["weight"]):
        np.testing.assert_allclose(np.abs(update), np.abs(update).max(), rtol=1e-3)  # the signs, Adam's first step
