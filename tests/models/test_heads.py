"""Every kind and variant of draft head, from its file to its logits, against the same head in NumPy."""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoints.json_files import read_config
from jaxspec.checkpoints.loading import load_head, load_target
from jaxspec.models.head import HeadOutput
from jaxspec.models.layers import AttentionMetadata, causal_metadata
from jaxspec.testing import random_eagle, random_head, random_mtp, tiny_config, tiny_target, write_target
from jaxspec.typing import KeysValues
from tests.checkpoints.real_heads import (
    HEADS,
    HIDDEN,
    VOCAB,
    Head,
    eagle3_llama31,
    eagle_llama2,
    eagle_llama3,
    eagle_qwen2,
    layer_shapes,
    mimo_mtp,
    qkv_bias,
    speculators,
)  # fmt: skip
from tests.models import heads_in_numpy
from tests.models.heads_in_numpy import Output
from tests.reference import FIXTURES, MIMO

ROWS = 12
NORMS = {"midlayer__self_attn__q_norm__weight": (8,), "midlayer__self_attn__k_norm__weight": (8,)}
STREAM_NORMS = {f"fc_norm__{i}__weight": (HIDDEN,) for i in range(3)}
LEGACY_NORMS = {f"aux_norm_{name}__weight": (HIDDEN,) for name in ("low", "mid", "high")}
IDS = "eagle_aux_hidden_state_layer_ids"


def second_layer(norm: str) -> dict:
    return {f"layers.1.{norm}.weight": (HIDDEN,)} | layer_shapes("layers.1.")


EAGLE = {
    "llama 2, fc bias": eagle_llama2(),
    "llama 3, no bias": eagle_llama3(),
    "qwen 2, q/k/v bias": eagle_qwen2(),
    "embedding is the target's": eagle_llama2().but("embed_tokens.weight"),
    "two layers": eagle_llama2().but(config={"num_hidden_layers": 2}, **second_layer("input_layernorm")),
}
EAGLE3 = {
    "SafeAILab": eagle3_llama31(),
    "a config that repeats the target's layers": eagle3_llama31().but(config={"num_hidden_layers": 40, "bias": True}),
    "full vocabulary, no maps": eagle3_llama31(VOCAB).but("d2t", "t2d"),
    "the target's lm_head": eagle3_llama31().but("d2t", "t2d", "lm_head.weight", config={"draft_vocab_size": None}),
    "narrower than the target": eagle3_llama31(hidden=16, target=HIDDEN).but(
        config={"target_hidden_size": HIDDEN}, embed_tokens__weight=(VOCAB, 16)
    ),
    "fc bias and q/k/v bias": eagle3_llama31().but(fc__bias=(HIDDEN,), **qkv_bias("midlayer.")),
    "q and k norms": eagle3_llama31().but(**NORMS),
    "norm per stream": eagle3_llama31().but(config={"fc_norm": True}, **STREAM_NORMS),
    "norm per stream, told by its tensors": eagle3_llama31().but(**STREAM_NORMS),
    "norm per stream, old names": eagle3_llama31().but(config={"use_aux_norm": True}, **LEGACY_NORMS),
    "norm of all streams": eagle3_llama31().but(
        config={"eagle_config": {"norm_before_fc": True}}, input_norm__weight=(3 * HIDDEN,)
    ),
    "normed residual": eagle3_llama31().but(config={"norm_before_residual": True}),
    "normed output fed back": eagle3_llama31().but(config={"norm_output": True}),
    "layers named by their output": eagle3_llama31().but(config={"eagle_config": {IDS: [0, 2, 7]}}),
    "two streams": eagle3_llama31().but("fc.weight", config={"eagle_config": {IDS: [1, 4]}}, fc__weight=(HIDDEN, 2 * HIDDEN)),
    "SGLang, two layers": eagle3_llama31(first="layers.0.").but(
        config={"num_hidden_layers": 2}, **second_layer("hidden_norm"), layers__1__input_layernorm__weight=(HIDDEN,)
    ),
    "SGLang, midlayer and another": eagle3_llama31().but(config={"num_hidden_layers": 2}, **second_layer("hidden_norm")),
    "speculators": speculators(),
    "speculators, layers named by their input": speculators(**{IDS: [1, 3, 8]}),
    "speculators, plain residual, normed output": speculators(norm_before_residual=False, norm_output=True),
}  # fmt: skip
CAPTURED = {
    "layers named by their output": (1, 3, 8), "two streams": (2, 5), "speculators, layers named by their input": (1, 3, 8),
}  # fmt: skip


