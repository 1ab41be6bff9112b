"""Draft heads: what is recognised, what is refused and why, and what becomes of embeddings and token maps."""

import json
import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoints.checkpoint import Checkpoint
from jaxspec.checkpoints.exporting import DIALECTS, head_checkpoint, warn_of_unread
from jaxspec.checkpoints.layouts import captured_layers
from jaxspec.checkpoints.loading import check_head, head_kind, load_head, load_target
from jaxspec.checkpoints.writing import tensors_of, write_checkpoint
from jaxspec.models.eagle3 import default_captured_layers
from jaxspec.models.mtp import MTPConfig
from jaxspec.rope import RopeConfig
from jaxspec.testing import random_eagle, random_head, random_mtp, tiny_config, tiny_target, write_head, write_target
from tests.checkpoints.real_heads import (
    HIDDEN,
    VOCAB,
    Head,
    deepspec_dflash,
    deepspec_eagle3,
    dflash,
    dspark,
    eagle3_llama31,
    eagle_llama2,
    eagle_llama3,
    eagle_qwen2,
    speculators,
    token_map,
)
from tests.checkpoints.test_targets import same
from tests.reference import CHECKPOINTS, HEAD, target

IDS = "eagle_aux_hidden_state_layer_ids"
LINEAR = RopeConfig(kind="linear", factor=2.0)


@pytest.mark.parametrize("draft_vocab_size", [64, 128, None])
def test_head_round_trip(tmp_path, draft_vocab_size):
    model = tiny_target()
    head = random_head(model.config, draft_vocab_size=draft_vocab_size)
    assert same(load_head(write_head(tmp_path / "head", head), model).params, head.params)


def test_bin_and_safetensors_hold_the_same_head():
    by_bin, by_safetensors = (load_head(CHECKPOINTS / name, target()) for name in ("eagle3_trained_dv128", HEAD.name))
    assert by_bin.config == by_safetensors.config
    assert same(by_bin.params, by_safetensors.params)
    assert same(load_head(CHECKPOINTS / "eagle3_trained_dv128/pytorch_model.bin", target()).params, by_bin.params)


@pytest.mark.parametrize(
    ("head", "algorithm"),
    [
        (eagle_llama2(), "EAGLE"),
        (eagle_llama3(), "EAGLE"),
        (eagle_qwen2(), "EAGLE"),
        (eagle3_llama31(), "EAGLE3"),
        (speculators(), "EAGLE3"),
        (deepspec_eagle3(), "EAGLE3"),
        (dflash(), "DFLASH"),
        (deepspec_dflash(), "DFLASH"),
        (dspark(), "DSPARK"),
    ],
)
def test_the_tensors_tell_what_a_head_is(tmp_path, head, algorithm):
    directory = head.write(tmp_path / "head", "float16")
    assert head_kind(directory) == algorithm
    assert load_head(directory, tiny_target()).config.algorithm == algorithm


def test_a_head_has_its_own_rope():
    """SafeAILab's EAGLE-3 config has no rope_theta: that is 10000, whatever the target's is."""
    assert load_head(HEAD, target()).config.layer.rope.theta == 10000.0
    assert "rope_theta" not in json.loads((HEAD / "config.json").read_text())


def test_a_block_heads_config_names_outputs_windows_and_causes(tmp_path):
    """Layers by their output, evenly by default; a layer with a window is causal, and others where the config says so."""
    windows = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9, "use_sliding_window": True}
    cases = {
        "plain": (dflash(), (2, 4, 6), (False, False), (None, None)),
        "embedding": (dflash(target_layer_ids=[-1, 0, 6]), (0, 1, 7), (False, False), (None, None)),
        "default layers": (
            dflash(target_layer_ids=None).but("fc.weight", fc__weight=(HIDDEN, 2 * HIDDEN)), (2, 6), (False, False), (None, None),
        ),
        "windows": (dflash().but(config=windows), (2, 4, 6), (False, True), (None, 9)),
        "windows, not causal": (dflash().but(config=windows | {"is_causal": False}), (2, 4, 6), (False, False), (None, 9)),
        "JetSpec": (dflash(causal_head=True), (2, 4, 6), (True, True), (None, None)),
        "DSpark": (dspark(), (2, 4, 6), (False, False), (None, None)),
        "DeepSpec's DFlash": (deepspec_dflash(), (2, 4, 6), (False, False), (None, None)),
        "projector": (dflash(projector_type="dflash"), (2, 4, 6), (False, False), (None, None)),
        "SpecForge's DSpark": (
            dspark().but(config={"dflash_config": {"projector_type": "dspark", "markov_rank": 4}, "markov_rank": None}),
            (2, 4, 6), (False, False), (None, None),
        ),
    }  # fmt: skip
    for name, (head, captured, causal, sizes) in cases.items():
        config = load_head(head.write(tmp_path / name), tiny_target()).config
        assert (config.captured_layers, config.causal, config.windows) == (captured, causal, sizes), name
        assert not config.own_embedding and config.draft_vocab_size is None
        assert config.max_steps == (7 if name.endswith(("DSpark", "DeepSpec's DFlash")) else 5) and config.mask_token_id == 127


