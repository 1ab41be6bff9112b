"""Targets: every tensor is accounted for, and what does not fit is named."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoints.checkpoint import Checkpoint
from jaxspec.checkpoints.json_files import read_config
from jaxspec.checkpoints.layout import CACHE_SCALES
from jaxspec.checkpoints.loading import head_kind, load_target
from jaxspec.model_config import ModelConfig
from jaxspec.models.families import target_config
from jaxspec.rope import RopeConfig
from jaxspec.testing import hf_config, random_mtp, tiny_config, tiny_target, write_target
from tests.reference import FIXTURES, TARGET

FLOAT32 = jnp.dtype(jnp.float32)
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True, "observer": "minmax"}
CACHE_ONLY = {"quant_method": "compressed-tensors", "config_groups": {}, "format": "dense", "kv_cache_scheme": SCHEME}
"""The quantization_config of a checkpoint whose weights are not quantized, only its cache."""


def cache_scheme(**changes) -> dict:
    """The same with another kv_cache_scheme."""
    return CACHE_ONLY | {"kv_cache_scheme": SCHEME | changes}


def configured(directory: Path, **changes: Any) -> Path:
    """The checkpoint with another config."""
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    return directory


def same(a: dict, b: dict) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: bool(jnp.array_equal(x, y)), a, b))


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"qkv_bias": True}, {"qk_norm": True, "head_dim": 16}])
def test_target_round_trip(tmp_path, changes):
    model = tiny_target(**changes)
    loaded = load_target(write_target(tmp_path / "target", model), FLOAT32)
    assert loaded.config == model.config
    assert same(loaded.params, model.params)


def test_an_output_projection_that_is_not_the_embedding_is_used(tmp_path):
    """Transformers keeps the two apart and warns, whatever the config says."""
    directory = write_target(tmp_path / "target", tiny_target(tie_word_embeddings=True))
    embedding = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    changed(directory, lambda tensors: tensors.update({"lm_head.weight": embedding.copy()}))
    assert load_target(directory, FLOAT32).config.tie_word_embeddings
    changed(directory, lambda tensors: tensors.update({"lm_head.weight": embedding + 1}))
    with pytest.warns(UserWarning, match=r"lm_head\.weight differs from the embedding, so it is used"):
        loaded = load_target(directory, FLOAT32)
    assert not loaded.config.tie_word_embeddings
    np.testing.assert_array_equal(loaded.params["lm_head"]["kernel"], embedding.T + 1)


@pytest.mark.parametrize("names", CACHE_SCALES, ids=lambda names: names[0])
@pytest.mark.parametrize("shape", [(1,), (), (2,), (2, 1, 1)], ids=str)
def test_scales_of_the_cache_are_read_as_published(tmp_path, names, shape):
    """One for all heads, as most have it, or one for each; the dtype is the weights'. llm-compressor, whose shape for heads is the
    last, writes zero points too, and where attention is quantised the queries' scale."""
    directory = write_target(tmp_path / "target", tiny_target(num_layers=2), jnp.bfloat16)
    by_head = np.arange(1.0, 1 + np.prod(shape, dtype=int)).reshape(shape)
    scales = {(layer, number): (0.25 + layer + number / 2) * by_head for layer in range(2) for number in range(2)}
    named = {f"model.layers.{layer}.self_attn.{names[number]}": scale for (layer, number), scale in scales.items()}
    stored = {name: np.asarray(scale, ml_dtypes.bfloat16) for name, scale in named.items()}
    groups: dict[str, Any] = {}
    if len(shape) == 3:
        zero = np.zeros(shape, ml_dtypes.float8_e4m3fn)
        stored |= {name.replace("scale", "zero_point"): zero for name in named}
        stored |= {f"model.layers.0.self_attn.q_{part}": zero for part in ("scale", "zero_point")}
        groups = {"attention": {"targets": ["LlamaAttention"], "weights": None, "input_activations": SCHEME}}
    changed(directory, lambda tensors: tensors.update(stored))
    configured(directory, quantization_config=CACHE_ONLY | {"config_groups": groups})
    loaded = load_target(directory, jnp.dtype(jnp.bfloat16))
    assert loaded.config.kv_scales
    for layer in range(2):
        for number, key in enumerate(("k_scale", "v_scale")):
            found = loaded.params["layers"][layer]["self_attn"][key]
            assert found.dtype == jnp.float32
            np.testing.assert_array_equal(found, np.broadcast_to(np.ravel(scales[layer, number]), 2))
    again = load_target(write_target(tmp_path / "again", loaded), jnp.dtype(jnp.bfloat16))
    assert again.config.kv_scales and same(again.params, loaded.params)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("k_scale", [0.0], "'model.layers.0.self_attn.k_scale' must be above 0, got 0: it was not calibrated"),
        ("v_scale", [-1.0], "v_scale' must be above 0, got -1"),
        ("k_scale", [np.nan], "k_scale' must be above 0, got nan"),
        ("k_scale", [1.0, 2.0, 3.0], r"k_scale' in .* has shape \(3,\); expected \(1,\)"),
        ("k_zero_point", [1.0], "tensor 'model.layers.0.self_attn.k_zero_point' must be 0: asymmetric caches are not supported"),
        ("kv_scale", [1.0], "tensor 'model.layers.0.self_attn.kv_scale' .* is unknown"),
    ],
)
def test_scales_that_make_no_sense_are_refused_by_name(tmp_path, name, value, message):
    directory = write_target(tmp_path / "target", tiny_target(num_layers=1))
    scales = {"k_scale": [1.0], "v_scale": [1.0], name: value}
    named = {f"model.layers.0.self_attn.{each}": np.asarray(scale, np.float32) for each, scale in scales.items()}
    changed(directory, lambda tensors: tensors.update(named))
    with pytest.raises(ValueError, match=message):
        load_target(directory, FLOAT32)


