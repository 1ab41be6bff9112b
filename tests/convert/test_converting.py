"""Converting: what comes out loads as the same model, goes back bit for bit, and is never half there."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from convert.check import check_hashes
from convert.converting import Options, convert_head, convert_target
from convert.export import export_head, export_target
from jaxspec import LLM, SamplingParams, TreeShape
from jaxspec.checkpoints.checkpoint import Checkpoint
from jaxspec.checkpoints.converted import digest, read_manifest, stored_arrays
from jaxspec.checkpoints.exporting import OWN_DIALECTS, head_checkpoint
from jaxspec.checkpoints.json_files import TEMPLATES
from jaxspec.checkpoints.loading import check_head, head_kind, load_head, load_target
from jaxspec.checkpoints.writing import fresh_directory, write_checkpoint
from jaxspec.testing import (
    engine_target,
    random_block,
    random_eagle,
    random_mtp,
    tiny_config,
    tiny_target,
    write_head,
    write_target,
)
from tests.checkpoints.real_heads import HIDDEN, Head, eagle3_llama31, eagle_llama2, eagle_llama3, eagle_qwen2, speculators
from tests.checkpoints.test_targets import same
from tests.decoding.test_block_drafter import published
from tests.reference import CHECKPOINTS, FIXTURES, HEAD, MIMO, TARGET
from tests.sets import exhaustive


def contents(path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of a checkpoint: dtype, shape, bytes."""
    with Checkpoint(path) as checkpoint:
        tensors = {name: checkpoint.read(name) for name in checkpoint.infos}
        return {name: (str(tensor.dtype), tensor.shape, tensor.tobytes()) for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A bfloat16 target with the small files that models have."""
    directory = write_target(tmp_path_factory.mktemp("original") / "target", tiny_target(), "bfloat16")
    (directory / "generation_config.json").write_text('{"eos_token_id": [3, 9]}')
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "modeling_evil.py").write_text("raise SystemExit")
    return directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_converted_target_is_the_same_model(target, tmp_path, dtype):
    convert_target(target, tmp_path / "converted", Options())
    before, after = load_target(target, jnp.dtype(dtype)), load_target(tmp_path / "converted", jnp.dtype(dtype))
    assert after.config == before.config and after.config.eos_token_ids == (3, 9)
    assert same(after.params, before.params)
    assert {array.dtype.name for array in jax.tree.leaves(after.params)} == {dtype}


def test_scales_of_the_cache_come_along(tmp_path):
    source = write_target(tmp_path / "source", tiny_target(num_layers=1, kv_scales=True))
    convert_target(source, tmp_path / "converted", Options())
    before, after = (load_target(path, jnp.dtype(jnp.bfloat16)) for path in (source, tmp_path / "converted"))
    assert after.config == before.config and after.config.kv_scales and same(after.params, before.params)


def test_small_files_come_along_and_code_does_not(target, tmp_path):
    convert_target(target, tmp_path / "converted", Options())
    names = sorted(path.name for path in (tmp_path / "converted").iterdir())
    assert names == ["chat_template.jinja", "config.json", "generation_config.json", "jaxspec.json", "parameters"]


def test_further_templates_come_along_and_go_back(tmp_path):
    """Those in the folder that transformers reads, and nothing else of it."""
    (folder := write_target(tmp_path / "original", tiny_target()) / TEMPLATES).mkdir()
    for name in ("rag.jinja", "tool_use.jinja", "notes.py"):
        (folder / name).write_text(name)
    convert_target(tmp_path / "original", tmp_path / "converted", Options())
    export_target(tmp_path / "converted", tmp_path / "back")
    for place in ("converted", "back"):
        assert {path.name for path in (tmp_path / place / TEMPLATES).iterdir()} == {"rag.jinja", "tool_use.jinja"}
    assert check_hashes(tmp_path / "converted") == []
    (tmp_path / "converted" / TEMPLATES / "rag.jinja").write_text("other")
    assert check_hashes(tmp_path / "converted") == [f"file {TEMPLATES}/rag.jinja has changed"]


@pytest.mark.parametrize("directory", [TARGET, MIMO, "tied", "bfloat16"], ids=str)
def test_a_target_goes_back_bit_for_bit(target, tmp_path, directory):
    """Shards, an MTP layer inside, tied embeddings, 16 bits."""
    if directory == "tied":
        directory = write_target(tmp_path / "tied", tiny_target(tie_word_embeddings=True))
    source = target if directory == "bfloat16" else directory
    convert_target(source, tmp_path / "converted", Options())
    export_target(tmp_path / "converted", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)
    before, after = (json.loads((path / "config.json").read_text()) for path in (source, tmp_path / "back"))
    assert after == before


HEADS = {
    "EAGLE": (eagle_llama2(), "safeailab"),
    "EAGLE, no bias": (eagle_llama3(), "safeailab"),
    "EAGLE, SGLang": (eagle_llama2(), "sglang"),
    "EAGLE, Qwen": (eagle_qwen2(), "safeailab"),
    "EAGLE-3": (eagle3_llama31(), "safeailab"),
    "EAGLE-3 over everything": (eagle3_llama31(128).but("d2t", "t2d"), "sglang"),
    "EAGLE-3.1": (eagle3_llama31().but(**{f"fc_norm__{i}__weight": (HIDDEN,) for i in range(3)}), "sglang"),
    "speculators": (speculators(), "speculators"),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_goes_back_bit_for_bit(target, tmp_path, name):
    head, dialect = HEADS[name]
    directory = head.write(tmp_path / "original", "float16")
    convert_head(directory, tmp_path / "converted", target, Options())
    export_head(tmp_path / "converted", tmp_path / "back", dialect)  # without a warning: those are errors here
    assert contents(tmp_path / "back") == contents(directory)
    model = load_target(target, jnp.float32)
    loaded = [load_head(path, model) for path in (directory, tmp_path / "converted", tmp_path / "back")]
    assert loaded[0].config == loaded[1].config == loaded[2].config
    assert same(loaded[0].params, loaded[1].params) and same(loaded[0].params, loaded[2].params)


@pytest.mark.parametrize(("head", "kind"), [(eagle_llama3(), "Llama"), (eagle_qwen2(), "Qwen2")], ids=["Llama", "Qwen2"])
def test_sglang_finds_every_bias_that_its_class_has(target, tmp_path, head, kind):
    """fc always has one; q, k and v in Qwen2's alone; o too where the config has `bias`."""
    export_head(head.write(tmp_path / "head", "float16"), tmp_path / "back", "sglang", target=target)
    config, tensors = json.loads((tmp_path / "back/config.json").read_text()), load_file(tmp_path / "back/model.safetensors")
    assert config["architectures"] == [f"{kind}ForCausalLMEagle"] and config["model_type"] == kind.lower() and "bias" not in config
    zeros = tensors.pop("fc.bias")
    assert zeros.shape == (HIDDEN,) and zeros.dtype == "float16" and not zeros.any() and tensors.keys() == head.tensors.keys()
    check_head(tmp_path / "back", tiny_config())


@pytest.mark.parametrize(
    "changes",
    [*map(exhaustive, ({}, {"causal": (True, True)}, {"markov_rank": 4})), {"causal": (True, False), "windows": (9, None)}],
    ids=str,
)
def test_a_block_head_goes_back_bit_for_bit(target, tmp_path, changes):
    model = load_target(target, jnp.float32)
    head = random_block(model.config, **changes)
    directory = write_head(tmp_path / "original", head)
    convert_head(directory, tmp_path / "converted", target, Options())
    export_head(tmp_path / "converted", tmp_path / "back", OWN_DIALECTS[head.config.algorithm])
    assert contents(tmp_path / "back") == contents(directory)
    for path in (directory, tmp_path / "converted", tmp_path / "back"):
        loaded = load_head(path, model)
        assert replace(loaded.config, layer=head.config.layer) == head.config and same(loaded.params, head.params)


@pytest.mark.parametrize("name", ["jetspec", "dspark", "deepspec", *map(exhaustive, ("dflash", "windows"))])
def test_a_block_heads_config_is_what_its_authors_write(tmp_path, name):
    directory = published(name, tmp_path)
    given = json.loads((directory / "config.json").read_text())
    head = load_head(directory, load_target(FIXTURES / "targets/qwen3", jnp.float32)).config
    config = head_checkpoint(head, "deepspec" if head.predicts_next else "z-lab").config
    if name == "jetspec":
        assert config["dflash_config"].pop("causal") is True  # what others than JetSpec's authors read
    assert config == {key: given[key] for key in config}


def test_block_heads_that_no_config_can_tell_are_refused(target, tmp_path):
    config = load_target(target, jnp.float32).config
    for changes in ({"causal": (True, False)}, {"windows": (9, 7), "causal": (True, True)}):
        with pytest.raises(ValueError, match="one place for causal and one for sliding_window, and the head's layers differ"):
            head_checkpoint(random_block(config, **changes).config, "z-lab")
    with pytest.raises(ValueError, match="DFLASH heads that predict the next token can't be written in the z-lab dialect"):
        head_checkpoint(random_block(config, predicts_next=True).config, "z-lab")


def test_a_bin_head_becomes_the_same_converted_head(tmp_path):
    for name in ("eagle3_trained_dv128", "eagle3_trained_dv128_safetensors"):
        convert_head(CHECKPOINTS / name, tmp_path / name, TARGET, Options())
    first, second = (read_manifest(tmp_path / name) for name in ("eagle3_trained_dv128", "eagle3_trained_dv128_safetensors"))
    assert first.hashes == second.hashes and first.config == second.config


def test_a_head_may_be_exported_without_converting(target, tmp_path):
    directory = eagle3_llama31().write(tmp_path / "original", "float16")
    export_head(directory, tmp_path / "other", "speculators", target=target)
    model = load_target(target, jnp.float32)
    assert same(load_head(directory, model).params, load_head(tmp_path / "other", model).params)
    with pytest.raises(ValueError, match="was not converted: give --target"):
        export_head(directory, tmp_path / "another", "sglang")


def test_an_fp8_head_is_exported_as_the_float32_it_stands_for(target, tmp_path):
    head = eagle3_llama31()
    matrices = {name: each for name, each in head.tensors.items() if each.ndim == 2 and not name.startswith("lm_head")}
    stored = {name: each.astype(jnp.float8_e4m3fn) for name, each in matrices.items()}
    scales = {name + "_scale": np.ones(1, np.float32) for name in matrices}
    config = head.config | {"quantization_config": {"quant_method": "fp8"}}
    write_checkpoint(tmp_path / "original", config, (head.tensors | stored | scales).items())
    export_head(tmp_path / "original", tmp_path / "back", "sglang", target=target)
    assert json.loads((tmp_path / "back/config.json").read_text())["torch_dtype"] == "float32"
    tensors = load_file(tmp_path / "back/model.safetensors")
    assert all(np.array_equal(tensors[name], each.astype(np.float32)) for name, each in stored.items())


def test_exports_warn_of_what_is_lost(target, tmp_path):
    convert_head(speculators().write(tmp_path / "original"), tmp_path / "converted", target, Options())
    with pytest.warns(UserWarning, match="norm_before_residual=true is written, but SGLang"):
        export_head(tmp_path / "converted", tmp_path / "back", "sglang")
    (tmp_path / "map.json").write_text("[1, 2]")
    head = eagle_llama2().write(tmp_path / "eagle")
    convert_head(head, tmp_path / "mapped", target, Options(), token_map=tmp_path / "map.json")
    with pytest.warns(UserWarning, match="no dialect has a place for a token map"):
        export_head(tmp_path / "mapped", tmp_path / "eagle_back", "sglang")
    assert contents(tmp_path / "eagle_back") == contents(head)


def test_a_token_map_that_an_mtp_layer_was_converted_with_is_said_to_be_lost(tmp_path):
    (tmp_path / "map.json").write_text("[1, 2]")
    convert_target(MIMO, tmp_path / "converted", Options(), token_map=tmp_path / "map.json")
    with pytest.warns(UserWarning, match="no dialect has a place for a token map"):
        export_target(tmp_path / "converted", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(MIMO)


def test_an_mtp_layer_that_another_head_replaces(tmp_path):
    model = engine_target(qkv_bias=True)
    directory = write_target(tmp_path / "mimo", model, head=random_mtp(model.config))
    with pytest.warns(UserWarning, match=r"the MTP layer of .*mimo is left out: --draft takes its place"):
        convert_target(directory, tmp_path / "converted", Options(), draft=eagle_llama2().write(tmp_path / "eagle"))
    assert head_kind(tmp_path / "converted") == "EAGLE"
    with pytest.warns(UserWarning, match="num_nextn_predict_layers is set to 0"):
        export_target(tmp_path / "converted", tmp_path / "back")
    assert json.loads((tmp_path / "back/config.json").read_text())["num_nextn_predict_layers"] == 0
    assert same(load_target(tmp_path / "back", jnp.float32).params, model.params)
    with pytest.raises(ValueError, match="MTP heads can't be written in the sglang dialect"):
        export_head(directory, tmp_path / "none", "sglang", target=directory)


def test_a_map_over_the_whole_vocabulary_is_not_dropped(target, tmp_path):
    """As many draft tokens as target tokens, in another order."""
    order = np.random.default_rng(0).permutation(128)
    head = eagle3_llama31(128)
    tensors = head.tensors | {"d2t": order - np.arange(128), "t2d": np.ones(128, np.bool_)}
    directory = Head(head.config, tensors).write(tmp_path / "original", "float16")
    convert_head(directory, tmp_path / "converted", target, Options())
    export_head(tmp_path / "converted", tmp_path / "back", "sglang")
    assert contents(tmp_path / "back") == contents(directory)


def test_float64_is_kept(tmp_path):
    directory = write_target(tmp_path / "target", tiny_target(), "float32")
    tensors = {name: np.asarray(tensor, np.float64) for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file(tensors, directory / "model.safetensors")
    convert_target(directory, tmp_path / "converted", Options())
    assert check_hashes(tmp_path / "converted") == []
    export_target(tmp_path / "converted", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(directory)
    assert same(load_target(tmp_path / "converted", jnp.float32).params, tiny_target().params)


def test_dtype_casts_floats_only(target, tmp_path):
    convert_head(eagle3_llama31().write(tmp_path / "head", "float16"), tmp_path / "converted", target, Options("bfloat16"))
    manifest = read_manifest(tmp_path / "converted")
    dtypes = {
        ".".join(map(str, keys)): array.dtype.name
        for keys, array in stored_arrays(tmp_path / "converted", manifest.config, doing="reading")
    }
    assert dtypes.pop("draft_to_target") == "int32"
    assert set(dtypes.values()) == {"bfloat16"} and manifest.head.layer.dtype == "bfloat16"
    export_head(tmp_path / "converted", tmp_path / "back", "sglang")
    assert json.loads((tmp_path / "back/config.json").read_text())["torch_dtype"] == "bfloat16"


PROMPTS = [[5, 9, 2], [77, 1, 30, 4]]
GREEDY = SamplingParams(max_tokens=12, temperature=0)


def tokens(*arguments, **options) -> list[tuple[int, ...]]:
    """What an LLM says to two prompts."""
    llm = LLM(*arguments, dtype="float32", max_running_requests=1, page_size=64, prefill_chunk=8, **options)
    return [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.exhaustive
def test_llm_takes_either_kind(target, tmp_path):
    """Same text from every combination; a target converted with a head brings it along."""
    head = eagle_llama2().write(tmp_path / "head")
    convert_target(target, tmp_path / "both", Options(), draft=head)
    convert_head(head, tmp_path / "alone", target, Options())
    plain, tree = tokens(target), TreeShape(2, 2, 5)
    assert head_kind(tmp_path / "both") == "EAGLE"
    assert tokens(tmp_path / "both", tree=tree) == tokens(target, tmp_path / "alone", tree=tree) == plain
    assert tokens(target, tmp_path / "both", tree=tree) == plain
    assert LLM(tmp_path / "both", dtype="float32").engine.tree == TreeShape()


@pytest.mark.exhaustive
def test_a_mimo_brings_its_mtp_layer(tmp_path):
    model = engine_target(qkv_bias=True)
    directory = write_target(tmp_path / "mimo", model, head=random_mtp(model.config))
    convert_target(directory, tmp_path / "converted", Options())
    assert head_kind(tmp_path / "converted") == "MTP"
    plain = tokens(directory, tree=TreeShape(num_steps=0))
    assert tokens(directory) == tokens(tmp_path / "converted") == plain
    assert LLM(tmp_path / "converted", dtype="float32").engine.tree == TreeShape(1, 1, 2)
    assert tokens(tmp_path / "converted", tree=TreeShape(3, 1)) == plain


@pytest.mark.exhaustive
def test_a_token_map_is_kept(target, tmp_path):
    head = write_head(tmp_path / "head", random_eagle(tiny_config()))
    np.save(tmp_path / "hot.npy", np.array([9, 2, 77], np.int64))
    convert_head(head, tmp_path / "converted", target, Options(), token_map=tmp_path / "hot.npy")
    model = load_target(target, jnp.float32)
    by_map, kept = load_head(head, model, token_map=tmp_path / "hot.npy"), load_head(tmp_path / "converted", model)
    assert kept.config == by_map.config and same(kept.params, by_map.params)
    assert tokens(target, tmp_path / "converted", tree=TreeShape(2, 2, 5)) == tokens(target)
    assert tokens(target, head, tree=TreeShape(2, 2, 5), token_map=tmp_path / "hot.npy") == tokens(target)
    with pytest.raises(ValueError, match="needs a draft head: give --draft"):
        convert_target(target, tmp_path / "none", Options(), token_map=tmp_path / "hot.npy")


def test_a_converted_head_knows_its_target(target, tmp_path):
    """When it is loaded, and when it is checked without its target."""
    convert_head(eagle3_llama31().write(tmp_path / "head"), tmp_path / "converted", target, Options())
    with pytest.raises(ValueError, match="converted for a target whose num_layers is 8, this target's is 9"):
        load_head(tmp_path / "converted", tiny_target(num_layers=9))
    with pytest.raises(ValueError, match="this is not a target but a converted EAGLE3 head"):
        load_target(tmp_path / "converted", jnp.float32)
    with pytest.raises(ValueError, match="is a converted checkpoint already"):
        convert_head(tmp_path / "converted", tmp_path / "again", target, Options())
    check_head(tmp_path / "converted", tiny_config())
    for changes, message in (
        ({"num_layers": 9}, "num_layers is 8, this target's is 9"),
        ({"hidden_size": 64}, "hidden_size is 32, this target's is 64"),
        ({"vocab_size": 256}, "vocab_size is 128, this target's is 256"),
    ):
        with pytest.raises(ValueError, match=message):
            check_head(tmp_path / "converted", tiny_config(**changes))
    other = write_target(tmp_path / "other", tiny_target(num_layers=9))
    with pytest.raises(ValueError, match="num_layers is 8, this target's is 9"):
        export_head(tmp_path / "converted", tmp_path / "exported", "sglang", target=other)
    convert_target(target, tmp_path / "target", Options())
    for read, given in ((load_head, tiny_target()), (check_head, tiny_config())):
        with pytest.raises(ValueError, match="is a converted target without a draft head"):
            read(tmp_path / "target", given)


def test_hashes_find_what_has_changed(target, tmp_path):
    convert_target(target, tmp_path / "converted", Options(), draft=eagle_llama2().write(tmp_path / "head"))
    assert check_hashes(tmp_path / "converted") == []
    values = tmp_path / "converted/parameters/model.safetensors"
    arrays = dict(stored_arrays(tmp_path / "converted", read_manifest(tmp_path / "converted").target, doing=""))
    kernel = arrays["layers", 3, "mlp", "down_proj", "kernel"].tobytes()
    contents = values.read_bytes()
    assert contents.count(kernel) == 1
    values.write_bytes(contents.replace(kernel, bytes([kernel[0] ^ 1]) + kernel[1:]))
    (tmp_path / "converted/chat_template.jinja").write_text("another")
    (tmp_path / "converted/draft/config.json").unlink()
    assert check_hashes(tmp_path / "converted") == [
        "file chat_template.jinja has changed",
        "parameter layers.3.mlp.down_proj.kernel has changed",
        "draft: file config.json is missing",
    ]
    with pytest.raises(ValueError, match=r"is not a converted checkpoint: it has no jaxspec\.json"):
        check_hashes(target)


def test_a_draft_head_that_is_gone_or_another_is_noticed(target, tmp_path):
    convert_target(target, tmp_path / "converted", Options(), draft=eagle_llama2().write(tmp_path / "head"))
    draft = tmp_path / "converted/draft"
    (tmp_path / "map.json").write_text("[1]")
    convert_head(tmp_path / "head", tmp_path / "other", target, Options(), token_map=tmp_path / "map.json")
    shutil.rmtree(draft)
    shutil.copytree(tmp_path / "other", draft)
    assert check_hashes(tmp_path / "converted") == ["the draft head, draft/, is not the one it was converted with"]
    shutil.rmtree(draft)
    assert check_hashes(tmp_path / "converted") == ["the draft head, draft/, is missing"]
    with pytest.raises(ValueError, match="was converted with a draft head, but draft/ is missing or another head: convert"):
        LLM(tmp_path / "converted")


def resigned(text: str, old: str, new: str) -> str:
    """A manifest changed by somebody who knows its digest."""
    changed = json.loads(text.replace(old, new))
    return json.dumps({**changed, "digest": digest(changed)})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "is not valid JSON"),
        (lambda text: text.replace('"version": 2', '"version": 1'), "has version 1; expected 2: convert the original again"),
        (lambda text: text.replace('"theta": 10000.0', '"theta": 20000.0'), "was changed after it was written"),
        (lambda text: resigned(text, '"kind": "target"', '"kind": "gguf"'), "is damaged: KeyError 'gguf'"),
        (lambda text: resigned(text, '"num_heads"', '"heads"'), "is damaged: TypeError"),
        (lambda text: resigned(text, '"num_layers": 8', '"num_layers": 9'), "misses 6 parameters: layers.8"),
        (
            lambda text: resigned(text, '"intermediate_size": 48', '"intermediate_size": 40'),
            r"down_proj.kernel' has shape \(48, 32\); expected \(40, 32\)",
        ),
    ],
)
def test_a_damaged_manifest_is_named(target, tmp_path, damage, message):
    convert_target(target, tmp_path / "converted", Options())
    path = tmp_path / "converted/jaxspec.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(ValueError, match=message):
        load_target(tmp_path / "converted", jnp.float32)


def test_a_failed_conversion_leaves_nothing(target, tmp_path, monkeypatch):
    head = eagle3_llama31().but("lm_head.weight").write(tmp_path / "head")
    with pytest.raises(ValueError, match=r"'lm_head\.weight' is missing"):
        convert_target(target, tmp_path / "converted", Options(), draft=head)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("jaxspec.checkpoints.writing._write_file", full)
    with pytest.raises(OSError, match="No space left"):
        convert_target(target, tmp_path / "converted", Options())
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


FULL = """
import resource, signal, sys
from convert.__main__ import main

resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, 2_000))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.exit(main([*sys.argv[1:], "--quiet"]))
"""


@pytest.mark.variants
def test_a_disk_that_fills_up_is_one_line(target, tmp_path):
    command = [sys.executable, "-c", FULL, str(target), str(tmp_path / "converted")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (2, "")
    line = ended.stderr.strip()
    assert "\n" not in line, line
    assert line.startswith("jaxspec convert: error: ") and ".safetensors'" in line and len(line) < 2000
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_told_before(target, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(OSError, match=r"has 0 MB left on its disk; \d+ MB are to be written"):
        convert_target(target, tmp_path / "converted", Options())
    assert list(tmp_path.iterdir()) == []


def test_a_conversion_needs_no_more_than_it_writes(tmp_path, monkeypatch):
    source = write_target(tmp_path / "source", tiny_target(hidden_size=128, intermediate_size=64, num_layers=2))
    convert_target(source, tmp_path / "first", how := Options("bfloat16", "int4"))
    with Checkpoint(tmp_path / "first/parameters") as written, Checkpoint(source) as original:
        needed = written.size(written.infos)
        assert needed < original.size(original.infos) // 4
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed))
    convert_target(source, tmp_path / "again", how)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed - 1))
    with pytest.raises(OSError, match="left on its disk"):
        convert_target(source, tmp_path / "refused", how)