def test_a_block_head_takes_no_token_map(tmp_path):
    (tmp_path / "map.json").write_text("[5, 9, 2]")
    with pytest.raises(ValueError, match="a token map is not supported for a DFLASH head: leave out"):
        load_head(dflash().write(tmp_path / "head"), tiny_target(), token_map=tmp_path / "map.json")


def with_map(*without: str, **maps: np.ndarray) -> Head:
    """A head with these token maps."""
    head = eagle3_llama31().but(*without)
    return Head(head.config, head.tensors | maps)


MAPS = token_map(64)
REFUSED = {
    "no lm_head": (eagle3_llama31().but("lm_head.weight"), r"'lm_head.weight' is missing \(expected with shape \(64, 32\)\)"),
    "narrow and no lm_head": (
        eagle3_llama31(hidden=16, target=HIDDEN).but(
            "lm_head.weight", "d2t", "t2d",
            config={"draft_vocab_size": None, "target_hidden_size": HIDDEN}, embed_tokens__weight=(VOCAB, 16),
        ),
        "has no lm_head, and is 16 wide: the target's takes 32",
    ),
    "tied to an embedding": (
        eagle3_llama31().but("lm_head.weight", "d2t", "t2d", config={"draft_vocab_size": None, "tie_word_embeddings": True}),
        "tie_word_embeddings=True without lm_head",
    ),
    "no map": (eagle3_llama31().but("d2t", "t2d"), r"'d2t' is missing \(expected with shape \(64,\)\)"),
    "a map of fractions": (
        with_map(d2t=np.zeros(64, np.float32)),
        "'d2t' in model.safetensors has dtype float32; expected integers",
    ),
    "a map that repeats": (with_map(d2t=-np.arange(64)), "distinct target ids"),
    "maps that disagree": (with_map(t2d=np.ones(VOCAB, np.bool_)), "d2t and t2d disagree"),
    "maps of as many, other tokens": (with_map(t2d=np.roll(MAPS["t2d"], 1)), "d2t and t2d disagree"),
    "a map below the vocabulary": (  # also without t2d, which would contradict it
        with_map("t2d", d2t=np.r_[-1, MAPS["d2t"][1:]]),
        r"distinct target ids in \[0, 128\); it reaches -1 to 126, 64 of 64 distinct",
    ),
    "a map beyond the vocabulary": (
        with_map("t2d", d2t=np.r_[MAPS["d2t"][:-1], VOCAB - 63]),
        r"distinct target ids in \[0, 128\); it reaches 0 to 128, 64 of 64 distinct",
    ),
    "no embedding": (
        eagle3_llama31(hidden=16, target=HIDDEN).but(config={"target_hidden_size": HIDDEN}), "'embed_tokens.weight' is missing",
    ),
    "unknown tensor": (eagle3_llama31().but(mask_hidden=(1, 1, 96)), "tensor 'mask_hidden' in model.safetensors is unknown"),
    "stray norm": (
        eagle3_llama31().but(config={"eagle_config": {"norm_before_fc": False}}, input_norm__weight=(96,)),
        "'input_norm.weight' in .* is unknown",
    ),
    "switch without its tensors": (eagle3_llama31().but(config={"fc_norm": True}), "'fc_norm.0.weight' is missing"),
    "two norms": (
        eagle3_llama31().but(config={"fc_norm": True, "norm_before_fc": True}), "fc_norm and norm_before_fc exclude each other",
    ),
    "no features": (eagle3_llama31().but(config={"eagle_config": {"use_aux_hidden_state": False}}), "use_aux_hidden_state=False"),
    "parallel drafting": (speculators(parallel_drafting=True), "parallel_drafting=True is not supported"),
    "another speculator": (speculators(speculators_model_type="dflash"), "speculators_model_type='dflash'"),
    "layers by which end?": (eagle3_llama31().but(config={IDS: [2, 4, 5]}), "does not say whether it names layers by their output"),
    "layers by name": (eagle3_llama31().but(config={"eagle_config": {IDS: ["1", "2"]}}), "must be a whole number from -10000"),
    "a layer twice": (eagle3_llama31().but(config={"eagle_config": {IDS: [1, 1, 3]}}), r"ascending, distinct layers.*\[2, 2, 4\]"),
    "descending layers": (
        eagle3_llama31().but(config={"eagle_config": {IDS: [4, 1, 3]}}), r"ascending, distinct layers.*\[5, 2, 4\]",
    ),
    "DeepSpec's layers by name": (
        eagle3_llama31().but(config={"target_layer_ids": ["1", "2"]}), "target_layer_ids.0 must be a whole number from -10000",
    ),
    "layers beyond the target": (speculators(**{IDS: [2, 4, 9]}), "names layers that a target of 8 layers does not have"),
    "layers before the target": (speculators(**{IDS: [-1, 2, 4]}), "names layers that a target of 8 layers does not have"),
    "another number of streams": (
        eagle3_llama31().but(config={"num_aux_hidden_states": 4}), "num_aux_hidden_states is 4.* names 0 layers",
    ),
    "more streams than layers": (
        eagle3_llama31().but(config={"num_aux_hidden_states": 3, "eagle_config": {IDS: [1, 4]}}),
        "num_aux_hidden_states is 3.* names 2 layers",
    ),
    "another width": (eagle3_llama31(hidden=16, target=16), "its target_hidden_size .* is 16, the target's 32"),
    "another vocabulary": (eagle3_llama31().but(config={"vocab_size": 256}), "its vocab_size is 256, the target's 128"),
    "scaled rope": (eagle3_llama31().but(config={"rope_scaling": {"type": "dynamic", "factor": 2.0}}), "rope type 'dynamic'"),
    "EAGLE of another width": (eagle_llama2().but(config={"hidden_size": 64}), r"as wide as its target \(32\)"),
    "EAGLE with lm_head": (eagle_llama2().but(lm_head__weight=(VOCAB, HIDDEN)), "'lm_head.weight' in model.safetensors is unknown"),
    "HASS norms": (eagle_llama2().but(config={"layernorms": True}), "layernorms=True is not supported"),
    "half the biases": (eagle_qwen2().but("layers.0.self_attn.k_proj.bias"), "'layers.0.self_attn.k_proj.bias' is missing"),
    "DFlash 2": (dflash(selector_rank=256, selector_top_k=16), "selector_rank=256 is not supported"),
    "Domino": (dflash(projector_type="domino"), "projector_type='domino' is not supported"),
    "DSpark without its biases": (dflash(markov_rank=4), "markov_w1.weight' is missing: config.json has markov_rank=4"),
    "capped logits": (dflash(final_logit_softcapping=20.0), "final_logit_softcapping=20.0 is not supported"),
    "DFlash by speculators": (dflash().but(config={"speculators_model_type": "dflash"}), "speculators_model_type='dflash' is not"),
    "no mask token": (dflash(mask_token_id=None), "config.json has no mask_token_id"),
    "a mask token beyond the vocabulary": (dflash(mask_token_id=128), "mask_token_id is 128, beyond the vocabulary of 128 tokens"),
    "another target's block": (dflash().but(config={"num_target_layers": 9}), "its num_target_layers is 9, the target has 8"),
    "the normed last layer": (dflash(target_layer_ids=[1, 3, 7]), r"target_layer_ids must be from -1 to 6 .* got \[1, 3, 7\]"),
    "a block's layers in another order": (dflash(target_layer_ids=[3, 1, 5]), r"ascending, distinct layers.* got \[4, 2, 6\]"),
    "a window without a size": (dflash().but(config={"layer_types": ["sliding_attention"] * 2}), "there is no sliding_window"),
    "a window without layers": (
        dflash().but(config={"layer_types": None, "use_sliding_window": True, "sliding_window": 9}), "needs layer_types",
    ),
    "a window within the block": (
        dflash().but(config={"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}), "sliding_window 6 must be above",
    ),
    "a layer of another kind": (dflash().but(config={"layer_types": ["chunked"] * 2}), "layer_types must be full_attention or"),
    "a block of one": (dflash(1), "block_size 1 has no position to draft"),
    "an adapter": (dflash().but(hidden_dim_adapter__proj__weight=(32, 64)), "hidden_dim_adapter is not supported"),
    "biases of a block": (dflash().but(config={"attention_bias": True}), "attention_bias=True is not supported"),
    "a gated bias": (dspark().but(config={"markov_head_type": "gated"}), "markov_head_type='gated' is not supported"),
    "no rank": (dspark().but(config={"markov_rank": 0}), "config.json: markov_rank must be a whole number >= 1, got 0"),
    "no head": (Head(eagle_llama2().config, {"weight": np.zeros(3, np.float32)}), "not a draft head: EAGLE-3 .* found weight"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(tmp_path, name):
    head, message = REFUSED[name]
    directory = head.write(tmp_path / "some_head")
    with pytest.raises(ValueError, match=message) as error:
        load_head(directory, tiny_target())
    assert "some_head" in str(error.value)


@pytest.mark.parametrize("name", ["no lm_head", "no map", "another width", "unknown tensor", "no head"])
def test_what_does_not_fit_is_found_without_reading_a_weight(tmp_path, monkeypatch, name):
    monkeypatch.setattr(Checkpoint, "read", None)
    head, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as error:
        check_head(head.write(tmp_path / "some_head"), tiny_config())
    assert "some_head" in str(error.value)


def test_the_token_map_is_checked_with_the_head(tmp_path):
    directory = eagle_llama3().write(tmp_path / "head")
    (tmp_path / "map.json").write_text("[5, 127]")
    check_head(directory, tiny_config(), tmp_path / "map.json")
    (tmp_path / "map.json").write_text("[5, 128]")
    with pytest.raises(ValueError, match=r"token map .*map\.json"):
        check_head(directory, tiny_config(), tmp_path / "map.json")


def test_a_head_tied_like_its_target_needs_no_lm_head(tmp_path):
    head = eagle3_llama31().but("lm_head.weight", "d2t", "t2d", config={"draft_vocab_size": None, "tie_word_embeddings": True})
    assert load_head(head.write(tmp_path / "head"), tiny_target(tie_word_embeddings=True)).config.draft_vocab_size is None


def test_a_target_is_no_head(tmp_path):
    directory = write_target(tmp_path / "target", tiny_target())
    with pytest.raises(ValueError, match="a whole model without an MTP layer, not a draft head"):
        load_head(directory, tiny_target())
    with pytest.raises(ValueError, match="this is not a target"):
        load_target(eagle_llama2().write(tmp_path / "head"), jnp.float32)


def test_several_mtp_layers_are_refused(tmp_path):
    model = tiny_target(qkv_bias=True)
    directory = write_target(tmp_path / "mimo", model, head=random_mtp(model.config))
    tensors = load_file(directory / "model.safetensors")
    second = {name.replace("mtp_layers.0", "mtp_layers.1"): tensor for name, tensor in tensors.items() if "mtp_layers" in name}
    save_file(tensors | second, directory / "model.safetensors")
    with pytest.raises(ValueError, match=r"expected one MTP layer, model\.mtp_layers\.0; this checkpoint has 0, 1"):
        load_head(directory, model)


def test_captured_layers_by_output_and_by_input():
    """One set of layers in both conventions, and gpt-oss's, whose ids are not the default ones."""
    by_output = {"eagle_config": {IDS: [1, 15, 28]}}
    by_input = {"speculators_model_type": "eagle3", IDS: [2, 16, 29]}
    assert captured_layers(by_output, 32) == captured_layers(by_input, 32) == default_captured_layers(32) == captured_layers({}, 32)
    assert captured_layers({"eagle_config": {IDS: [1, 17, 33]}}, 36) == (2, 18, 34)
    assert captured_layers({"target_layer_ids": [1, 9, 17, 25, 33]}, 36) == (2, 10, 18, 26, 34), "DeepSpec's"
    assert captured_layers({"aux_hidden_states_layer_ids": [1, 14, 26]}, 32) == (2, 15, 27), "AngelSlim's"
    assert captured_layers({"eagle_config": {IDS: []}}, 32) == default_captured_layers(32), "ModelOpt's way to say the default"


@pytest.mark.parametrize(("dtype", "stored"), [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float16")])
def test_a_copy_of_the_targets_embedding_is_shared(tmp_path, dtype, stored):
    """Also if the copy went through another dtype, which flattens the smallest values."""
    model = tiny_target()
    rounded = model.params["embed_tokens"].astype(stored if stored == "bfloat16" else jnp.bfloat16)
    params = jax.tree.map(lambda a: a.astype(dtype), model.params | {"embed_tokens": rounded})
    model = replace(model, params=params, dtype=jnp.dtype(dtype))
    tensors = eagle_llama2().tensors | {"embed_tokens.weight": np.asarray(rounded.astype(jnp.float32))}
    head = load_head(Head(eagle_llama2().config, tensors).write(tmp_path / "copy", stored), model)
    assert "embed_tokens" not in head.params and not head.config.own_embedding


@pytest.mark.parametrize(("difference", "own"), [(2.0**-25, False), (2.0**-23, True)])
def test_an_embedding_is_a_copy_up_to_the_rounding_of_float16(tmp_path, difference, own):
    """One entry is off: float16 rounds the smallest values, training moves any."""
    model = tiny_target()
    embedding = np.array(model.params["embed_tokens"])
    embedding[3, 5] = 0.0
    model.params["embed_tokens"] = jnp.array(embedding)
    changed = embedding.copy()  # JAX may still be reading the first
    changed[3, 5] = -difference
    tensors = eagle_llama2().tensors | {"embed_tokens.weight": changed}
    assert load_head(Head(eagle_llama2().config, tensors).write(tmp_path / "head"), model).config.own_embedding is own


def test_an_embedding_of_its_own_is_kept(tmp_path):
    head = load_head(eagle_llama2().write(tmp_path / "head"), tiny_target())
    assert head.config.own_embedding
    np.testing.assert_array_equal(head.params["embed_tokens"], eagle_llama2().tensors["embed_tokens.weight"])


@pytest.mark.parametrize("tied", [False, True])
def test_a_token_map_keeps_the_rows_of_frequent_tokens(tmp_path, tied):
    model = tiny_target(tie_word_embeddings=tied)
    ids = [5, 99, 0, 42]  # by frequency, not by number
    (tmp_path / "map.json").write_text(json.dumps(ids))
    directory = eagle_llama3().write(tmp_path / "head")
    whole, hot = load_head(directory, model), load_head(directory, model, token_map=tmp_path / "map.json")
    assert hot.config.draft_vocab_size == 4
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, HIDDEN)), jnp.float32)
    module, full, short = model.merge(model.params), whole.merge(whole.params), hot.merge(hot.params)
    np.testing.assert_allclose(short.logits(hidden, module), full.logits(hidden, module)[..., jnp.array(ids)], atol=1e-5)
    assert short.target_ids(jnp.arange(4)).tolist() == ids


def test_a_token_map_for_a_head_with_its_own_warns(tmp_path):
    (tmp_path / "map.json").write_text("[1, 2]")
    head = random_head(tiny_config())
    directory = write_head(tmp_path / "head", head)
    with pytest.warns(UserWarning, match=r"map\.json is not used: this EAGLE3 head has its own draft vocabulary"):
        loaded = load_head(directory, tiny_target(), token_map=tmp_path / "map.json")
    assert same(loaded.params, head.params)


EXPORTED = {
    "EAGLE": eagle_llama2(),
    "EAGLE, q/k/v bias": eagle_qwen2(),
    "EAGLE-3": eagle3_llama31(),
    "EAGLE-3, full vocabulary": eagle3_llama31(VOCAB).but("d2t", "t2d"),
    "EAGLE-3, the target's lm_head": eagle3_llama31().but("d2t", "t2d", "lm_head.weight", config={"draft_vocab_size": None}),
    "EAGLE-3.1": eagle3_llama31().but(
        config={"norm_output": True, "rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        **{f"fc_norm__{i}__weight": (HIDDEN,) for i in range(3)},
    ),
    "speculators": speculators(norm_before_residual=False, **{IDS: [1, 3, 8]}),
}


@pytest.mark.parametrize("name", EXPORTED)
def test_a_head_written_in_each_dialect_is_the_same_head(tmp_path, name):
    """So it drafts the same trees: its configuration and every parameter are equal."""
    model = tiny_target()
    head = load_head(EXPORTED[name].write(tmp_path / "original", "bfloat16"), model)
    written = 0
    for dialect in (each for each in DIALECTS if each not in ("mimo", "z-lab", "deepspec")):  # those of other kinds of heads
        try:
            exported = head_checkpoint(head.config, dialect)
        except ValueError as error:
            assert "speculators" in str(error) and (name.startswith("EAGLE,") or name in ("EAGLE", "EAGLE-3, the target's lm_head"))
            continue
        write_checkpoint(tmp_path / dialect, exported.config, tensors_of(exported.layout, head.params), dtype="bfloat16")
        again = load_head(tmp_path / dialect, model)
        assert again.config == head.config
        assert same(again.params, head.params)
        written += 1
        assert dialect == "speculators" or "target_hidden_size" not in exported.config  # SafeAILab's code then loads an embedding
    assert written >= 2


def test_what_a_dialect_cannot_say(tmp_path):
    normed = load_head(speculators().write(tmp_path / "normed"), tiny_target())
    with pytest.warns(UserWarning, match="norm_before_residual=true is written, but SGLang"):
        warn_of_unread(normed.config, "sglang")
    biased = replace(normed.config, layer=replace(normed.config.layer, qkv_bias=True))
    with pytest.raises(ValueError, match="has biases of q, k and v, and the speculators dialect has no way to say so"):
        head_checkpoint(biased, "speculators")
    first = load_head(speculators(norm_before_residual=False, **{IDS: [0, 3, 8]}).write(tmp_path / "first"), tiny_target())
    with pytest.raises(ValueError, match="reads the input of layer 0, which the sglang dialect can't name"):
        head_checkpoint(first.config, "sglang")
    head_checkpoint(first.config, "speculators")
    with pytest.raises(ValueError, match=r"dialect must be one of safeailab, .*deepspec; got 'gguf'"):
        head_checkpoint(first.config, "gguf")
    mtp = random_mtp(tiny_config())
    assert isinstance(mtp.config, MTPConfig)
    with pytest.raises(ValueError, match="MTP heads can't be written in the sglang dialect"):
        head_checkpoint(mtp.config, "sglang")


@pytest.mark.parametrize(
    ("changes", "safeailab", "sglang", "speculators"),
    [
        ({}, [], [], []),
        ({"captured_layers": (2, 16, 29)}, [], [], []),
        ({"captured_layers": (1, 4, 5)}, ["the choice of the target's layers is"], [], []),
        (dict.fromkeys(names := ("norm_output", "fc_norm"), True), [f"{name}=true is" for name in names], [], []),
        ({"norm_before_fc": True}, ["norm_before_fc=true is"], [], []),
        ({"layer": tiny_config(num_layers=1, qkv_bias=True)}, said := ["biases of q, k and v are"], said, []),
        ({"layer": tiny_config(num_layers=1, qk_norm=True)}, said := ["norms of q and k are"], said, []),
        ({"layer": tiny_config(num_layers=2)}, said := ["every layer but the first is"], said, []),
        ({"layer": tiny_config(num_layers=1, rope=LINEAR)}, [], [], []),
        ({"layer": tiny_config(num_layers=1, rope=replace(LINEAR, theta=5e5))}, ["rope_theta beside a linear scaling is"], [], []),
        ({"fc_bias": True}, said := ["the bias of fc is"], said, said),
    ],
)
def test_what_an_engine_does_not_read_is_said(changes, safeailab, sglang, speculators):
    config = replace(random_head(tiny_config()).config, **changes)
    for dialect, expected in (("safeailab", safeailab), ("sglang", sglang), ("speculators", speculators)):
        with warnings.catch_warnings(record=True, action="always") as found:
            warn_of_unread(config, dialect)
        assert [str(each.message).split(" written, but ")[0] for each in found] == expected


@pytest.mark.parametrize("make", [random_head, random_eagle])
def test_a_scaled_rope_is_written_as_safeailab_s_code_takes_it_or_refused(make):
    """It takes a dictionary of two, named `type` and `factor`, a float."""
    head = make(tiny_config()).config
    config, yarn = (replace(head, layer=replace(head.layer, rope=RopeConfig(kind=kind, factor=2.0))) for kind in ("linear", "yarn"))
    warn_of_unread(config, "safeailab")
    assert head_checkpoint(config, "safeailab").config["rope_scaling"] == {"type": "linear", "factor": 2.0}
    assert "rope_type" in head_checkpoint(config, "sglang").config["rope_scaling"]
    warn_of_unread(yarn, "sglang")
    with pytest.raises(ValueError, match="rope type is yarn, and SafeAILab's code knows none but default and linear"):
        warn_of_unread(yarn, "safeailab")


def test_an_mtp_layer_is_written_alone(tmp_path):
    """As MiMo's, without the rest of the model."""
    model = tiny_target(qkv_bias=True)
    head = random_mtp(model.config)
    exported = head_checkpoint(head.config, "mimo")
    write_checkpoint(tmp_path / "mtp", exported.config, tensors_of(exported.layout, head.params), dtype="float32")
    again = load_head(tmp_path / "mtp", model)
    assert again.config == head.config and same(again.params, head.params)
