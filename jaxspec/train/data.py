"""The built-in model's training data: its tokenizer, and batches of the corpus (demo/corpus.py).

`python -m jaxspec.train.data --out DIR` trains the tokenizer alone; `--prompts N --out FILE` writes prompts to train a head with.
"""

import argparse
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxspec.demo.corpus import documents, heldout_prompts

END_OF_TEXT = "<|endoftext|>"
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


def token_stream(tokenizer: Tokenizer, texts: Iterable[str], seed: int = 0) -> NDArray[np.int32]:
    """Encodes the documents in a shuffled order, joined by end-of-text: int32 [tokens]."""
    shuffled = list(texts)
    random.Random(seed).shuffle(shuffled)
    end = tokenizer.token_to_id(END_OF_TEXT)
    return np.concatenate([np.array([*encoding.ids, end], np.int32) for encoding in tokenizer.encode_batch(shuffled)])


def batches(stream: NDArray[np.int32], length: int, tokens: int, seed: int = 0) -> Iterator[NDArray[np.int32]]:
    """Endless batches of `tokens` tokens in rows of length + 1 (inputs and their next tokens), in a new order each epoch."""
    windows = (len(stream) - 1) // length
    rows = tokens // length
    generator = np.random.default_rng(seed)
    while True:
        order = generator.permutation(windows)
        for first in range(0, windows - rows + 1, rows):
            starts = order[first : first + rows] * length
            yield np.stack([stream[start : start + length + 1] for start in starts])


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
        special_tokens=[END_OF_TEXT],
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
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    """Trains the tokenizer and prints characters per held-out token; with --prompts, writes prompts instead."""
    parser = argparse.ArgumentParser(description="Train the demo tokenizer on the standard library, or write prompts of it.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tokenizer's two files, or file for prompts")
    parser.add_argument("--prompts", type=int, metavar="N", help="write so many prompts of the training split instead")
    arguments = parser.parse_args()
    if arguments.prompts:
        lines = (json.dumps({"prompt": prompt}) + "\n" for prompt in heldout_prompts(arguments.prompts, heldout=False))
        arguments.out.write_text("".join(lines))
        return

    texts = [document.text for document in documents(heldout=False)]
    tokenizer = train_tokenizer(texts)
    save_tokenizer(tokenizer, arguments.out)
    heldout = [document.text for document in documents(heldout=True)]
    tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(heldout))
    print(f"{tokenizer.get_vocab_size()} tokens; {sum(map(len, heldout)) / tokens:.2f} characters per held-out token")


if __name__ == "__main__":
    main()