def test_mistral_is_llama_without_a_window(tmp_path):
    model = tiny_target()
    directory = write_target(tmp_path / "target", model)
    loaded = load_target(configured(directory, model_type="mistral", sliding_window=None), FLOAT32)
    assert loaded.config == model.config and same(loaded.params, model.params)
    configured(directory, sliding_window=4096)
    with pytest.raises(ValueError, match="sliding_window=4096 is not supported"):
        load_target(directory, FLOAT32)


def test_one_file_and_shards_hold_the_same(tmp_path):
    model = load_target(TARGET, FLOAT32)
    assert same(load_target(write_target(tmp_path / "one", model), FLOAT32).params, model.params)
    assert load_target(tmp_path / "one/model.safetensors", FLOAT32).config == model.config


def test_bfloat16_files_and_bfloat16_models(tmp_path):
    directory = write_target(tmp_path / "target", tiny_target(), "bfloat16")
    wide, narrow = load_target(directory, FLOAT32), load_target(directory, jnp.dtype(jnp.bfloat16))
    assert wide.config.dtype == "bfloat16"
    assert {array.dtype.name for array in jax.tree.leaves(wide.params)} == {"float32"}
    assert {array.dtype.name for array in jax.tree.leaves(narrow.params)} == {"bfloat16"}
    assert same(jax.tree.map(lambda array: array.astype(jnp.bfloat16), wide.params), narrow.params)


