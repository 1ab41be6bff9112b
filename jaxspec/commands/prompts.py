"""Prompt sets: the built-in held-out code prompts, or a file."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jaxspec.demo.corpus import heldout_prompts

if TYPE_CHECKING:
    from jaxspec.llm import Prompt  # loads JAX

BUILT_IN = "built-in held-out code"


@dataclass(frozen=True)
class PromptSet:
    """Prompts and where they come from."""

    source: str
    prompts: "list[Prompt]"

    @property
    def sha256(self) -> str:
        """Names the exact prompts, so that two results can be known to be about the same ones."""
        return hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()

    def describe(self) -> dict:
        """What a result records about its prompts."""
        return {"source": Path(self.source).name, "count": len(self.prompts), "sha256": self.sha256}


def load_prompts(path: Path | None, count: int | None, default_count: int = 20) -> PromptSet:
    """The first `count` prompts of a file; without one, of the built-in set. None: all of the file, `default_count` built-in ones.

    A file has one prompt per line; "\\n" and other escapes in it stay as they are. A .jsonl file has one JSON string per line, or
    an object with "prompt" (text), "token_ids" (for models without a tokenizer) or "turns" (MT-bench: the first turn counts).

    Raises:
        ValueError: the file can't be read, has too few prompts, or a line of it has no prompt.
    """
    if path is None:
        return PromptSet(BUILT_IN, list(heldout_prompts(default_count if count is None else count)))
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"can't read the prompts: {error}") from None
    if count is None:
        count = len(lines)
    if not 0 < count <= len(lines):
        raise ValueError(f"{path} has {len(lines)} prompts, {max(1, count)} were asked for: lower --num-prompts")
    if path.suffix != ".jsonl":
        return PromptSet(str(path), list(lines[:count]))
    return PromptSet(str(path), [_from_json(line, f"{path}, prompt {number}") for number, line in enumerate(lines[:count], 1)])


def _from_json(line: str, where: str) -> "Prompt":
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error})") from None
    if isinstance(entry, dict):
        turns = entry.get("turns")
        entry = entry.get("prompt", entry.get("token_ids", turns[0] if isinstance(turns, list) and turns else None))
    if isinstance(entry, str) or (isinstance(entry, list) and entry and all(type(token) is int for token in entry)):
        return entry
    raise ValueError(f'{where}: expected a string, or an object with "prompt", "token_ids" or "turns"; got {line[:80]}')
