"""What the built-in model has read: the Python source of the running interpreter's standard library, tests included. And prompts.

Every file belongs to exactly one split, chosen by a hash of its path, so anyone with the same CPython gets the same
documents, and held-out prompts come from files that neither the tokenizer, the target nor the head has seen.
"""

import hashlib
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HELDOUT_FRACTION = 0.04
MAX_BYTES = 300_000
LEAST_CHARACTERS, MOST_CHARACTERS = 130, 320
"""Of a prompt."""

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


class Document(NamedTuple):
    """One source file: its path below the library's folder, with forward slashes, and its text."""

    path: str
    text: str


def is_heldout(key: bytes) -> bool:
    """True for the 4% of all keys, such as paths, that are held out, independently of the others."""
    return int.from_bytes(hashlib.sha256(key).digest()[:4], "big") < HELDOUT_FRACTION * 2**32


def is_worth_learning(text: str) -> bool:
    """Rejects near-empty files and tables: mostly non-ASCII text, or many digits and escapes and few words."""
    if len(text) < 200 or len(text) > MAX_BYTES:
        return False
    ascii_share = sum(character.isascii() for character in text) / len(text)
    table_share = sum(character.isdigit() or character == "\\" for character in text) / len(text)
    return ascii_share > 0.9 and table_share < 0.15


def documents(heldout: bool, root: Path | None = None) -> Iterator[Document]:
    """Yields the documents of the held-out split, or of the training split, in the order of their paths, each text once.

    `root`: the library's folder; None: the running interpreter's.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    seen = set()
    for file in sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).as_posix()):
        path = file.relative_to(root).as_posix()
        if path.startswith(SKIPPED_PREFIXES) or is_heldout(path.encode()) != heldout:
            continue
        try:
            text = file.read_text(encoding="utf-8").replace("\r\n", "\n").expandtabs(4)
        except UnicodeDecodeError:
            continue
        if is_worth_learning(text) and text not in seen:
            seen.add(text)
            yield Document(path, text)


def heldout_prompts(count: int) -> list[str]:
    """Picks `count` code prompts from held-out files, about 40-100 tokens each.

    A prompt starts at a top-level `def` or `class` and stops at the end of a line: the last nested `def` in range, if there is
    one, so that the completion has a body to write. The line break is left to the completion, because it forms one token with
    the indentation after it. Each definition gives at most one prompt; files are taken in turn.
    """
    by_file = []
    for document in documents(heldout=True):
        prompts = [_prompt_at(document.text, match.start()) for match in DEFINITION.finditer(document.text)]
        found = sorted({prompt for prompt in prompts if prompt})
        random.Random(f"0 {document.path}").shuffle(found)
        by_file.append(found)
    random.Random(0).shuffle(by_file)
    turns = [found[turn] for turn in range(max(map(len, by_file))) for found in by_file if turn < len(found)]
    if count > len(turns):
        raise ValueError(f"the files contain {len(turns)} prompts; {count} were requested")
    return turns[:count]


def _prompt_at(text: str, start: int) -> str | None:
    """The prompt that starts at `start`, or None where no line ends within the limits."""
    ends = [match.start() for match in re.finditer(r"(?<=\S)\n", text[start : start + MOST_CHARACTERS])]
    ends = [end for end in ends if end >= LEAST_CHARACTERS]
    if not ends:
        return None
    piece = text[start : start + ends[-1]]
    definitions = [match.end() for match in re.finditer(r"^ +def .*:$", piece, re.MULTILINE) if match.end() >= LEAST_CHARACTERS]
    return piece[: definitions[-1]] if definitions else piece[: ends[0]]