def changed(directory, change):
    """The checkpoint with its tensors changed by `change(tensors)`."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("model.layers.3.mlp.up_proj.weight"),
            r"target does not fit: tensor 'model.layers.3.mlp.up_proj.weight' is missing \(expected with shape \(48, 32\)",
        ),
        (lambda tensors: tensors.update(extra=np.zeros(3)), r"tensor 'extra' in model.safetensors is unknown"),
        (lambda tensors: tensors.update({"lm_head.weight": np.zeros((32, 128))}), r"has shape \(32, 128\); expected \(128, 32\)"),
        (lambda tensors: tensors.update({"lm_head.weight": np.zeros((128, 32), np.int8)}), "'lm_head.weight' in .* has dtype int8"),
        (
            lambda tensors: [tensors.pop(name) for name in list(tensors) if "mlp" in name],
            r"'model.layers.0.mlp.gate_proj.weight' is missing.*; and 16 more$",
        ),
        (
            lambda tensors: tensors.update(
                {"model.layers.0.self_attn.k_proj.weight": tensors["model.layers.0.self_attn.k_proj.weight"].astype(np.float64)}
            ),
            r"must have one dtype, but .*q_proj.weight is float32, .*k_proj.weight is float64",
        ),
    ],
)
def test_wrong_tensors_are_named(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        load_target(changed(write_target(tmp_path / "target", tiny_target()), change), FLOAT32)


def test_what_llama_2_files_carry_beside_the_model_is_left_out(tmp_path):
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.zeros(4) for i in range(8)}
    directory = changed(write_target(tmp_path / "target", tiny_target()), lambda tensors: tensors.update(extra))
    assert same(load_target(directory, FLOAT32).params, tiny_target().params)


def test_broken_files_are_named(tmp_path):
    directory = write_target(tmp_path / "target", tiny_target())
    whole = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors can't be read"):
        load_target(directory, FLOAT32)
    (directory / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"pytorch_model\.bin or an index of shards; found config\.json"):
        load_target(directory, FLOAT32)
    (directory / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        read_config(directory)
    with pytest.raises(ValueError, match=r"has no config\.json"):
        read_config(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        load_target(tmp_path / "nothing", FLOAT32)


def test_one_of_several_files_is_not_guessed(tmp_path):
    save_file({"one": np.zeros(1)}, tmp_path / "a.safetensors")
    assert list(Checkpoint(tmp_path).infos) == ["one"]
    save_file({"two": np.zeros(1)}, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=r"an index of shards; found a\.safetensors, b\.safetensors"):
        Checkpoint(tmp_path)
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"weights\.gguf is not a tensor file: \.safetensors, \.bin, \.pt are supported"):
        Checkpoint(tmp_path / "weights.gguf")


def copied(tmp_path, change):
    """The sharded reference target with its index changed."""
    for path in TARGET.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    change(index["weight_map"])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("missing.safetensors", r"names missing\.safetensors, which is missing"),
        ("../other.safetensors", r"names '\.\./other\.safetensors': expected a tensor file in the same directory"),
        ("config.json", r"names 'config\.json': expected a tensor file in the same directory"),
        (1, "has no weight_map from tensor names to file names"),
    ],
)
def test_an_index_may_name_files_of_its_own_directory_only(tmp_path, file, message):
    """No others, even where they are there."""
    (tmp_path / "inside").mkdir()
    save_file({"lm_head.weight": np.zeros((256, 64), np.float32)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=message):
        load_target(copied(tmp_path / "inside", lambda index: index.update({"lm_head.weight": file})), FLOAT32)


def test_shards_must_hold_what_the_index_says(tmp_path):
    directory = copied(tmp_path, lambda index: index.pop("model.norm.weight"))
    with pytest.raises(ValueError, match=r"the index lists tensor 'model.norm.weight' in no file, but it is in model-"):
        load_target(directory, FLOAT32)
    directory = copied(tmp_path, lambda index: index.update({"phantom": "model-00001-of-00002.safetensors"}))
    with pytest.raises(ValueError, match=r"lists tensor 'phantom' in model-00001-of-00002.safetensors, but it is in no file"):
        load_target(directory, FLOAT32)
    directory = copied(tmp_path, lambda index: None)
    second = load_file(directory / "model-00002-of-00002.safetensors")
    second["model.embed_tokens.weight"] = np.zeros((256, 64), np.float32)
    save_file(second, directory / "model-00002-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"'model.embed_tokens.weight' is in model-00001-.* and again in model-00002-"):
        load_target(directory, FLOAT32)


def test_end_of_sequence_tokens_of_chat_models_are_found(tmp_path):
    directory = write_target(tmp_path / "target", tiny_target())
    assert load_target(directory, FLOAT32).config.eos_token_ids == ()
    (directory / "generation_config.json").write_text('{"eos_token_id": [3, 9]}')
    assert load_target(directory, FLOAT32).config.eos_token_ids == (3, 9)
    for found, expected in ((7, (3, 9, 7)), ([9, 5], (3, 9, 5))):  # either file may be left over from another model
        assert load_target(configured(directory, eos_token_id=found), FLOAT32).config.eos_token_ids == expected


def test_attention_in_chunks_is_not_longer_than_a_chunk():
    config = {"max_position_embeddings": 1010000, "dual_chunk_attention_config": {"original_max_position_embeddings": 262144}}
    assert target_config(hf_config(tiny_config()) | config).max_position_embeddings == 262144


def test_rope_parameters_are_followed_or_refused():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for given, factor in (
        ({}, 1.1386),
        ({"mscale": 0.7, "mscale_all_dim": 0.7}, 1.0),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, 1.1218),
        ({"attn_factor": 0.8782488562869419}, 1.0),
        ({"attn_factor": 0.5, "attention_factor": 2.0}, 2.0),
    ):
        assert RopeConfig.from_hf({"rope_scaling": yarn | given}).attention_factor == pytest.approx(factor, abs=1e-4)
    for wrong in ({"truncate": False}, {"partial_rotary_factor": 0.5}, {"extrapolation_factor": 0.5}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.* of the rope parameters is not supported"):
            RopeConfig.from_hf({"rope_parameters": yarn | wrong})
    linear = {"rope_type": "linear", "factor": 2.0, "attention_factor": 3.0}
    assert RopeConfig.from_hf({"rope_scaling": linear}) == RopeConfig(kind="linear", factor=2.0), "only YaRN scales attention"


def test_linear_scaling_extends_the_length():
    """vicuna-7b-v1.5-16k: max_position_embeddings is what Llama 2 was trained with."""
    config = hf_config(tiny_config(max_position_embeddings=4096)) | {"rope_scaling": {"type": "linear", "factor": 4.0}}
    assert ModelConfig.from_hf(config).max_position_embeddings == 16384


def test_yarn_beside_the_parameters_of_transformers_5_counts():
    """As where a model's card says to add it."""
    own, added = {"rope_type": "default", "rope_theta": 1e6}, {"factor": 4.0, "original_max_position_embeddings": 64}
    for name in ("rope_type", "type"):
        rope = RopeConfig.from_hf({"rope_parameters": own, "rope_scaling": added | {name: "yarn", "rope_theta": None}})
        assert (rope.kind, rope.theta, rope.factor, rope.original_max_position) == ("yarn", 1e6, 4.0, 64)


