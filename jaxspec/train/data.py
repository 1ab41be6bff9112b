"""Training data: the Python source of the running interpreter's standard library (tests included), its tokenizer, and batches.

Every file belongs to exactly one split, chosen by a hash of its path, so anyone with the same CPython gets the same
documents, and held-out prompts come from files that neither the tokenizer, the target nor the head has seen.

`python -m jaxspec.train.data --out DIR` trains the tokenizer alone; `--prompts N --out FILE` writes prompts to train a head with.
"""

import argparse
import hashlib
import json
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
HELDOUT_FRACTION = 0.04
MAX_BYTES = 300_000

# Tables and deliberately odd files: nothing in them is worth predicting.
SKIPPED_PREFIXES = (
    "site-packages/",
    "config-",
    "_sysconfigdata",
    "encodings/",
    "pydoc_data/",
    "lib2to3/tests/data/",
    "idlelib/idle_test/example_",
    "test/encoded_modules/",
    "test/test_lib2to3/data/",
    "test/tokenizedata/",
    "test/cjkencodings/",
)
DEFINITION = re.compile(r"^(?:async def|def|class) ", re.MULTILINE)

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


class Document(NamedTuple):
    """One source file: its path below the library's folder, with forward slashes, and its text."""

    path: str
    text: str


def is_heldout(path: str) -> bool:
    """True for the 4% of all paths that are held out, independently of the other files."""
    first_bytes = hashlib.sha256(path.encode()).digest()[:4]
    return int.from_bytes(first_bytes, "big") < HELDOUT_FRACTION * 2**32


def is_worth_learning(text: str) -> bool:
    """Rejects near-empty files and tables: mostly non-ASCII text, or many digits and escapes and few words."""
    if len(text) < 200 or len(text) > MAX_BYTES:
        return False
    ascii_share = sum(character.isascii() for character in text) / len(text)
    table_share = sum(character.isdigit() or character == "\\" for character in text) / len(text)
    return ascii_share > 0.9 and table_share < 0.15


def documents(heldout: bool, root: Path | None = None) -> Iterator[Document]:
    """Yields the split's documents in the order of their paths, each text once.

    Args:
        heldout: the held-out split instead of the training split.
        root: the library's folder; the running interpreter's by default.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    seen = set()
    for file in sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).as_posix()):
        path = file.relative_to(root).as_posix()
        if path.startswith(SKIPPED_PREFIXES) or is_heldout(path) != heldout:
            continue
        try:
            text = file.read_text(encoding="utf-8").replace("\r\n", "\n").expandtabs(4)
        except UnicodeDecodeError:
            continue
        if is_worth_learning(text) and text not in seen:
            seen.add(text)
            yield Document(path, text)


def token_stream(tokenizer: Tokenizer, texts: Iterable[str], seed: int = 0) -> NDArray[np.int32]:
    """Encodes the documents in a shuffled order, joined by end-of-text: int32 [tokens]."""
    shuffled = list(texts)
    random.Random(seed).shuffle(shuffled)
    end = tokenizer.token_to_id(END_OF_TEXT)
    pieces = []
    for encoding in tokenizer.encode_batch(shuffled):
        pieces.append(np.array([*encoding.ids, end], np.int32))
    return np.concatenate(pieces)


def heldout_prompts(count: int, min_chars: int = 130, max_chars: int = 320, seed: int = 0, *, heldout: bool = True) -> list[str]:
    """Picks `count` code prompts from held-out files (or from the others), about 40-100 tokens each.

    A prompt starts at a top-level `def` or `class` and stops at the end of a line: the last nested `def` in range, if there is
    one, so that the completion has a body to write. The line break is left to the completion, because it forms one token with
    the indentation after it. Each definition gives at most one prompt; files are taken in turn.
    """
    by_file = []
    for document in documents(heldout=heldout):
        prompts = [_prompt_at(document.text, match.start(), min_chars, max_chars) for match in DEFINITION.finditer(document.text)]
        found = sorted({prompt for prompt in prompts if prompt})
        random.Random(f"{seed} {document.path}").shuffle(found)
        by_file.append(found)
    random.Random(seed).shuffle(by_file)
    turns = [found[turn] for turn in range(max(map(len, by_file))) for found in by_file if turn < len(found)]
    if count > len(turns):
        raise ValueError(f"the files contain {len(turns)} prompts; {count} were requested")
    return turns[:count]


def _prompt_at(text: str, start: int, min_chars: int, max_chars: int) -> str | None:
    """The prompt that starts at `start`, or None where no line ends within the limits."""
    ends = [match.start() for match in re.finditer(r"(?<=\S)\n", text[start : start + max_chars])]
    ends = [end for end in ends if end >= min_chars]
    if not ends:
        return None
    piece = text[start : start + ends[-1]]
    definitions = [match.end() for match in re.finditer(r"^ +def .*:$", piece, re.MULTILINE) if match.end() >= min_chars]
    return piece[: definitions[-1]] if definitions else piece[: ends[0]]


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


def load_tokenizer(directory: Path) -> Tokenizer:
    """Reads the tokenizer that `save_tokenizer` wrote."""
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


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
