"""Tokenizers: the quick way to load one gives what the slow way gives."""

import json
import logging
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoTokenizer

from jaxspec.defaults import BUILT_IN_TARGET
from jaxspec.text.tokenizer import FILES, is_plain, load_tokenizer

TEXTS = ["", "def f(x):\n    return x\n", "föx 🦊 \u0000", "<|endoftext|> <|endoftext|>"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUILT_IN_TARGET, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")))


def change(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_the_quick_way_gives_what_transformers_chooses(directory: Path):
    assert is_plain(directory)
    ours, theirs = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory, local_files_only=True)
    assert ours is not None and type(ours) is type(theirs)
    assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text) for text in TEXTS]
    assert (ours.chat_template, ours.special_tokens_map) == (theirs.chat_template, theirs.special_tokens_map)
    assert ours.name_or_path == theirs.name_or_path


def test_everything_else_is_left_to_transformers(directory: Path):
    for file, changes in (
        ("tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"}),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "auto_map": {}}),
    ):
        before = (directory / file).read_text()
        change(directory / file, **changes)
        assert not is_plain(directory)
        (directory / file).write_text(before)
    assert is_plain(directory)
    (directory / "tokenizer.json").unlink()
    assert not is_plain(directory)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizerFast", "GPT2Tokenizer", None])
def test_tokenizer_json_decides_whatever_the_class_and_model_type(directory: Path, name: str | None, model_type: str):
    """AutoTokenizer has classes that split and decode in their own way, and one for qwen2 and qwen3."""
    parts = {"normalizer": {"type": "Prepend", "prepend": "a"}, "pre_tokenizer": None, "decoder": {"type": "Fuse"}}
    change(directory / "tokenizer.json", **parts)
    change(directory / "config.json", model_type=model_type)
    change(directory / "tokenizer_config.json", tokenizer_class=name)
    assert parts.items() <= json.loads(load_tokenizer(directory).backend_tokenizer.to_str()).items()


def test_smollm_keeps_its_lone_digits(directory: Path):
    """Its class on the Hub is GPT-2's, its pre-tokenizer is not: lines before a number are one token."""
    known = Tokenizer(BPE({"Ċ": 0, "ĊĊ": 1, "1": 2, ".": 3}, [("Ċ", "Ċ")]))
    known.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    known.save(str(directory / "tokenizer.json"))
    change(directory / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    assert load_tokenizer(directory).tokenize("\n\n1.") == ["ĊĊ", "1", "."]


@pytest.mark.parametrize("legacy", [True, False, None])
def test_llama_2_puts_a_space_behind_special_tokens(directory: Path, legacy: bool | None):
    """As the model was trained: tokenizer.json says so (TinyLlama, Llama 2), and `legacy` is about tokenizer.model."""
    special = ["<unk>", "<s>", "</s>"]
    pieces = Tokenizer(BPE({token: number for number, token in enumerate([*special, "\u2581", "a", "\u2581a"])}, [("\u2581", "a")]))
    pieces.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    pieces.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    pieces.save(str(directory / "tokenizer.json"))
    named = dict(zip(("unk_token", "bos_token", "eos_token"), special, strict=True))
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": legacy, "add_bos_token": True, **named}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(directory).encode("a</s>a a") == [1, 5, 2, 5, 5]


@pytest.mark.parametrize(("model_type", "asks"), [("qwen2", True), ("qwen2", False), ("llama", True)])
def test_texts_begin_as_the_config_of_a_llama_tokenizer_asks(directory: Path, model_type: str, asks: bool):
    change(directory / "config.json", model_type=model_type)
    change(directory / "tokenizer_config.json", tokenizer_class="LlamaTokenizerFast", add_bos_token=asks, bos_token="<|endoftext|>")
    loaded = load_tokenizer(directory)
    assert loaded.encode("def") == [0] * asks + loaded.encode("def", add_special_tokens=False)


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "Qwen2Tokenizer", None])
@pytest.mark.parametrize("field", FILES)
def test_files_that_settings_name_are_not_read(directory: Path, tmp_path: Path, field: str, name: str | None):
    for other in ("outside.json", "outside.model", "outside.gguf"):
        (tmp_path / other).write_text('{"outside": 0}')
        change(directory / "tokenizer_config.json", tokenizer_class=name, **{field: str(tmp_path / other)})
        assert load_tokenizer(directory).get_vocab() == load_tokenizer(BUILT_IN_TARGET).get_vocab()


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("tokenizer_config.json", {"init_inputs": ["/outside"]}),
        ("tokenizer_config.json", {"fast_tokenizer_files": ["../tokenizer.4.0.json"]}),
        ("tokenizer_config.json", {"fast_tokenizer_files": 5}),
        ("special_tokens_map.json", {"vocab_file": "/outside"}),
    ],
)
def test_other_places_that_name_files_are_refused(directory: Path, file: str, changes: dict):
    if not (directory / file).exists():
        (directory / file).write_text("{}")
    change(directory / file, **changes)
    with pytest.raises(ValueError, match=r"the tokenizer of .* can't be read"):
        load_tokenizer(directory)


def chain(kind: str, step: dict, number: int) -> dict:
    return {"type": "Sequence", kind: [step] * number}


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
ANYWHERE = {"type": "Replace", "pattern": {"Regex": ""}, "content": "a"}
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}
TWICE = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2, "pair": [], "special_tokens": {}}


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", chain("normalizers", REPLACE, 12)),
        ("normalizer", chain("normalizers", chain("normalizers", ANYWHERE, 3), 20)),
        ("normalizer", {"normalizers": [BYTES] * 40}),
        ("pre_tokenizer", chain("pretokenizers", BYTES, 40)),
        ("post_processor", chain("processors", TWICE, 40)),
        ("decoder", chain("decoders", REPLACE, 12)),
    ],
)
def test_steps_that_make_texts_far_longer_are_refused(directory: Path, part: str, value: dict):
    change(directory / "tokenizer.json", **{part: value})
    with pytest.raises(ValueError, match="could make a text more than 256 times as long"):
        load_tokenizer(directory)


def test_a_part_that_is_there_twice_is_refused(directory: Path):
    file = directory / "tokenizer.json"
    text = json.dumps({**json.loads(file.read_text()), "normalizer": chain("normalizers", REPLACE, 12)})
    file.write_text(text[:-1] + ', "normalizer": null}')
    with pytest.raises(ValueError, match="normalizer is there twice"):
        load_tokenizer(directory)


def test_the_steps_of_published_tokenizers_pass(directory: Path):
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "\u2581"}
    usual = [{"type": "Prepend", "prepend": "\u2581"}, {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]
    quotes = {"type": "Replace", "pattern": {"String": "``"}, "content": '"'}
    change(directory / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": [*usual, spaces, *[quotes] * 20]})
    assert load_tokenizer(directory) is not None


def test_a_directory_without_a_tokenizer(tmp_path: Path):
    assert load_tokenizer(tmp_path) is None


def test_another_class_still_loads(directory: Path):
    change(directory / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    loaded = load_tokenizer(directory)
    assert loaded is not None and loaded.encode("def") == load_tokenizer(BUILT_IN_TARGET).encode("def")


def test_nothing_is_said_about_a_model_type_that_transformers_does_not_know(directory: Path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    change(directory / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    (directory / "config.json").write_text(json.dumps({"model_type": "mimo"}))
    AutoTokenizer.from_pretrained(directory, local_files_only=True)
    assert "model of type `mimo`" in caplog.text
    caplog.clear()
    assert load_tokenizer(directory).decode([516, 290]) == "def f" and not caplog.records
