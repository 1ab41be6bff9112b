"""What the command lines have in common. Importing this loads no JAX: --help is instant."""

import argparse
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from jaxspec.config import PLAIN, SpecConfig

DTYPES = ("auto", "float32", "bfloat16", "float16")
TREE_FLAGS = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")


class Parser(argparse.ArgumentParser):
    """Ends a wrong command line with one line and exit status 2. The text around the options keeps its line breaks."""

    def __init__(self, prog: str, description: str, epilog: str | None = None):
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=description, epilog=epilog, formatter_class=formatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")


def whole(least: int) -> Callable[[str], int]:
    """An option's type: a whole number that is at least `least`."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"must be a whole number >= {least}, got {text[:80]!r}")
        return value

    return number


def tree(text: str) -> SpecConfig:
    """An option's type: the draft tree that "steps/topk/nodes" names.

    In:  "5/4/8" or "plain"
    Out: SpecConfig(num_steps=5, topk=4, num_draft_tokens=8) or SpecConfig(num_steps=0)
    """
    if text == "plain":
        return PLAIN
    try:
        steps, topk, nodes = (int(part) for part in text.split("/"))
    except ValueError:
        message = f"a tree is num_steps/topk/num_draft_tokens, as in 5/4/8, or plain; got {text[:80]!r}"
        raise argparse.ArgumentTypeError(message) from None
    try:
        return SpecConfig(steps, topk, nodes)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def tree_name(spec: SpecConfig) -> str:
    """The tree as `tree` reads it."""
    return str(spec) if spec.num_steps else "plain"


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Which model and head, by the names that `jaxspec serve` has for them."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model-path", "--model", type=Path, metavar="DIR", help="model directory (default: the built-in model and its head)"
    )
    group.add_argument(
        "--speculative-draft-model-path",
        "--speculative-draft-model",
        "--draft",
        type=Path,
        metavar="DIR",
        help="the draft head's directory (default: the head that comes with the model)",
    )
    group.add_argument("--speculative-token-map", type=Path, metavar="FILE", help="FR-Spec's list of the tokens worth drafting")
    group.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: float32 on a CPU, 16 bits on a GPU")


def add_tree_options(parser: argparse.ArgumentParser) -> None:
    """The draft tree, in one word or in SGLang's three."""
    group = parser.add_argument_group("draft tree")
    group.add_argument("--tree", type=tree, metavar="S/K/D", help="the three in one: 5/4/8 is the default, with an MTP layer 1/1/2")
    group.add_argument("--speculative-num-steps", type=whole(0), metavar="S", help="levels drafted; 0: plain decoding")
    group.add_argument("--speculative-eagle-topk", type=whole(1), metavar="K", help="children kept per drafted token")
    group.add_argument("--speculative-num-draft-tokens", type=whole(1), metavar="D", help="nodes verified at once, root included")


def chosen_tree(options: argparse.Namespace) -> SpecConfig | None:
    """The tree of `add_tree_options`; None: none was given. Raises ValueError if it was given twice, or is no tree."""
    parts = [getattr(options, name) for name in TREE_FLAGS]
    if parts == [None, None, None]:
        return options.tree
    if options.tree is not None:
        raise ValueError("give --tree or SGLang's three numbers, not both")
    return SpecConfig(*parts)


def add_prompt_options(parser: argparse.ArgumentParser, *, num_prompts: int, max_tokens: int) -> None:
    """Which prompts a check runs, and how far."""
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="one prompt per line, or .jsonl: strings, or objects with prompt, token_ids or turns (default: held-out Python code)",
    )
    group.add_argument(
        "--num-prompts", type=whole(1), metavar="N", help=f"so many of them (default: the whole file; {num_prompts} built-in ones)"
    )
    group.add_argument("--max-tokens", type=whole(2), default=max_tokens, metavar="N", help="per prompt (default: %(default)s)")
    group.add_argument("--chat", action="store_true", help="put every prompt into the model's chat template, as a user's message")
    parser.set_defaults(default_num_prompts=num_prompts)


def run_guarded(prog: str, run: Callable[[], int]) -> int:
    """The exit status of a command: what the user can mend becomes one line and status 2, Ctrl-C 130, warnings one line each."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
        try:
            return run()
        except BrokenPipeError:  # whoever read the output has enough of it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except (ValueError, OSError) as error:
            print(f"{prog}: error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print(f"{prog}: interrupted", file=sys.stderr)
            return 130
