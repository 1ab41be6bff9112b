"""The tokenizer of a model directory."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would warn that PyTorch is missing, which nothing here needs

from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers import PreTrainedTokenizerFast

from jaxspec.checkpoints.json_files import check_files, read_object
from jaxspec.checks import MAX_REASON, short

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
FILES: dict[str, Any] = dict.fromkeys(
    ("vocab", "merges", "gguf_file", "tokenizer_object", "vocab_file", "merges_file", "tokenizer_file", "spm_file")
)
"""Entries of old settings that name files, which transformers would open wherever they are: here they are None."""

MAX_GROWTH = 256
"""The largest factor by which its steps may lengthen a text, by their rules; in published tokenizers it is 2 to 40."""
PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
"""The parts of a tokenizer.json that change texts and tokens, step by step."""


def load_tokenizer(directory: Path) -> Tokenizer | None:
    """The directory's tokenizer, or None if it has no tokenizer files. Never runs code from the directory, never downloads.

    Raises ValueError, in one line, if its files can't be read.
    """
    directory = Path(directory)
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        return None
    check_files(directory)
    try:
        _check_names(directory)
        _check_growth(directory)
        tokenizer = _load(directory)
        if _asks_for_bos(directory) and tokenizer.encode("")[:1] != [tokenizer.bos_token_id]:
            tokenizer.add_bos_token = True  # as transformers 4 did; 5 reads tokenizer.json alone
        tokenizer.decode(tokenizer.encode("a", add_special_tokens=True), skip_special_tokens=True)  # wrong parts show at first use
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the libraries raise what they like; a panic in Rust is not even an Exception
        reason = " ".join(str(error).split())[:MAX_REASON] or type(error).__name__
        raise ValueError(f"the tokenizer of {directory} can't be read: {reason}") from None
    return tokenizer


def _load(directory: Path) -> Tokenizer:
    if is_plain(directory):
        return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True, **FILES)
    file, settings = directory / "tokenizer.model", _settings(directory)
    if file.is_file() and not (directory / "tokenizer.json").is_file() and "auto_map" not in settings:
        return _of_pieces(file, settings)

    from transformers import AutoTokenizer  # a third of a second
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it warns about model types that transformers has no class for, such as mimo
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True, **FILES)
    finally:
        logging.set_verbosity(verbosity)


def _of_pieces(file: Path, settings: dict) -> Tokenizer:
    """The tokenizer of tokenizer.model, as transformers 4 made it: with `legacy`, a space begins text after special tokens."""
    from jaxspec.checkpoints.sentence_pieces import add_tokens, read_pieces  # few directories need it

    pieces = read_pieces(file)
    tokenizer = pieces.tokenizer(once=settings.get("legacy") is False)
    add_tokens(tokenizer, pieces.tokens, pieces.kinds)
    with TemporaryDirectory() as folder:
        tokenizer.save(written := str(Path(folder) / "tokenizer.json"))
        how = {**FILES, "tokenizer_file": written, "add_bos_token": settings.get("add_bos_token", True)}
        return PreTrainedTokenizerFast.from_pretrained(file.parent, local_files_only=True, **how)


def check_same_tokens(target: Path, draft: Path) -> None:
    """Raises ValueError if the tokenizers of a target's and a draft model's directories number any token differently.

    Special and other added tokens may differ, as finetuned models rename them; a missing tokenizer is not compared.
    """
    tokenizers = [each for each in map(load_tokenizer, (target, draft)) if each is not None]
    if len(tokenizers) < 2:
        return
    added = {token for each in tokenizers for token in each.get_added_vocab()}
    expected, found = ({id: token for token, id in each.get_vocab().items() if token not in added} for each in tokenizers)
    differing = [number for number in expected.keys() | found.keys() if expected.get(number) != found.get(number)]
    if differing:
        first = min(differing)
        raise ValueError(
            f"{draft} has another tokenizer than the target: its token {first} is {short(found.get(first))}, the target's "
            f"{short(expected.get(first))}; give a draft model with the target's tokenizer, such as a smaller one of its family"
        )


def is_plain(directory: Path) -> bool:
    """Whether tokenizer.json alone defines a tokenizer. If a class is named or the model type has one, AutoTokenizer reads only
    its vocabulary and splits in the class's way: without SmolLM's lone digits (GPT2Tokenizer), without Llama 2's space after
    special tokens (LlamaTokenizer), and every model of type Qwen2 in Qwen2's way (CodeQwen1.5, DeepSeek-R1-Distill-Qwen)."""
    if not all((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "config.json")):
        return False
    settings = _settings(directory)
    return settings.get("tokenizer_class") not in ("Qwen2Tokenizer", "Qwen2TokenizerFast") and "auto_map" not in settings


def _asks_for_bos(directory: Path) -> bool:
    """Whether the tokenizer is one of Llama's that begins each text with a token, even if tokenizer.json does not say so."""
    settings = _settings(directory)
    is_llama = settings.get("tokenizer_class") in ("LlamaTokenizer", "LlamaTokenizerFast")
    return is_llama and settings.get("add_bos_token") is True and settings.get("bos_token") is not None


def _check_names(directory: Path) -> None:
    """Raises ValueError if the settings name files where FILES does not override them."""
    settings, special = _settings(directory), _settings(directory, "special_tokens_map.json")
    names = settings.get("fast_tokenizer_files") or ()
    if settings.get("init_inputs") or not FILES.keys().isdisjoint(special) or any("/" in str(name) for name in names):
        raise ValueError("init_inputs, fast_tokenizer_files or special_tokens_map.json name files to read")


def _check_growth(directory: Path) -> None:
    """Raises ValueError for a tokenizer.json that might make a text far longer, as 12 replacements of a letter by ten would."""
    file = directory / "tokenizer.json"
    parsed = read_object(file, _with_parts_once) if file.is_file() else {}
    steps, growth = [parsed.get(name) for name in PARTS], 1.0
    while steps and growth <= MAX_GROWTH:
        step = steps.pop()
        if isinstance(step, list):
            steps += step
        elif isinstance(step, dict):
            steps += step.values()
            growth *= _growth(step)
    if growth > MAX_GROWTH:
        raise ValueError(f"the steps of its tokenizer.json could make a text more than {MAX_GROWTH} times as long")


def _with_parts_once(pairs: list[tuple[str, Any]]) -> dict:
    """The object. Raises ValueError if it has a part twice, as the tokenizer may not take the same one as Python."""
    names = [name for name, _ in pairs if name in PARTS]
    if len(set(names)) < len(names):
        raise ValueError(f"{names[-1]} is there twice")
    return dict(pairs)


def _growth(step: dict) -> float:
    """The largest factor by which a step lengthens a text. (For Precompiled it is not known.)"""
    kind, content, single = step.get("type"), step.get("content"), step.get("single")
    if isinstance(content, str):
        pattern = step.get("pattern")
        text = pattern.get("String") if isinstance(pattern, dict) else None
        return max(1, len(content) / len(text) if isinstance(text, str) and text else len(content) + 1)
    if isinstance(single, list):  # a TemplateProcessing
        return max(1, sum(isinstance(piece, dict) and "Sequence" in piece for piece in single))
    return {"ByteLevel": 2, "Precompiled": 20}.get(str(kind), 1)


def _settings(directory: Path, name: str = "tokenizer_config.json") -> dict:
    file = directory / name
    return read_object(file) if file.is_file() else {}
