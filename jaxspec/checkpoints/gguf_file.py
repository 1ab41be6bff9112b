"""GGUF files (llama.cpp's format) as Hugging Face directories: config, tokenizer, chat template, and where the tensors are.

Needs the package `gguf` (the extra `gguf`), which reads the file and knows the quantisations. Nothing in a file is run.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import hashlib
import json
import logging
import math
import mmap
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxspec.cache_directory import cache_directory
from jaxspec.checkpoints.exporting import ARCHITECTURES, rope_settings
from jaxspec.checkpoints.gguf_tensors import INDEX, LINK, ROPE_FACTORS, index_of
from jaxspec.checkpoints.sentence_pieces import CONTROL, Pieces, add_tokens
from jaxspec.rope import RopeConfig, inverse_frequencies

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SUFFIX = ".gguf"
DONE = "complete"
"""The file that marks a completely written directory."""
ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "<|end_of_text|>", "_<EOT>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)  # fmt: skip
"""Control tokens that end an answer, whatever the file says, as in llama.cpp: many files name one of several."""
TEMPLATE = "tokenizer.chat_template"
"""The chat template; with a dot and a name appended, a template for another purpose, such as tool_use."""
LLAMA3_FACTORS = (8.0, 32.0)
"""RoPE scaling factors of Llama 3.1 and 3.2. A GGUF file has one factor per frequency instead."""

MAGIC, VERSIONS = int.from_bytes(b"GGUF", "little"), (2, 3)
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of the types of metadata that are neither strings nor lists."""
STRING, ARRAY = 8, 9
MOST_ELEMENTS = 2_000_000
"""The most elements in all lists of the metadata together; a vocabulary of 262,144 tokens has about a million."""
LONGEST_ERROR = 500

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

logger = logging.getLogger(__name__)


class PreTokenizer(NamedTuple):
    """How text is split before byte pairs are merged, by the file's `tokenizer.ggml.pre`."""

    pattern: str | None = None
    """None: GPT-2's."""
    digits_apart: bool = False
    normalizes: bool = False
    """Text is normalized to Unicode's NFC."""
    whole_words: bool = False
    """A piece that is a token is not merged from smaller ones."""
    adds_bos: bool = False


PRE_TOKENIZERS = {
    "default": PreTokenizer(),
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(digits_apart=True),
    "llama-bpe": PreTokenizer(_WORDS % r"\p{N}{1,3}", whole_words=True, adds_bos=True),
    "qwen2": PreTokenizer(_WORDS % r"\p{N}", normalizes=True),
}
PRE_TOKENIZERS["deepseek-r1-qwen"] = PRE_TOKENIZERS["qwen2"]  # as in llama.cpp


def write_directory(file: Path, directory: Path) -> None:
    """The model of a GGUF file as a Hugging Face directory, whose tensors stay in the file (gguf_tensors.py).

    Raises ValueError, in one line, for what can't be read: another architecture, tokenizer or rope, or a damaged file.
    """
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ValueError(f"{file} is a GGUF file, which needs the package gguf: pip install 'jaxspec-llm[gguf]'") from None
    try:
        check_header(file)
        reader = GGUFReader(str(file))
        fields = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {str(tensor.name): tensor for tensor in reader.tensors}
        config = config_of(fields, tensors)
        files = tokenizer_files(fields, config)
        index = index_of(file, tensors, config)
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        (directory / INDEX).write_text(json.dumps(index) + "\n")
        (directory / LINK).symlink_to(file.resolve())
    except OSError:
        raise
    except Exception as error:  # also libraries' own kinds, if metadata has another type, such as a list instead of a number
        kind = {KeyError: "it has no ", ValueError: ""}.get(type(error), f"it can't be read: {type(error).__name__} ")
        raise ValueError(f"{file}: {kind}{' '.join(str(error).split())[:LONGEST_ERROR]}") from None
    for name, text in files.items():
        (directory / name).write_text(text)


