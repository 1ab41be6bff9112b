"""Trains the demo's byte-level BPE tokenizer and writes it as files that transformers' AutoTokenizer loads.

Run: python -m jaxspec.demo.tokenizer --out DIR
"""

import argparse
import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxspec.demo import corpus

VOCAB_SIZE = 4096
MAX_LENGTH = 1024

# GPT-2's splitting with single digits. A run of white space keeps its last space for the word behind it, so a line break
# with its indentation is one token.
PIECES = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# The model completes code and knows no roles: what the user writes is the code so far, a system message a comment.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{{- '# ' + message['content'].replace('\\n', '\\n# ') -}}
{%- else -%}
{{- message['content'] -}}
{%- endif -%}
{%- if not loop.last -%}{{- '\\n' -}}{%- endif -%}
{%- endfor -%}"""


def train_tokenizer(texts: list[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A lossless byte-level BPE of `vocab_size` tokens; id 0 is end-of-text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[corpus.END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json to `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH,
        "bos_token": None,
        "eos_token": corpus.END_OF_TEXT,
        "pad_token": corpus.END_OF_TEXT,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def load_tokenizer(directory: Path) -> Tokenizer:
    """Reads the tokenizer that `save_tokenizer` wrote."""
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def main() -> None:
    """Trains on the training split and prints how many bytes a token covers."""
    parser = argparse.ArgumentParser(description="Train the demo tokenizer on the standard library.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tokenizer's two files")
    arguments = parser.parse_args()

    texts = [document.text for document in corpus.documents(heldout=False)]
    tokenizer = train_tokenizer(texts)
    save_tokenizer(tokenizer, arguments.out)
    heldout = [document.text for document in corpus.documents(heldout=True)]
    tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(heldout))
    print(f"{tokenizer.get_vocab_size()} tokens; {sum(map(len, heldout)) / tokens:.2f} characters per held-out token")


if __name__ == "__main__":
    main()