def settings_of(head: Head) -> dict:
    """What the NumPy head needs to know."""
    config = {**head.config, **head.config.get("transformer_layer_config", {}), **head.config.get("eagle_config", {})}
    config["fc_norm"] = config.get("fc_norm") or "fc_norm.0.weight" in head.tensors
    config.setdefault("rope_theta", 10000.0)
    config.setdefault("head_dim", config["hidden_size"] // HEADS)
    return config


def compare(tmp_path, head: Head, reference: Callable[..., Output], captured: tuple[int, ...]) -> None:
    """One pass over the target's features, and one that feeds the head's own output back."""
    target = tiny_target()
    loaded = load_head(head.write(tmp_path / "head"), target)
    assert loaded.config.captured_layers == captured
    model, module = target.merge(target.params), loaded.merge(loaded.params)
    ids = jnp.asarray(np.random.default_rng(1).integers(VOCAB, size=(1, ROWS)), jnp.int32)
    rows = causal_metadata(1, ROWS)
    features = model(ids, rows, capture=captured).features
    following = jnp.roll(ids, -1, 1)
    out = module(module.embed(following, model), module.project(features), rows)
    again = module(module.embed(following, model), out.hidden, rows)

    tensors = {name: tensor.astype(np.float64) for name, tensor in head.tensors.items()}
    settings, lm_head = settings_of(head), np.asarray(model.lm_head.kernel[...], np.float64).T
    table = tensors.get("embed_tokens.weight", np.asarray(model.embed_tokens[...], np.float64))
    embeddings, hidden = table[np.asarray(following[0])], np.asarray(features[0], np.float64)
    if captured:
        hidden = heads_in_numpy.eagle3_features(tensors, settings, np.split(hidden, len(captured), -1))
    first = reference(tensors, settings, embeddings, hidden, lm_head)
    second = reference(tensors, settings, embeddings, first.fed_back, lm_head)
    for found, expected in ((out, first), (again, second)):
        close(found.hidden[0], expected.fed_back)
        close(module.logits(found.hidden, model)[0], expected.logits)


def close(found: jnp.ndarray, expected: np.ndarray) -> None:
    """Equal up to float32 rounding, relative to the largest value."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", EAGLE)
def test_eagle(tmp_path, name):
    compare(tmp_path, EAGLE[name], heads_in_numpy.eagle, ())


@pytest.mark.parametrize("name", EAGLE3)
def test_eagle3(tmp_path, name):
    compare(tmp_path, EAGLE3[name], heads_in_numpy.eagle3, CAPTURED.get(name, (2, 4, 5)))


def test_mtp(tmp_path):
    """In the target's own directory, as in MiMo's checkpoint."""
    target = tiny_target(qkv_bias=True)
    directory = write_target(tmp_path / "mimo", target)
    config = {"model_type": "mimo", "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "head_dim": 8}
    tensors = mimo_mtp()
    both = Head(read_config(directory) | config, load_file(directory / "model.safetensors") | tensors).write(tmp_path / "both")
    loaded = load_head(both, target)
    model, module = target.merge(target.params), loaded.merge(loaded.params)
    ids, rows = jnp.arange(ROWS)[None] * 7 % VOCAB, causal_metadata(1, ROWS)
    hidden = model(ids, rows).hidden
    out = module(module.embed(ids, model), module.project(hidden), rows)
    embeddings, lm_head = np.asarray(model.embed(ids)[0]), np.asarray(model.lm_head.kernel[...]).T
    expected = heads_in_numpy.mtp(tensors, config, embeddings, np.asarray(hidden[0]), lm_head)
    close(out.hidden[0], expected.fed_back)
    close(module.logits(out.hidden, model)[0], expected.logits)


def test_mimo_equals_its_reference():
    """Target, MTP layer and a greedy chain of three drafts, in which the layer reads its own output."""
    golden = np.load(FIXTURES / "eagle_ref/out/mimo_tiny.npz")
    target = load_target(MIMO, jnp.float32)
    head = load_head(MIMO, target)
    model, module = target.merge(target.params), head.merge(head.params)
    width = golden["prompt"].shape[1]
    out = model(jnp.asarray(golden["prompt"], jnp.int32), causal_metadata(1, width))
    np.testing.assert_allclose(out.hidden, golden["target_hidden"], atol=2e-5)
    np.testing.assert_allclose(model.logits(out.hidden), golden["target_logits"], atol=2e-4)
    pairs = np.concatenate([golden["prompt"][:, 1:], golden["root"]], 1)
    drafted = module(module.embed(jnp.asarray(pairs, jnp.int32), model), module.project(out.hidden), causal_metadata(1, width))
    np.testing.assert_allclose(drafted.hidden, golden["mtp_hidden"], atol=2e-5)
    np.testing.assert_allclose(module.logits(drafted.hidden, model), golden["mtp_logits"], atol=2e-4)
    hidden, chain = jnp.concatenate([out.hidden, drafted.hidden[:, -1:]], 1), []
    for _ in golden["chain3"]:
        chain.append(int(jnp.argmax(module.logits(hidden[:, -1:], model))))
        pairs = np.append(pairs, [[chain[-1]]], 1)
        width += 1
        again = module(module.embed(jnp.asarray(pairs, jnp.int32), model), hidden, causal_metadata(1, width))
        hidden = jnp.concatenate([hidden, again.hidden[:, -1:]], 1)
    assert chain == golden["chain3"].tolist()


@pytest.mark.parametrize(
    "make",
    [partial(random_eagle, num_layers=2), partial(random_head, layer={"num_layers": 2}), random_mtp],
    ids=["EAGLE", "EAGLE3", "MTP"],
)
def test_every_layer_reads_its_own_cache_and_window(make):
    """Rows 0-4 from the cache and 5-8 from the window are to rows 9-11 what they are in one pass over all."""
    head = make(tiny_config())
    module = head.merge(head.params)
    embeddings, hidden = jnp.asarray(np.random.default_rng(0).normal(size=(2, 1, ROWS, HIDDEN)), jnp.float32)
    causal = causal_metadata(1, ROWS)
    whole = module(embeddings, hidden, causal)
    cache = tuple(KeysValues(*(array[0, :5, None] for array in layer)) for layer in whole.window)  # one slot a page
    table, start, length = jnp.arange(5)[None], jnp.zeros(1, jnp.int32), jnp.full(1, 5)

    def part(first: int, last: int, window: tuple[KeysValues, ...] | None) -> HeadOutput:
        rows = AttentionMetadata(causal.positions[:, first:last], table, start, length, causal.mask[:, first:last, 5:last])
        return module(embeddings[:, first:last], hidden[:, first:last], rows, cache, window)

    second = part(5, 9, None)
    third = part(9, ROWS, second.window)
    close(jnp.concatenate([second.hidden, third.hidden], 1), np.asarray(whole.hidden[:, 5:]))
    for found, expected in zip(third.window, whole.window, strict=True):
        close(found.k, np.asarray(expected.k[:, 5:]))
        close(found.v, np.asarray(expected.v[:, 5:]))
