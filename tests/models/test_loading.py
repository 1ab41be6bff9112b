"""Checkpoints: every tensor is accounted for, and what does not fit is named."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.models.checkpoint import read_config
from jaxspec.models.loading import load_eagle3, load_llama
from jaxspec.testing import random_head, tiny_target, write_head, write_target
from tests.reference import HEAD, TARGET

FLOAT32 = jnp.dtype(jnp.float32)


def same(a: dict, b: dict) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: bool(jnp.array_equal(x, y)), a, b))


@pytest.mark.parametrize("tied", [False, True])
def test_target_round_trip(tmp_path, tied):
    model = tiny_target(tie_word_embeddings=tied)
    loaded = load_llama(write_target(tmp_path / "target", model), FLOAT32)
    assert loaded.config == model.config
    assert same(loaded.params, model.params)


@pytest.mark.parametrize("draft_vocab_size", [64, 128, None])
def test_head_round_trip(tmp_path, draft_vocab_size):
    target = tiny_target()
    head = random_head(target.config, draft_vocab_size=draft_vocab_size)
    loaded = load_eagle3(write_head(tmp_path / "head", head), target.config, FLOAT32)
    assert same(loaded.params, head.params)


def test_the_other_layout_and_no_token_map(tmp_path):
    target = tiny_target()
    head = random_head(target.config, draft_vocab_size=128)
    directory = write_head(tmp_path / "head", head)
    tensors = load_file(directory / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    save_file(renamed, directory / "model.safetensors")
    assert same(load_eagle3(directory, target.config, FLOAT32).params, head.params)


def test_bfloat16_files_and_bfloat16_models(tmp_path):
    directory = write_target(tmp_path / "target", tiny_target(), "bfloat16")
    wide, narrow = load_llama(directory, FLOAT32), load_llama(directory, jnp.dtype(jnp.bfloat16))
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
            r"no tensor 'model.layers.3.mlp.up_proj.weight'.*\(48, 32\)",
        ),
        (lambda tensors: tensors.update(extra=np.zeros(3)), "no place for: extra"),
        (
            lambda tensors: tensors.update({"lm_head.weight": np.zeros((9, 32))}),
            r"'lm_head.weight' has shape \(9, 32\), \(128, 32\)",
        ),
    ],
)
def test_missing_unknown_and_misshapen_tensors_are_named(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        load_llama(changed(write_target(tmp_path / "target", tiny_target()), change), FLOAT32)


def test_broken_files_are_named(tmp_path):
    directory = write_target(tmp_path / "target", tiny_target())
    whole = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors can't be read"):
        load_llama(directory, FLOAT32)
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"one \.safetensors file or an index was expected, found config.json, pytorch_model.bin"):
        load_llama(directory, FLOAT32)
    (directory / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        read_config(directory)
    with pytest.raises(ValueError, match=r"has no config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize("file", ["missing.safetensors", "../model-00001-of-00002.safetensors"])
def test_an_index_may_name_files_of_its_own_directory_only(tmp_path, file):
    for path in TARGET.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = file
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"which is missing|in the same directory"):
        load_llama(tmp_path, FLOAT32)


def test_end_of_sequence_tokens_of_chat_models_are_found(tmp_path):
    directory = write_target(tmp_path / "target", tiny_target())
    assert load_llama(directory, FLOAT32).config.eos_token_ids == ()
    (directory / "generation_config.json").write_text('{"eos_token_id": [3, 9]}')
    assert load_llama(directory, FLOAT32).config.eos_token_ids == (3, 9)


def test_a_head_must_fit_its_target(tmp_path):
    with pytest.raises(ValueError, match=r"does not fit the target: its target_hidden_size .* is 64, the target's 32"):
        load_eagle3(HEAD, tiny_target().config, FLOAT32)
    other = tiny_target(vocab_size=256, hidden_size=32)
    head = write_head(tmp_path / "head", random_head(tiny_target().config))
    with pytest.raises(ValueError, match="its vocab_size is 128, the target's 256"):
        load_eagle3(head, other.config, FLOAT32)


def test_a_head_without_the_lm_head_it_needs_is_an_error(tmp_path):
    target = tiny_target()
    directory = changed(write_head(tmp_path / "head", random_head(target.config)), lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"no tensor 'lm_head.weight'"):
        load_eagle3(directory, target.config, FLOAT32)


def test_a_token_map_must_map_to_distinct_tokens(tmp_path):
    target = tiny_target()

    def repeat(tensors):
        tensors["d2t"] = np.zeros_like(tensors["d2t"]) - np.arange(64)  # all map to token 0

    directory = changed(write_head(tmp_path / "head", random_head(target.config)), repeat)
    with pytest.raises(ValueError, match="distinct target ids"):
        load_eagle3(directory, target.config, FLOAT32)
