"""The command `jaxspec`: finds the command that was asked for and hands over. Only that command's modules are loaded."""

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from jaxspec.version import own_version


class Command(NamedTuple):
    """One command; the module's `main` takes its arguments and returns the exit status."""

    name: str
    summary: str
    module: str


GROUPS = {
    "run a model": (
        Command("serve", "an HTTP server for one model, with OpenAI's API and SGLang's", "jaxspec.serve"),
        Command("generate", "complete one prompt here, on the terminal", "jaxspec.commands.generate"),
    ),
    "prepare": (
        Command("convert", "checkpoints that load faster; look into checkpoints; export heads", "convert.__main__"),
        Command("plan", "does it fit on this GPU, and what does its memory allow: no GPU needed", "jaxspec.plan"),
    ),
    "check and measure": (
        Command("check-draft", "is this draft head right for this model, and does it pay", "jaxspec.commands.check_draft"),
        Command("check-lossless", "speculation against plain decoding, token for token", "jaxspec.commands.check_lossless"),
        Command("bench", "benchmarks of this machine, and how to measure a running server", "jaxspec.commands.bench"),
        Command("collect-env", "versions, devices and settings, for a bug report", "jaxspec.commands.collect_env"),
    ),
}
COMMANDS = {command.name: command for group in GROUPS.values() for command in group}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. The exit status is the command's; 2 if there is no such command."""
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
    return import_module(COMMANDS[arguments[0]].module).main(arguments[1:])


def overview() -> str:
    """Every command with one line."""
    lines = [
        "usage: jaxspec COMMAND [options]",
        "",
        "Speculative decoding for LLM serving, in JAX. Without a model the commands take the built-in one.",
    ]
    for title, group in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {command.name:<15} {command.summary}" for command in group)]
    return "\n".join([*lines, "", "`jaxspec COMMAND --help` lists a command's options, `jaxspec --version` tells the version."])


def unknown(name: str) -> str:
    """What is wrong with a command that does not exist, and what was perhaps meant."""
    close = difflib.get_close_matches(name, COMMANDS, 1)
    meant = f"did you mean {close[0]}?" if close else f"there is: {', '.join(COMMANDS)}"
    what = "an option where a command was expected" if name.startswith("-") else "no command"
    return f"{name[:80]!r} is {what}: {meant}"