@pytest.mark.parametrize(
    ("rope", "message"),
    [({"full_attention": {"rope_type": "default"}}, "of their own for 'full_attention'")]
    + [({"rope_type": kind}, f"the rope type '{kind}' needs a factor") for kind in ("linear", "llama3", "yarn")],
)
def test_rope_parameters_that_say_too_little_or_too_much_are_refused(rope, message):
    with pytest.raises(ValueError, match=message):
        RopeConfig.from_hf({"rope_parameters": rope})


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(1e6),
        RopeConfig(1e4, "linear", 2.0, original_max_position=128),
        RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64),
        RopeConfig(1e4, "yarn", 4.0, original_max_position=64, beta_fast=30.0, beta_slow=2.0, attention_factor=1.2),
    ],
    ids=lambda rope: rope.kind,
)
def test_an_exported_config_has_all_that_changes_the_angles(rope):
    config = tiny_config(rope=rope, max_position_embeddings=256)
    assert ModelConfig.from_hf(hf_config(config)) == config


def test_the_mtp_layer_inside_a_target_is_left_to_the_head(tmp_path):
    model = tiny_target(qkv_bias=True)
    directory = write_target(tmp_path / "mimo", model, head=random_mtp(model.config))
    assert same(load_target(directory, FLOAT32).params, model.params)
    assert head_kind(directory) == "MTP"
    assert head_kind(TARGET) is None