def check_header(file: Path) -> None:
    """Raises ValueError if the header says more than the file holds, or than a model needs: the library would believe it."""
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at, elements = 0, 0

        def skip(size: int) -> None:
            nonlocal at
            if size > len(data) - at:
                raise ValueError("its header points outside the file")
            at += size

        def number(size: int) -> int:
            skip(size)
            return int.from_bytes(data[at - size : at], "little")

        def size_of(kind: int) -> int:
            if kind not in SIZES:
                raise ValueError(f"its metadata has the unknown type {kind}")
            return SIZES[kind]

        def skip_value(kind: int) -> None:
            nonlocal elements
            if kind == STRING:
                skip(number(8))
            elif kind == ARRAY:
                kind, count = number(4), number(8)
                elements += count
                if elements > MOST_ELEMENTS:
                    raise ValueError(f"the lists of its metadata have more than {MOST_ELEMENTS:,} elements")
                if kind == STRING:
                    for _ in range(count):
                        skip(number(8))
                else:
                    skip(count * size_of(kind))
            else:
                skip(size_of(kind))

        if number(4) != MAGIC or number(4) not in VERSIONS:
            raise ValueError("it is no GGUF file of version 2 or 3, little-endian")
        tensors, entries = number(8), number(8)
        for _ in range(entries):
            skip_value(STRING)
            skip_value(number(4))
        for _ in range(tensors):
            skip_value(STRING)
            skip(8 * number(4))
            skip(4 + 8)


def directory_of(file: Path) -> Path:
    """The file's Hugging Face directory, which is written once; other processes wait for it. Raises as `write_directory`, and
    ValueError if it can't be made."""
    from filelock import FileLock  # only GGUF files need it

    if not file.is_file():
        raise ValueError(f"{file} does not exist")
    directory = directory_for(file)
    if not (directory / DONE).is_file():
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(f"{directory}.lock").acquire()
        except OSError as error:
            reason = f"{directory.parent} can't be written ({error.strerror})"
            raise ValueError(f"{reason}: set XDG_CACHE_HOME to a directory for it") from None
        with lock:
            if not (directory / DONE).is_file():
                logger.info("reading %s, once, into %s", file.name, directory)
                shutil.rmtree(directory, ignore_errors=True)
                write_directory(file, directory)
                (directory / DONE).touch()
    return directory


