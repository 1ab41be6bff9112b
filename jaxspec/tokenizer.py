"""The tokenizer of a model directory."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase | None:
    """The directory's tokenizer, or None if it has no tokenizer files. Never runs code from the directory, never downloads."""
    directory = Path(directory)
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