def test_the_registry_lists_what_is_supported():
    names = r"\n  llama: .*\n  mistral: .*\n  qwen2: .*\n  qwen3: .*\n  mimo: "
    with pytest.raises(ValueError, match=f"model_type 'gemma2' is not supported; supported are:{names}"):
        target_config({"model_type": "gemma2"})


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        ("llama", {"attention_bias": True}, "attention_bias=True is not supported for llama"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True is not supported for qwen3"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window=True"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("llama", {"sliding_window": 4096}, "sliding_window=4096"),
        ("mistral", {"use_sliding_window": False, "sliding_window": 4096}, "sliding_window=4096 is not supported for mistral"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has sliding_attention"),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope type 'longrope' is not supported"),
        ("llama", {"quantization_config": cache_scheme(num_bits=4)}, "kv_cache_scheme: num_bits=4 is not supported"),
        ("llama", {"quantization_config": cache_scheme(type="int")}, "type='int' is not supported"),
        ("llama", {"quantization_config": cache_scheme(dynamic=True)}, "dynamic=True is not supported"),
        ("llama", {"quantization_config": cache_scheme(strategy="group")}, "only 'tensor' or 'attn_head' is"),
        ("llama", {"quantization_config": cache_scheme(symmetric=False)}, "symmetric=False"),
        ("mimo", {"use_mrope": True}, "use_mrope=True"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("llama", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ("llama", {"head_dim": 7}, "head_dim must be even for RoPE, got 7"),
        ("llama", {"num_hidden_layers": True}, "num_hidden_layers must be a whole"),
    ],
)
def test_settings_that_change_the_computation_or_make_no_sense_are_refused_by_name(model_type, settings, message):
    with pytest.raises(ValueError, match=message):
        target_config(hf_config(tiny_config()) | {"model_type": model_type} | settings)


@pytest.mark.parametrize(
    ("model_type", "settings", "expected"),
    [
        ("qwen2", {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 28}, (True, False)),
        ("qwen3", {"use_sliding_window": False, "sliding_window": None, "attention_bias": False}, (False, True)),
        ("qwen3", {"use_sliding_window": True, "sliding_window": None, "attention_bias": False}, (False, True)),
        ("mimo", {"attention_bias": True, "num_nextn_predict_layers": 1, "use_mrope": False}, (True, False)),
        ("llama", {"pretraining_tp": 2, "attention_bias": False, "mlp_bias": False}, (False, False)),
    ],
)
def test_what_real_configs_say_is_understood(model_type, settings, expected):
    config = target_config(hf_config(tiny_config()) | {"model_type": model_type} | settings)
    assert (config.qkv_bias, config.qk_norm) == expected


def test_null_is_what_is_left_out():
    llama = {name: value for name, value in hf_config(tiny_config()).items() if name not in ("head_dim", "num_key_value_heads")}
    nulls = dict.fromkeys(("head_dim", "num_key_value_heads", "eos_token_id", "mlp_bias", "pretraining_tp", "rope_scaling"))
    assert target_config(llama | nulls) == target_config(llama)
    assert target_config(llama | {"eos_token_id": 7}).eos_token_ids == (7,)


def test_shards_may_be_bin_files(tmp_path):
    """safetensors come first where a directory has both."""
    index = {}
    for file in ("dtypes.bin", "module.bin"):
        (tmp_path / file).write_bytes((FIXTURES / "torch_files" / file).read_bytes())
        with Checkpoint(tmp_path / file) as one:
            index |= dict.fromkeys(one.infos, file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    with Checkpoint(tmp_path) as both:
        assert both.file_of == index and {"torch.bfloat16", "project.weight"} <= both.infos.keys()
        expected = load_file(FIXTURES / "torch_files/module.safetensors")["norm.weight"]
        np.testing.assert_array_equal(both.read("norm.weight"), expected)
    save_file({"other": np.zeros(2)}, tmp_path / "model.safetensors")
    assert list(Checkpoint(tmp_path).infos) == ["other"]