KILLED = """
import sys, time
from pathlib import Path
import convert.converting as converting
from jaxspec.checkpoints import writing

def slow(path, tensors, write=writing._write_file):
    write(path, tensors)
    print("a file", flush=True)
    time.sleep(60)

writing._write_file = slow
converting.convert_target(Path(sys.argv[1]), Path(sys.argv[2]), converting.Options())
"""


@pytest.mark.variants
def test_a_killed_conversion_leaves_nothing_that_loads(target, tmp_path):
    output = tmp_path / "converted"
    process = subprocess.Popen([sys.executable, "-c", KILLED, target, output], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "a file\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert [path.name for path in tmp_path.iterdir()] == ["converted.incomplete"]
    with pytest.raises(ValueError):
        load_target(tmp_path / "converted.incomplete", jnp.float32)
    convert_target(target, output, Options())
    assert [path.name for path in tmp_path.iterdir()] == ["converted"]
    assert check_hashes(output) == []


def test_an_existing_place_is_left_alone(target, tmp_path):
    (tmp_path / "converted").mkdir()
    (tmp_path / "converted/mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists already: choose another place"):
        convert_target(target, tmp_path / "converted", Options())
    assert (tmp_path / "converted/mine.txt").read_text() == "mine"
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(ValueError, match="link exists already"):
        convert_target(target, tmp_path / "link", Options())


def test_of_two_that_write_one_place_the_second_is_refused(target, tmp_path):
    with fresh_directory(tmp_path / "converted") as fresh:
        (fresh / "first").touch()
        with pytest.raises(ValueError, match=r"another process is writing .*converted"):
            convert_target(target, tmp_path / "converted", Options())
    assert [path.name for path in (tmp_path / "converted").iterdir()] == ["first"]


def test_shards_change_nothing(target, tmp_path, monkeypatch):
    """Small ones: many files, the same checkpoint."""
    convert_target(target, tmp_path / "one", Options())
    monkeypatch.setattr("convert.converting.SHARD_BYTES", 3000)
    convert_target(target, tmp_path / "many", Options())
    assert read_manifest(tmp_path / "one") == read_manifest(tmp_path / "many")
    assert check_hashes(tmp_path / "many") == []


def test_exports_are_cut_into_shards(tmp_path, monkeypatch):
    convert_target(TARGET, tmp_path / "converted", Options())
    monkeypatch.setattr("jaxspec.checkpoints.writing.SHARD_BYTES", 300_000)
    export_target(tmp_path / "converted", tmp_path / "back")
    assert len(list((tmp_path / "back").glob("model-0000?-of-0000?.safetensors"))) >= 4
    assert contents(tmp_path / "back") == contents(TARGET)
    with safe_open(next((tmp_path / "back").glob("*.safetensors")), "np") as file:
        assert file.metadata() == {"format": "pt"}
    monkeypatch.setattr("jaxspec.checkpoints.writing.SHARD_BYTES", 10_000)
    export_head(HEAD, tmp_path / "head", "safeailab", target=TARGET)
    assert sorted(path.name for path in (tmp_path / "head").iterdir()) == ["config.json", "model.safetensors"]  # all that it reads
    export_head(HEAD, tmp_path / "shards", "sglang", target=TARGET)
    assert (tmp_path / "shards/model.safetensors.index.json").exists()


def test_heads_of_other_sizes_are_not_converted(target, tmp_path):
    head = Head(eagle_llama2().config | {"vocab_size": 64}, eagle_llama2().tensors).write(tmp_path / "head")
    with pytest.raises(ValueError, match="its vocab_size is 64, the target's 128"):
        convert_head(head, tmp_path / "converted", target, Options())
    assert not (tmp_path / "converted").exists()


def test_a_tensor_without_a_place_is_not_dropped(target, tmp_path):
    head = eagle3_llama31().but(mask_hidden=(1, 1, 96)).write(tmp_path / "head")
    with pytest.raises(ValueError, match=r"tensor 'mask_hidden' in .* is unknown"):
        convert_head(head, tmp_path / "converted", target, Options())
    with pytest.raises(ValueError, match=r"tensor 'mask_hidden' in .* is unknown"):
        export_head(head, tmp_path / "exported", "sglang", target=target)
    assert [path.name for path in tmp_path.iterdir()] == ["head"]
