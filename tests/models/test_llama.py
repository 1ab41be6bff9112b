"""The target and the head against the reference's numbers, and RoPE against its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.decoding.head_drafter import DraftInputs, draft, visible_slots
from jaxspec.models.eagle3 import Eagle3, default_captured_layers
from jaxspec.models.layers import causal_metadata
from jaxspec.models.linear import NO_TOKEN
from jaxspec.models.llama import Llama
from jaxspec.rope import RopeConfig, inverse_frequencies
from jaxspec.testing import random_head, tiny_config, tiny_target
from jaxspec.tree_shape import TreeShape
from jaxspec.typing import KeysValues
from pallas_kernels.cpu import what_is_missing
from pallas_kernels.rotate_qkv.reference import rotate
from tests.reference import FIXTURES, head, target, trace


def test_target_forward_equals_the_reference():
    golden = np.load(FIXTURES / "eagle_ref/out/target_forward.npz")
    ids = golden["ids"].reshape(1, -1)
    module = target().merge(target().params)
    out = module(jnp.asarray(ids, jnp.int32), causal_metadata(*ids.shape), capture=default_captured_layers(8))
    streams = np.split(np.asarray(out.features), 3, -1)
    for layer, stream in zip(default_captured_layers(8), streams, strict=True):
        np.testing.assert_allclose(stream.ravel(), golden[f"aux{layer}"].ravel(), atol=2e-5)
    np.testing.assert_allclose(np.asarray(out.hidden).ravel(), golden["last"].ravel(), atol=5e-5)
    np.testing.assert_allclose(np.asarray(module.logits(out.hidden)).ravel(), golden["logits"].ravel(), atol=2e-4)


def test_features_and_candidate_scores_equal_the_reference():
    """What the head reads for the second prompt, and the log probabilities of all candidates that it drafts from that."""
    golden = np.load(FIXTURES / "eagle_ref/out/e3_trained_sgl3_4_16_t0.npz")
    run = trace()["runs"][1]
    prompt, width = run["prompt"], len(run["prompt"])
    module, draft_head = target().merge(target().params), head().merge(head().params)
    features = module(jnp.array([prompt]), causal_metadata(1, width), capture=default_captured_layers(8)).features
    np.testing.assert_allclose(features[0], golden["p1_s0_hidden_in"], atol=5e-5)

    pairs = jnp.array([[*prompt[1:], run["steps"][0]["draft_tokens"][0]]])
    none = KeysValues(*(jnp.zeros((1, 1, 2, 16)),) * 2)
    out = draft_head(module.embed(pairs), draft_head.project(features), causal_metadata(1, width))
    table = jnp.arange(width + 1)[None]  # the pairs' own keys become the cache, one slot a page, slot 0 unused
    (window,) = out.window
    cache = (KeysValues(*(jnp.concatenate([empty, kv[0][:, None]]) for empty, kv in zip(none, window, strict=True))),)
    length = jnp.array([width])
    seen = visible_slots(table, length + 1, 1, None)
    inputs = DraftInputs(draft_head, module, out.hidden[:, -1], cache, length, seen, None)
    candidates, _ = draft(inputs, TreeShape(3, 4, 16))
    np.testing.assert_allclose(candidates.scores[0], golden["p1_s0_all_scores"], atol=2e-4)


@pytest.mark.parametrize("kind", ["target", "tied target", "head"])
def test_logits_of_bfloat16_models_are_not_rounded(kind):
    """They are products of bfloat16 numbers, summed and kept in float32."""
    config = tiny_config(tie_word_embeddings=kind == "tied target")
    target = Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    hidden = jax.random.normal(jax.random.key(1), (7, config.hidden_size), jnp.bfloat16)
    if kind == "head":
        head = Eagle3(random_head(tiny_config()).config, dtype=jnp.bfloat16, rngs=nnx.Rngs(2))
        logits, weight = head.logits(hidden, target), head.lm_head.kernel[...]
        hidden = head.norm(hidden)
    else:
        logits = target.logits(hidden)
        weight = target.embed_tokens[...].T if kind == "tied target" else target.lm_head.kernel[...]
    exact = np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, exact, atol=1e-5 * np.abs(exact).max())


def test_a_window_over_no_cache_equals_token_by_token_windows():
    """One forward of a whole sequence and one with another mask and positions that mean the same."""
    model = tiny_target()
    module, tokens = model.merge(model.params), jnp.array([[5, 9, 2, 77, 31]])
    whole = module(tokens, causal_metadata(1, 5)).hidden
    order = jnp.array([3, 0, 4, 1, 2])  # rows may come in any order: positions and mask say what they are
    causal = causal_metadata(1, 5)
    shuffled = causal._replace(positions=causal.positions[:, order], mask=causal.mask[:, order][:, :, order])
    np.testing.assert_allclose(module(tokens[:, order], shuffled).hidden, whole[:, order], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("head_dim", [8, 16], ids=["attention by XLA", "by a kernel"])
def test_places_without_a_token_change_nothing(head_dim):
    """And with kernels for CPUs they cost next to nothing: their rows stay zeros, whatever the biases."""
    model = tiny_target(qkv_bias=True, head_dim=head_dim, num_layers=2)
    module, tokens = model.merge(model.params), jnp.array([[5, 9, 2], [77, 31, 8]])
    whole = module(tokens, causal_metadata(2, 3))
    padded = module(jnp.pad(tokens, ((0, 0), (0, 2)), constant_values=NO_TOKEN), causal_metadata(2, 5))
    np.testing.assert_allclose(padded.hidden[:, :3], whole.hidden, atol=1e-5)
    assert np.isfinite(padded.hidden).all()
    if jax.default_backend() == "cpu" and head_dim == 16 and what_is_missing() is None:
        np.testing.assert_array_equal(padded.hidden[:, :3], whole.hidden)
        assert not padded.hidden[:, 3:].any()


def test_default_captured_layers():
    assert default_captured_layers(32) == (2, 16, 29)
    assert default_captured_layers(8) == (2, 4, 5)
    with pytest.raises(ValueError, match="needs N >= 7 layers, got 6"):
        default_captured_layers(6)


def test_rotation_depends_on_distance_only():
    frequencies = jnp.asarray(inverse_frequencies(RopeConfig(), 8))
    angles = [(jnp.array([[position]]), frequencies) for position in (3, 11, 103, 111)]
    q, k = jnp.asarray(np.random.default_rng(0).normal(size=(2, 1, 1, 1, 8)), jnp.float32)
    near, far = (float(jnp.sum(rotate(q, *angles[i]) * rotate(k, *angles[i + 1]))) for i in (0, 2))
    assert near == pytest.approx(far, abs=1e-4)
    assert near != pytest.approx(float(jnp.sum(rotate(q, *angles[0]) * rotate(k, *angles[0]))), abs=1e-2)


def test_linear_and_llama3_scaling():
    plain = inverse_frequencies(RopeConfig(theta=5e5), 128)
    np.testing.assert_allclose(inverse_frequencies(RopeConfig(theta=5e5, kind="linear", factor=4.0), 128), plain / 4, rtol=1e-6)
    llama3 = inverse_frequencies(RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192), 128)
    wavelength = 2 * np.pi / plain
    np.testing.assert_allclose(llama3[wavelength < 8192 / 4], plain[wavelength < 8192 / 4], rtol=1e-6)
    np.testing.assert_allclose(llama3[wavelength > 8192], plain[wavelength > 8192] / 8, rtol=1e-6)
    between = (wavelength >= 8192 / 4) & (wavelength <= 8192)
    assert between.sum() >= 3
    assert (llama3[between] < plain[between]).all() and (llama3[between] > plain[between] / 8).all()
