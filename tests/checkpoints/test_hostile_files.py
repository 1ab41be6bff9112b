"""Model directories whose files were changed at random: each loads or is refused in one line, soon, and without much memory."""

import json
import os
import random
import resource
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from convert.check import check_hashes
from convert.converting import Options, convert_head, convert_target
from jaxspec.checkpoints.converted import digest, manifest_digest
from jaxspec.checkpoints.kinds import MANIFEST
from jaxspec.checkpoints.loading import check_head, head_kind, load_target, target_model_config
from jaxspec.testing import random_head, tiny_config, tiny_target, write_head, write_target
from jaxspec.text.tokenizer import load_tokenizer
from tests.checkpoints.test_targets import configured
from tests.sets import exhaustive

SECONDS, GROWTH = 2.0, 200 * 2**20
"""Of the processor: other work on the machine does not count."""
LONGEST = 2500
"""Characters of a message: eight problems with tensors, whose names and shapes are shown."""
SMALL = {"num_layers": 8, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "num_kv_heads": 1, "vocab_size": 64}
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 7, 63, 64, 65, 2**31, 2**63, 10**30, -(10**30), 0.5, -2.5, 1e308, -1e308, float("nan"),
    float("inf"), "", "x", "0", "é\ud800", "a" * 5000, "../../etc/passwd", "/dev/zero", "float32", "bfloat16", [], {}, [None],
    ["x"], [-1], [10**12], {"x": 1}, {"": None}, [[]] * 50, "x" * 10**6,
)  # fmt: skip


def pieces(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Paths to everything in a JSON value."""
    yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from pieces(item, (*path, key))


def changed_value(value: Any, chance: random.Random) -> Any:
    """One item replaced, removed, renamed, wrapped or multiplied."""
    value = json.loads(json.dumps(value))
    paths = [path for path in pieces(value) if path and len(path) <= 4]
    if not paths:
        return chance.choice(ODD)
    *above, key = chance.choice(paths)
    place = value
    for step in above:
        place = place[step]
    kind = chance.randrange(6)
    if kind == 0:
        del place[key]
    elif kind == 1 and isinstance(place, dict):
        place[chance.choice(("", "x" * 300, "__class__", "auto_map", "rope_scaling", "layer_types"))] = place.pop(key)
    elif kind == 2:
        place[key] = [place[key]] * chance.choice((1, 2, 1000))
    else:
        place[key] = chance.choice(ODD)
    return value


def changed_text(text: bytes, chance: random.Random) -> bytes:
    """Bytes flipped, removed, repeated, or nested without end."""
    at = chance.randrange(len(text))
    kind = chance.randrange(5)
    if kind == 0:
        return text[:at]
    if kind == 1:
        return text[:at] + bytes([chance.randrange(256)]) + text[at + 1 :]
    if kind == 2:
        return text[:at] + text[at : at + 40] * chance.choice((2, 100)) + text[at:]
    if kind == 3:
        return text[:at] + chance.choice((b"[", b'{"a":')) * 200_000 + text[at:]
    return b""


def change_json(file: Path, chance: random.Random) -> None:
    if chance.random() < 0.25:
        file.write_bytes(changed_text(file.read_bytes(), chance))
    else:
        file.write_text(json.dumps(changed_value(json.loads(file.read_text()), chance), ensure_ascii=True))


def change_manifest(file: Path, chance: random.Random) -> None:
    """Mostly with a digest that fits: whoever changes it can compute one."""
    contents = changed_value(json.loads(file.read_text()), chance)
    if chance.random() < 0.9 and isinstance(contents, dict):
        contents["digest"] = digest(contents)
    file.write_text(json.dumps(contents))


def change_header(file: Path, chance: random.Random) -> None:
    """Of a safetensors file."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, values = data[8 : 8 + size], data[8 + size :]
    if chance.random() < 0.3:
        header = changed_text(header, chance)
    else:
        header = json.dumps(changed_value(json.loads(header), chance)).encode()
    length = len(header) if chance.random() < 0.9 else chance.choice((0, 1, 2**20, 2**40, 2**63, len(data)))
    file.write_bytes(length.to_bytes(8, "little") + header + values[: chance.choice((len(values), len(values), 10))])


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> Path:
    """A target with a tokenizer, the same in shards, a head, and both converted."""
    folder = tmp_path_factory.mktemp("originals")
    model = tiny_target(**SMALL)
    target = write_target(folder / "target", model)
    tokenizer = Tokenizer(models.BPE(vocab={chr(97 + number): number for number in range(26)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="a", chat_template=template).save_pretrained(target)
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "temperature": 0.6}))
    shutil.copytree(target, folder / "shards")
    split(folder / "shards")
    write_head(folder / "head", random_head(model.config, layer={"hidden_size": 16, "num_heads": 2, "num_kv_heads": 1}))
    convert_target(target, folder / "converted", Options())
    convert_head(folder / "head", folder / "converted_head", target, Options())
    return folder


