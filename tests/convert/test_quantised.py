"""Converted checkpoints whose matrices are quantised: by --quantization, or because the original's are."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from convert.__main__ import main
from convert.check import check_hashes
from convert.converting import Options, convert_target
from convert.export import export_target
from jaxspec.checkpoints.loading import load_head, load_target
from jaxspec.checkpoints.storing import Storing
from jaxspec.models.registry import LoadedTarget
from jaxspec.testing import random_eagle, random_head, tiny_target, write_head, write_target
from tests.checkpoints.test_gguf_file import SIZES as GGUF_SIZES
from tests.checkpoints.test_gguf_file import gguf, write
from tests.checkpoints.test_quantization import SIZES, published, quantise
from tests.checkpoints.test_targets import same
from tests.sets import exhaustive

WAYS = list(Storing)


def stored_alike(one: LoadedTarget, other: LoadedTarget) -> bool:
    return one.config.storage == other.config.storage and dict(one.config.storages) == dict(other.config.storages)


@pytest.fixture(scope="module")
def model():
    return tiny_target(**SIZES, qkv_bias=True)


@pytest.mark.variants
@pytest.mark.parametrize("quantization", ["int4", exhaustive("int8"), exhaustive("fp8")])
def test_what_was_quantised_beforehand_is_what_loading_quantises(tmp_path, model, quantization):
    """Target and head, as on a GPU and as on a CPU, where the blocks are others."""
    original = write_target(tmp_path / "original", model)
    head = write_head(tmp_path / "head", random_eagle(model.config))
    done = main([str(original), str(tmp_path / "converted"), "--draft", str(head), "--quantization", quantization, "--quiet"])
    assert done == 0 and check_hashes(tmp_path / "converted") == []
    for storing in WAYS:
        how = {"storing": storing, "quantization": quantization}
        expected, found = (load_target(tmp_path / name, jnp.float32, **how) for name in ("original", "converted"))
        assert stored_alike(found, expected) and same(found.params, expected.params)
        assert same(load_target(tmp_path / "converted", jnp.float32, storing=storing).params, found.params)
        heads = [load_head(path, found, **how) for path in (head, tmp_path / "converted")]
        assert heads[0].config == heads[1].config and same(heads[0].params, heads[1].params)
    for other in {"int8", "fp8", "int4"} - {quantization}:
        with pytest.raises(ValueError, match=f"is quantised already: leave out quantization, which is {other}"):
            load_target(tmp_path / "converted", jnp.float32, quantization=other)
    with pytest.raises(ValueError, match="the checkpoint is quantised: export one that is not"):
        export_target(tmp_path / "converted", tmp_path / "exported")


@pytest.mark.parametrize("name", ["FP8 in blocks", exhaustive("AWQ"), exhaustive("compressed-tensors int4")])
def test_published_weights_stay_as_they_are(tmp_path, name):
    stored, _ = published(tmp_path, name)
    convert_target(stored, tmp_path / "converted", Options())
    for storing in WAYS:
        expected, found = (load_target(path, jnp.float32, storing=storing) for path in (stored, tmp_path / "converted"))
        assert stored_alike(found, expected) and same(found.params, expected.params)
    sizes = {array.dtype.itemsize for array in jax.tree.leaves(found.params["layers"]) if array.size > 10_000}
    assert sizes == {1}


@pytest.mark.parametrize("make", [random_eagle, partial(random_head, captured_layers=(1,))])
def test_a_quantised_head_stays_as_it_is_beside_a_target_that_is_quantised(tmp_path, model, make):
    head = write_head(tmp_path / "head", make(model.config))
    quantise(head, "GPTQ")
    original = write_target(tmp_path / "original", model)
    convert_target(original, tmp_path / "converted", Options(quantization="int8"), draft=head)
    target = load_target(tmp_path / "converted", jnp.float32)
    heads = [load_head(path, target) for path in (head, tmp_path / "converted")]
    assert heads[0].config == heads[1].config and same(heads[0].params, heads[1].params)


def test_what_was_dequantised_goes_back_without_quantization_config(tmp_path):
    """The keys and values of two heads are half a block, and nothing else is quantised."""
    stored, dense = published(tmp_path, "FP8 in blocks", "[qkv]_proj", num_kv_heads=2, num_layers=1)
    convert_target(stored, tmp_path / "converted", Options())
    export_target(tmp_path / "converted", tmp_path / "back")
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())
    assert same(*(load_target(path, jnp.float32).params for path in (tmp_path / "back", dense)))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantization", ["int8", None])
def test_a_dense_converted_checkpoint_is_stored_as_the_original(tmp_path, tied, quantization):
    """Quantised while it loads, or in its 16 bits; a tied embedding, which is the output projection, too."""
    model = tiny_target(**SIZES, qkv_bias=True, tie_word_embeddings=tied)
    convert_target(write_target(tmp_path / "original", model, "bfloat16"), tmp_path / "converted", Options())
    for storing in WAYS:
        how = {"storing": storing, "quantization": quantization}
        expected, found = (load_target(tmp_path / name, jnp.float32, **how) for name in ("original", "converted"))
        assert stored_alike(found, expected) and same(found.params, expected.params)
    rows = found.params["layers"][0]["mlp"]["down_proj"]["packed_rows" if quantization else "rows"]
    assert rows.dtype == ("int8" if quantization else "bfloat16")


def test_a_gguf_file_is_taken_wherever_a_model_is(tmp_path, monkeypatch, capsys):
    """Its blocks become numbers, which is said, unless they are quantised."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tiny_target(**GGUF_SIZES)
    file = write(tmp_path / "model.gguf", model, "llama", lambda name: gguf.GGMLQuantizationType.Q8_0)
    head = write_head(tmp_path / "head", random_eagle(model.config))
    for command, said, warned in (
        (["--inspect", file], "dtypes  q8_0 ", ""),
        (["--inspect", head, "--target", file], "fits  yes", ""),
        (
            [file, tmp_path / "a", "--check"],
            "largest difference 0 on",
            "warning: blocks are written as float32 numbers: --quantization",
        ),
        ([file, tmp_path / "b", "--quantization", "int8"], "wrote", ""),
        ([head, tmp_path / "c", "--target", file, "--check"], "largest difference 0 on", ""),
        ([head, tmp_path / "d", "--target", file, "--export", "sglang"], "wrote", ""),
    ):
        assert main([*map(str, command), "--quiet"]) == 0
        shown = capsys.readouterr()
        assert said in shown.out and shown.err.startswith(warned) and bool(shown.err) == bool(warned)
