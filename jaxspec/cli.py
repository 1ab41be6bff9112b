"""The command `jaxspec`: calls a command's module. Only the modules of that command are loaded."""

import difflib
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from jaxspec.version import own_version


class Command(NamedTuple):
    """One command; the module's `main` takes its arguments and returns the exit status."""

    name: str
    summary: str
    module: str


GROUPS = {
    "run a model": (
        Command("serve", "serve a model over HTTP, with OpenAI's, Anthropic's and SGLang's APIs", "jaxspec.serve"),
        Command("chat", "chat with a model or a running server on the terminal", "jaxspec.commands.chat"),
        Command("generate", "complete one prompt on the terminal", "jaxspec.commands.generate"),
    ),
    "prepare": (
        Command("models", "list the models on this machine", "jaxspec.commands.models"),
        Command("pull", "download a model or a draft head from the Hugging Face Hub", "jaxspec.commands.pull"),
        Command("convert", "convert checkpoints so that they load faster; inspect and export them", "convert.__main__"),
        Command("train", "train a draft head for a model, from text that the model writes itself", "jaxspec.train.command"),
        Command("plan", "check whether a model fits on a GPU, and how fast it can be; needs no GPU", "jaxspec.planner.command"),
    ),
    "check and measure": (
        Command("check-draft", "check whether a draft head fits a model and speeds it up", "jaxspec.commands.check_draft"),
        Command("check-lossless", "compare speculation with plain decoding, token for token", "jaxspec.commands.check_lossless"),
        Command("bench", "run the benchmarks; how to measure a running server", "jaxspec.commands.bench"),
        Command("collect-env", "versions, devices and settings for a bug report", "jaxspec.commands.collect_env"),
    ),
}
COMMANDS = {command.name: command for group in GROUPS.values() for command in group}
AGAIN = 0.05
"""Seconds until a signal that was lost comes again."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; 2 if it does not exist."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if arguments[0] in ("-V", "--version", "version"):
        print(f"jaxspec {own_version()}")
        return 0
    if arguments[0] not in COMMANDS:
        print(f"jaxspec: error: {unknown(arguments[0])}", file=sys.stderr)
        return 2
    return interruptible(lambda: import_module(COMMANDS[arguments[0]].module).main(arguments[1:]))


def interruptible(run: Callable[[], int]) -> int:
    """The exit status of a command, 130 after a Ctrl-C that it does not handle.

    What a signal's handler raises is lost while a callback runs, such as that of JAX in garbage collections, and the command would
    go on: then the signal comes again.
    """
    tell, main_thread, has_ended = sys.unraisablehook, threading.get_ident(), threading.Event()

    def again() -> None:
        if not has_ended.is_set():
            signal.pthread_kill(main_thread, signal.SIGINT)  # it means the same as SIGTERM

    def hook(dropped: Any) -> None:
        if isinstance(dropped.exc_value, SystemExit | KeyboardInterrupt):
            threading.Timer(AGAIN, again).start()
        else:
            tell(dropped)

    sys.unraisablehook = hook
    try:
        return run()
    except KeyboardInterrupt:
        print("jaxspec: interrupted", file=sys.stderr)
        return 130
    finally:
        has_ended.set()
        sys.unraisablehook = tell


def exit_on_signals(*others: int) -> None:
    """From now on SIGTERM, SIGINT and these others raise SystemExit with status 0."""
    for number in (signal.SIGTERM, signal.SIGINT, *others):
        signal.signal(number, lambda *_: sys.exit(0))


def overview() -> str:
    """Every command with one line."""
    lines = [
        "usage: jaxspec COMMAND [options]",
        "",
        "Speculative decoding for LLM serving in JAX. Without --model-path, most commands use the built-in model.",
        "",
        "examples:",
        "  jaxspec serve smollm2",
        "  jaxspec chat smollm2",
    ]
    for title, group in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {command.name:<15} {command.summary}" for command in group)]
    return "\n".join(
        [*lines, "", "`jaxspec COMMAND --help` lists the options of a command, `jaxspec --version` prints the version."]
    )


def unknown(name: str) -> str:
    """The error for a command that does not exist, with the one that was perhaps meant."""
    if name.startswith("-"):
        return f"expected a command before the option {name[:80]!r}; commands: {', '.join(COMMANDS)}"
    close = difflib.get_close_matches(name, COMMANDS, 1)
    return f"unknown command {name[:80]!r}: " + (f"did you mean {close[0]}?" if close else f"commands are {', '.join(COMMANDS)}")
