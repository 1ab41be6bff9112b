"""Helpers of the commands: errors in one line, options as arguments, tables, JSON, and prompts. Importing this loads no JAX."""

import argparse
import hashlib
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxspec.checkpoints.hub import HubOptions
from jaxspec.commands.options import FLAG_OF, HEAD, OPTIONS, Parser, whole
from jaxspec.demo.corpus import heldout_prompts

if TYPE_CHECKING:
    from jaxspec.text.prompts import Prompt

BUILT_IN = "built-in held-out code"
OF_THE_PACKAGE = {"chat": "48 conversations", "kinds": "10 texts of five kinds", "mt-bench": "its 80 conversations of two turns"}
"""Prompts by a short name: 48 conversations of six kinds; 10 texts of five (repeating code, edit, prose, chat, random); MT-bench's
questions, from FastChat (NOTICE)."""
FORMATS = (
    ", ".join(f"{name} ({what})" for name, what in OF_THE_PACKAGE.items())
    + ", or a file: a prompt per line; in .jsonl: strings, prompt, token_ids, turns or messages"
)
"""What --prompts takes."""
CONVERTED = ("max_total_tokens", "speculative_adaptive_trees", "speculative_request_trees")
"""Options whose value is converted before it is set as a field."""
CODE_OF_PLAIN = "TreeShape(num_steps=0)"
"""The name of plain decoding's tree in messages."""
ARGUMENT = re.compile(r"(give |leave out )?(?<![\w/.-])([a-z]+(?:_[a-z]+)*)(?![\w/-]|\.\w)(=True)?")
"""What may be the name of an argument, and is not a part of a path or of a longer name."""


def run_guarded(prog: str, run: Callable[[], int], words: Callable[[str], str] = str) -> int:
    """The exit status of a command. Errors that the user can fix become one line and status 2, Ctrl-C 130; warnings are lines.

    `words`: puts an error in the command's own words.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
        try:
            status = run()
            print(end="", flush=True)  # else the rest of the output would fail where nothing catches it
            return status
        except BrokenPipeError:  # the reader of the output, such as `head`, has closed it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except (ValueError, OSError) as error:
            print(f"{prog}: error: {words(str(error))}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print(f"{prog}: interrupted", file=sys.stderr)
            return 130


def in_flags(message: str) -> str:
    """A message with flags in place of LLM's arguments; TreeShape's names stay, as the names of their flags end with them.

    In:  "prefill_chunk must be at least 1, got 0: give ngram=True"
    Out: "--chunked-prefill-size must be at least 1, got 0: give --speculative-ngram"
    """
    of_heads = {name: OPTIONS[name].flag for name in HEAD}
    flags = FLAG_OF | of_heads | {"draft": of_heads["speculative_draft_model_path"], "token_map": of_heads["speculative_token_map"]}

    def flag(found: re.Match[str]) -> str:
        verb, name, value = found.groups("")
        is_name = verb or value or "_" in name  # else it may be an ordinary word
        return verb + flags[name] if name in flags and is_name else found[0]

    return re.sub(ARGUMENT, flag, message.replace(CODE_OF_PLAIN, "--tree plain"))


def fields_given(options: argparse.Namespace, owner: str) -> dict[str, Any]:
    """Fields of the config of `owner` (engine or server), with the values of the options given; a switch sets its own value. A
    command need not have all of the options."""
    found: dict[str, Any] = {}
    for option in OPTIONS.values():
        if option.sets.startswith(f"{owner}.") and option.dest not in CONVERTED:
            given = vars(options).get(option.dest)
            value = given if option.switch is None else option.switch if given else None
            found |= {} if value is None else {option.field.name: value}
    return found


def load_arguments(given: argparse.Namespace) -> dict[str, Any]:
    """The options of `add_model_options`, and those of the engine that the command has, as arguments of `load_models`."""
    names = (*HubOptions._fields, "dtype", "quantization", "speculative_draft_model_quantization")
    named = {"model": given.model_path, "draft": given.speculative_draft_model_path, "token_map": given.speculative_token_map}
    return named | {name: vars(given)[name] for name in names} | fields_given(given, "engine")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    put = [str.ljust, *[str.rjust] * (len(header) - 1)]

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(side(cell, width) for side, cell, width in zip(put, cells, widths, strict=True))} |"

    rule = f"|{'|'.join('-' * (width + 1) + (':' if column else '-') for column, width in enumerate(widths))}|"
    return "\n".join([line(header), rule, *map(line, rows)])


def listing(lines: Mapping[str, str]) -> str:
    """Names and their values, in two columns."""
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in lines.items())


def json_of(text: str | bytes) -> dict[str, Any]:
    """A JSON object; {} for anything else."""
    try:
        parsed = json.loads(text)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def add_prompt_options(parser: Parser, *, num_prompts: int, max_tokens: int) -> None:
    """Which prompts are run, and how far."""
    add = parser.add_argument_group("prompts").add_argument
    add("--prompts", type=Path, metavar="FILE", help=f"{FORMATS} (default: held-out Python code)")
    which = f"the first N prompts (default: all of the file, or {num_prompts} built-in ones)"
    add("--num-prompts", type=whole(1), metavar="N", help=which)
    add("--max-tokens", type=whole(2), default=max_tokens, metavar="N", help="tokens per prompt (default: %(default)s)")
    add("--chat", action="store_true", help="put every prompt into the model's chat template, as a user's message")
    parser.set_defaults(default_num_prompts=num_prompts)


class Chat(NamedTuple):
    """A prompt that is a conversation."""

    messages: list[dict[str, str]]

    def then(self, answer: str, question: str) -> "Chat":
        """This conversation, followed by an answer and the next question."""
        return Chat([*self.messages, {"role": "assistant", "content": answer}, {"role": "user", "content": question}])


class Turns(NamedTuple):
    """A conversation that is still to be held: each question is asked after the answer to the one before."""

    questions: list[str]


@dataclass(frozen=True)
class PromptSet:
    """Prompts and where they come from."""

    source: str
    prompts: "list[Prompt | Chat | Turns]"
    kinds: list[str] | None = None
    """The kind of each prompt, if every prompt names one."""

    @property
    def sha256(self) -> str:
        """Identifies the exact prompts, so that results can be compared."""
        return hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()

    def describe(self) -> dict:
        """The prompts' entry in a recorded result."""
        return {"source": Path(self.source).name, "count": len(self.prompts), "sha256": self.sha256}


def load_prompts(path: Path | None, count: int | None, default_count: int = 20) -> PromptSet:
    """The first `count` prompts of a file; without one, of the built-in set. None: all of the file, `default_count` built-in ones.

    A file has one prompt per line; "\\n" and other escapes in it stay as they are. A .jsonl file has one JSON string per line, or
    an object with "prompt" (text), "token_ids" (for models without a tokenizer), "turns" (questions, one after another) or
    "messages" (OpenAI's), and its "kind" if you like. OF_THE_PACKAGE has names of files that come with jaxspec.
    Raises ValueError if the file can't be read, has too few prompts, or a line of it has no prompt.
    """
    if path is None:
        return PromptSet(BUILT_IN, list(heldout_prompts(default_count if count is None else count)))
    if (name := str(path)) in OF_THE_PACKAGE:
        path = Path(__file__).parent / f"prompts_{name.replace('-', '_')}.jsonl"
    lines = [line for line in text_lines(path) if line.strip()]
    if count is None:
        count = len(lines)
    if not 0 < count <= len(lines):
        raise ValueError(f"{path} has {len(lines)} prompts, {max(1, count)} were asked for: lower --num-prompts")
    if path.suffix != ".jsonl":
        return PromptSet(str(path), list(lines[:count]))
    found = [_from_json(line, f"{path}, prompt {number}") for number, line in enumerate(lines[:count], 1)]
    kinds = [kind for _, kind in found if kind is not None]
    return PromptSet(str(path), [prompt for prompt, _ in found], kinds if len(kinds) == len(found) else None)


def text_lines(path: Path) -> list[str]:
    """A file's lines, which may hold U+2028, as JSON does. Raises ValueError that names the file if it can't be read."""
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"can't read {path}: {error}") from None


def _from_json(line: str, where: str) -> "tuple[Prompt | Chat | Turns, str | None]":
    """The prompt and its kind."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error})") from None
    kind = None
    if isinstance(entry, dict):
        kind = entry["kind"] if isinstance(entry.get("kind"), str) else None
        turns, messages = entry.get("turns"), entry.get("messages")
        if isinstance(messages, list) and messages and all(isinstance(each, dict) for each in messages):
            return Chat(messages), kind
        if isinstance(turns, list) and turns and all(isinstance(each, str) for each in turns):
            return Turns(turns), kind
        entry = entry.get("prompt", entry.get("token_ids"))
    if isinstance(entry, str) or (isinstance(entry, list) and entry and all(type(token) is int for token in entry)):
        return entry, kind
    raise ValueError(f'{where}: expected a string, or an object with "prompt", "token_ids", "turns" or "messages"; got {line[:80]}')