def split(directory: Path) -> None:
    """Two shards and an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    index = {name: f"{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(index.values()):
        save_file({name: tensors[name] for name in tensors if index[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


REFUSED = {
    "rope_scaling": ({"rope_scaling": "x"}, "rope_scaling must be an object"),
    "layer_types": ({"layer_types": 5}, "layer_types must be a list"),
    "model_type": ({"model_type": []}, "model_type must be a string"),
    "eps of text": ({"rms_norm_eps": "a"}, "rms_norm_eps must be a number"),
    "eps of NaN": ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number"),
    "negative eps": ({"rms_norm_eps": -1}, "rms_norm_eps must be a number between 0 and 1"),
    "theta 0": ({"rope_theta": 0}, "rope_theta must be above 0"),
    "theta NaN": ({"rope_theta": float("nan")}, "rope_theta must be a number"),
    "negative theta": ({"rope_parameters": {"rope_theta": -5}}, "rope_theta must be a number"),
    "eos of text": ({"eos_token_id": "a"}, "eos_token_id must be a whole number"),
    "eos of an object": ({"eos_token_id": {}}, "eos_token_id must be a whole number"),
    "negative eos": ({"eos_token_id": [-1]}, "eos_token_id.0 must be a whole number"),
    "half an eos": ({"eos_token_id": 2.5}, "eos_token_id must be a whole number"),
    "eos beyond the vocabulary": ({"eos_token_id": 64}, "eos_token_id names token 64; the vocabulary has 64"),
    "eos of 10**12": ({"eos_token_id": 10**12}, "eos_token_id must be a whole number"),
    "tied by text": ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false"),
    "layers without tensors": ({"num_hidden_layers": 5000}, "num_hidden_layers is 5000, but the files have 75 tensors"),
    "equal frequency factors": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
        "must be below high_freq_factor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_nonsense_in_a_config_is_refused_by_name(originals: Path, tmp_path: Path, name: str):
    changes, message = REFUSED[name]
    directory = shutil.copytree(originals / "target", tmp_path / "model")
    configured(directory, **changes)
    (directory / "generation_config.json").unlink()  # its eos_token_id would take precedence
    began = time.process_time()
    with pytest.raises(ValueError, match=message):
        load_target(directory, np.float32)
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    ("place", "value", "load", "message"),
    [
        (("config", "num_layers"), 5000, partial(load_target, dtype=np.float32), "it has 5000 layers, but hashes of"),
        (("files", "../secret"), "0" * 64, check_hashes, r"names the file '\.\./secret', which is not one of its directory"),
    ],
)
def test_a_manifest_is_doubted_although_its_digest_fits(originals: Path, tmp_path: Path, place, value, load, message: str):
    """The largest config is refused before anything is built, and no file elsewhere is read."""
    directory = shutil.copytree(originals / "converted", tmp_path / "model")
    (tmp_path / "secret").write_text("x")
    contents = json.loads((directory / MANIFEST).read_text())
    contents[place[0]][place[1]] = value
    (directory / MANIFEST).write_text(json.dumps(contents | {"digest": digest(contents)}))
    began = time.process_time()
    with pytest.raises(ValueError, match=message):
        load(directory)
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "vocab.json"])
def test_named_pipes_are_not_read(originals: Path, tmp_path: Path, file: str):
    """Reading one never ends."""
    directory = shutil.copytree(originals / "target", tmp_path / "model")
    (directory / file).unlink(missing_ok=True)
    os.mkfifo(directory / file)
    for load in (load_tokenizer, lambda path: load_target(path, np.float32)):
        with pytest.raises(ValueError, match=f"{file} is not a regular file"):
            load(directory)


LINKED = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "additional_chat_templates/x.jinja",
)


@pytest.mark.parametrize("file", LINKED)
def test_a_link_shows_no_file_elsewhere(originals: Path, tmp_path: Path, file: str):
    """A chat template that is a link to any file would be shown by GET /tokenizer_info."""
    (secret := tmp_path / "secret").write_text("{}")
    directory = shutil.copytree(originals / "target", tmp_path / "model")
    (directory / file).unlink(missing_ok=True)
    (directory / file).parent.mkdir(exist_ok=True)
    (directory / file).symlink_to(secret)
    for load in (load_tokenizer, lambda path: load_target(path, np.float32)):
        with pytest.raises(ValueError, match=f"{Path(file).name} is a link to something outside of its directory"):
            load(directory)
    converted = shutil.copytree(originals / "converted", tmp_path / "converted")
    (converted / "linked.json").symlink_to(secret)
    with pytest.raises(ValueError, match=r"linked\.json is a link"):
        load_target(converted, np.float32)


def test_a_linked_folder_of_templates_or_with_a_head_is_not_read(originals: Path, tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    directory = shutil.copytree(originals / "target", tmp_path / "model")
    (directory / "notes").symlink_to(tmp_path / "elsewhere")  # nothing reads it
    load_tokenizer(directory)
    (directory / "additional_chat_templates").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="additional_chat_templates is a link"):
        load_tokenizer(directory)
    converted = shutil.copytree(originals / "converted", tmp_path / "converted")
    (converted / "draft").symlink_to(originals / "converted_head")
    with pytest.raises(ValueError, match="draft is a link"):
        head_kind(converted)
    (converted / "draft").unlink()
    shutil.copytree(originals / "converted_head", converted / "draft")
    (converted / "draft" / MANIFEST).rename(tmp_path / "elsewhere" / MANIFEST)
    (converted / "draft" / MANIFEST).symlink_to(tmp_path / "elsewhere" / MANIFEST)
    with pytest.raises(ValueError, match=r"jaxspec\.json is a link"):
        manifest_digest(converted / "draft")


def test_links_of_the_hubs_cache_and_of_weights_are_followed(originals: Path, tmp_path: Path, caplog):
    blobs, snapshot = tmp_path / "models--a--b/blobs", tmp_path / "models--a--b/snapshots/main"
    shutil.copytree(originals / "target", blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    (tmp_path / "linked").symlink_to(snapshot)
    directory = shutil.copytree(originals / "target", tmp_path / "model")
    (directory / "model.safetensors").rename(tmp_path / "weights")
    (directory / "model.safetensors").symlink_to(tmp_path / "weights")
    converted = shutil.copytree(originals / "converted", tmp_path / "converted")
    (converted / "parameters").rename(tmp_path / "parameters")
    (converted / "parameters").symlink_to(tmp_path / "parameters")
    with caplog.at_level("INFO", "jaxspec"):
        for path in (snapshot, tmp_path / "linked", directory, converted):
            load_target(path, np.float32)
            load_tokenizer(path)
    assert [record.getMessage() for record in caplog.records if "link" in record.msg] == [
        f"{directory}/model.safetensors is a link to {tmp_path / 'weights'}",
        f"{converted}/parameters is a link to {tmp_path / 'parameters'}",
    ]


def test_names_of_tensors_are_shown_in_part(originals: Path, tmp_path: Path):
    directory = shutil.copytree(originals / "target", tmp_path / "model")
    save_file({"x" * 5_000_000: np.zeros(1, np.float32)}, directory / "model.safetensors")
    with pytest.raises(ValueError, match="a tensor whose name has 5000000 characters: 'xxx") as error:
        load_target(directory, np.float32)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("converted", [False, True])
def test_weights_that_are_not_numbers_are_refused(tmp_path: Path, converted: bool):
    model = tiny_target(**SMALL)
    directory = write_target(tmp_path / "model", replace(model, params=jax.tree.map(lambda array: array * np.nan, model.params)))
    if converted:
        convert_target(directory, tmp_path / "converted", Options())
    with pytest.raises(ValueError, match="has values that are not finite numbers"):
        load_target(tmp_path / "converted" if converted else directory, np.float32)


@pytest.mark.parametrize(
    "text", ["{}", "null", '{"model": null}', '{"model": {"type": "BPE", "vocab": {}, "merges": [["a"]]}}', "[" * 200_000]
)
def test_tokenizers_that_are_none_are_refused_in_a_line(originals: Path, tmp_path: Path, text: str):
    directory = shutil.copytree(originals / "target", tmp_path / "model")
    (directory / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"the tokenizer of .* can't be read: ") as error:
        load_tokenizer(directory)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def load_all(directory: Path) -> None:
    """A target with all that belongs to it, as a server loads it."""
    target_model_config(directory)
    head_kind(directory)
    load_target(directory, np.float32)
    load_tokenizer(directory)


def check_converted(directory: Path) -> None:
    load_all(directory)
    check_hashes(directory)


CASES: dict[str, tuple[str, str, Callable[[Path, random.Random], None], Callable[[Path], object]]] = {
    "config": ("target", "config.json", change_json, load_all),
    "generation config": ("target", "generation_config.json", change_json, load_all),
    "tokenizer": ("target", "tokenizer.json", change_json, load_tokenizer),
    "tokenizer config": ("target", "tokenizer_config.json", change_json, load_tokenizer),
    "index": ("shards", "model.safetensors.index.json", change_json, target_model_config),
    "tensors": ("target", "model.safetensors", change_header, load_all),
    "head config": ("head", "config.json", change_json, partial(check_head, target=tiny_config(**SMALL))),
    "manifest": ("converted", MANIFEST, change_manifest, check_converted),
    "head manifest": ("converted_head", MANIFEST, change_manifest, partial(check_head, target=tiny_config(**SMALL))),
    "parameters": ("converted", "parameters/model.safetensors", change_header, check_converted),
}


@pytest.mark.parametrize("rounds", [30, exhaustive(200)])
@pytest.mark.parametrize("name", CASES)
def test_changed_files_load_or_are_refused(originals: Path, tmp_path: Path, name: str, rounds: int):
    source, file, change, load = CASES[name]
    chance, modules = random.Random(f"{name} {rounds}"), set(sys.modules)
    load(originals / source)  # imports
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for number in range(rounds):
        directory = tmp_path / str(number)
        shutil.copytree(originals / source, directory)
        change(directory / file, chance)
        began = time.process_time()
        try:
            with warnings.catch_warnings(action="ignore"):
                load(directory)
        except (ValueError, OSError) as error:
            refused += 1
            message = str(error)
            assert "\n" not in message.strip() or "supported are:" in message, message
            assert len(message) < LONGEST, f"{len(message)} characters: {message[:200]}"
        assert time.process_time() - began < SECONDS, (directory / file).read_bytes()[:500]
        shutil.rmtree(directory)
    assert refused > rounds / 10, "hardly anything was changed"
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert growth < GROWTH, f"{growth >> 20} MiB"
    assert not [name for name in set(sys.modules) - modules if str(tmp_path) in str(sys.modules[name])], "it ran code"