def directory_for(file: Path) -> Path:
    """Where `directory_of` writes it. A higher number in the key leaves older versions' files alone."""
    state = file.stat()
    key = hashlib.sha256(f"{INDEX} 4 {file.resolve()} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:16]
    return cache_directory() / "models" / f"{file.stem}-{key}"


def config_of(fields: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """The contents of config.json."""
    if (parts := fields.get("split.count", 1)) > 1:
        raise ValueError(f"it is one of {parts} parts of a file: join them first, with llama-gguf-split --merge")
    kind = fields["general.architecture"]
    if kind not in ARCHITECTURES:
        raise ValueError(f"the architecture {str(kind)[:80]!r} is not supported; supported: {', '.join(ARCHITECTURES)}")

    def get(name: str, default: Any = None) -> Any:
        return fields[f"{kind}.{name}"] if default is None else fields.get(f"{kind}.{name}", default)

    heads, size = get("attention.head_count"), get("embedding_length")
    ends = [fields[key] for name in ("eos", "eot", "eom") if (key := f"tokenizer.ggml.{name}_token_id") in fields]
    kinds = zip(fields.get("tokenizer.ggml.tokens", ()), fields.get("tokenizer.ggml.token_type", ()), strict=False)
    ends += [number for number, (token, kind) in enumerate(kinds) if kind == CONTROL and token in ENDS]
    config = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": size,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": get("attention.key_length", size // heads),
        "rms_norm_eps": float(get("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(get("rope.freq_base", 10000.0)),
        "max_position_embeddings": get("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(ends)),
        "torch_dtype": "float32",
    }
    rotated = get("rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        raise ValueError(f"rope.dimension_count={rotated} is not supported: expected the width of a head, {config['head_dim']}")
    # as llama.cpp: a factor alone means linear, older files call it scale_linear, and 0 means none
    scaling, factor = get("rope.scaling.type", "linear"), float(get("rope.scaling.factor", get("rope.scale_linear", 0.0)))
    if scaling not in ("none", "linear", "yarn"):
        raise ValueError(
            f"the rope scaling {str(scaling)[:80]!r} is not supported; supported: none, linear, yarn, llama3's factors"
        )
    if scaling != "none" and factor not in (0.0, 1.0):
        length = config["max_position_embeddings"]  # for linear, the length after scaling
        of_linear = {"original_max_position_embeddings": max(1, int(length / factor))}
        settings = yarn_settings(get, factor, length) if scaling == "yarn" else of_linear
        config["rope_scaling"] = {"rope_type": scaling, "factor": factor, **settings}
    if ROPE_FACTORS in tensors:
        config["rope_scaling"] = llama3_scaling(config, np.asarray(tensors[ROPE_FACTORS].data, np.float32))
    return config


def yarn_settings(get: Callable[..., Any], factor: float, context_length: int) -> dict[str, Any]:
    """The settings of YaRN besides its factor. llama.cpp reads two of them: attn_factor, which multiplies 0.1 ln(factor) + 1, and
    the original length. The betas are those of the model's config. Raises ValueError for other settings with unusual values."""
    for name, usual in {"ext_factor": 1.0, "log_multiplier": 0.0, "attn_factor": 0.1 * math.log(factor) + 1.0}.items():
        if abs((found := float(get(f"rope.scaling.yarn_{name}", usual))) - usual) > 1e-3:
            raise ValueError(f"rope.scaling.yarn_{name}={found:g} is not supported: expected {usual:g}")
    return {
        "original_max_position_embeddings": get("rope.scaling.original_context_length", context_length),
        "attn_factor": float(get("rope.scaling.attn_factor", 1.0)),
        "beta_fast": float(get("rope.scaling.yarn_beta_fast", 32.0)),
        "beta_slow": float(get("rope.scaling.yarn_beta_slow", 1.0)),
    }


def llama3_scaling(config: dict[str, Any], factors: np.ndarray) -> dict[str, Any]:
    """The settings of Llama 3.1's rope that have these factors. Raises ValueError if there are none."""
    refused = ValueError(f"{ROPE_FACTORS} are not those of Llama 3.1 or 3.2")
    if factors.shape != (config["head_dim"] // 2,):
        raise refused
    plain = inverse_frequencies(RopeConfig(config["rope_theta"]), config["head_dim"])
    for factor in LLAMA3_FACTORS:
        rope = RopeConfig(config["rope_theta"], "llama3", factor)
        if np.allclose(plain / inverse_frequencies(rope, config["head_dim"]), factors, rtol=1e-4):
            return rope_settings(rope)["rope_scaling"]
    raise refused


def tokenizer_files(fields: dict[str, Any], config: dict[str, Any]) -> dict[str, str]:
    """tokenizer.json and tokenizer_config.json, with the chat template. Raises ValueError for an unsupported kind."""
    from tokenizers import processors

    kind, name = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre", "default")
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    if kind == "llama":
        pieces = Pieces(tokens, fields["tokenizer.ggml.scores"], types)
        unknown, prefix = fields.get("tokenizer.ggml.unknown_token_id", 0), fields.get("tokenizer.ggml.add_space_prefix", True)
        tokenizer, adds_bos = pieces._replace(unknown=unknown, prefix=bool(prefix)).tokenizer(), True
    elif kind == "gpt2" and name in PRE_TOKENIZERS:
        if name == "default":
            logger.warning("the file does not name its pre-tokenizer: GPT-2's may split numbers and punctuation unlike in training")
        tokenizer, adds_bos = byte_pairs(fields, PRE_TOKENIZERS[name]), PRE_TOKENIZERS[name].adds_bos
    else:
        known = ", ".join(PRE_TOKENIZERS)
        raise ValueError(
            f"the tokenizer {str(kind)[:80]}/{str(name)[:80]} is not supported; supported: llama, or gpt2 with {known}"
        )
    add_tokens(tokenizer, tokens, types)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    for role in ("bos", "eos", "unknown", "padding"):
        if (number := fields.get(f"tokenizer.ggml.{role}_token_id")) is not None:
            settings[{"unknown": "unk", "padding": "pad"}.get(role, role) + "_token"] = tokens[number]
    if (template := fields.get(TEMPLATE)) is not None:
        named = {key.removeprefix(f"{TEMPLATE}."): each for key, each in fields.items() if key.startswith(f"{TEMPLATE}.")}
        several = [{"name": key, "template": each} for key, each in (named | {"default": template}).items()]
        settings["chat_template"] = several if named else template
    if fields.get("tokenizer.ggml.add_bos_token", adds_bos):
        number, bos = fields["tokenizer.ggml.bos_token_id"], settings["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, number)])
    return {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps(settings, indent=1)}


def byte_pairs(fields: dict[str, Any], how: PreTokenizer) -> "Tokenizer":
    """A tokenizer of the kind gpt2: byte-level BPE, with the file's merges."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers
    from tokenizers import pre_tokenizers as pre

    vocabulary = {token: number for number, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=how.whole_words))
    steps: list[Any] = [pre.Digits(individual_digits=True)] if how.digits_apart else []
    if how.pattern is not None:
        steps.append(pre.Split(Regex(how.pattern), "isolated"))
    steps.append(pre.ByteLevel(add_prefix_space=False, use_regex=how.pattern is None))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre.Sequence(steps), decoders.ByteLevel()
    if how.normalizes:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer
