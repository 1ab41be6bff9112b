"""The tokenizer of a model directory."""

import os
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would warn that PyTorch is missing, which nothing here needs

from transformers import AutoTokenizer
from transformers import PreTrainedTokenizerBase as Tokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def load_tokenizer(directory: Path) -> Tokenizer | None:
    """The directory's tokenizer, or None if it has no tokenizer files. Never runs code from the directory, never downloads."""
    directory = Path(directory)
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
