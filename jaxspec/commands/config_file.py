"""Options from a file or a mapping, as arguments of a command line."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from jaxspec.commands.compat import JSON_FLAGS
from jaxspec.commands.options import OPTIONS, Parser

MAX_BYTES = 64 * 1024
"""Largest config file."""
JSON_VALUES = {"true": True, "false": False, "null": None, "~": None}
"""Values by their names in YAML, in lower case."""
NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
NOT_IN_FILES = ("config", "help", "h")


class Quoted(str):
    """A quoted string, which is never a number, truth value or null."""


class _Loader(yaml.BaseLoader):
    """Keeps every value as text: a key like 0123 stays what it is. Aliases are refused."""

    def construct_scalar(self, node: Any) -> Any:
        return super().construct_scalar(node) if node.style is None else Quoted(node.value)

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ValueError(f"line {self.peek_event().start_mark.line + 1} has an alias, which is not supported: quote a * or &")
        return super().compose_node(parent, index)


def read_config(path: Path, parser: Parser) -> list[str]:
    """The options of a config file, as arguments of a command line.

    In:  max_running_requests: 4
         speculative-adaptive: true
    Out: ["--max-running-requests=4", "--speculative-adaptive"]

    Raises ValueError if the file can't be read, is not a mapping, or has a key or value that no option takes, and names it.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES} bytes")
        options = yaml.load(content.decode(), _Loader)
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:  # which repeats the line, and that may hold a key
        place = f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
        raise ValueError(f"--config {path} is not valid YAML at {place}: quote texts with special characters") from None
    except (UnicodeDecodeError, RecursionError, yaml.YAMLError):
        raise ValueError(f"--config {path} is not YAML") from None
    except ValueError as error:
        raise ValueError(f"--config {path}: {error}") from None
    if not isinstance(options, dict):
        raise ValueError(f"--config {path} must hold options, one per line, as in port: 8000")
    return arguments_of(options, parser, f"--config {path}")


def arguments_of(options: Mapping[Any, Any], parser: Parser, source: str) -> list[str]:
    """Options from a file or a mapping, their values as text, as arguments of a command line. `source`: where they are from, for
    messages. Raises ValueError for keys and values that no option takes."""
    return [argument for key, value in options.items() for argument in _arguments(source, str(key), value, parser)]


def _arguments(source: str, key: str, value: Any, parser: Parser) -> Iterator[str]:
    """One option of a config file."""
    name = f"--{key.replace('_', '-')}"
    action = parser.by_name.get(name)
    where = f"{source}: {key[:80]}"
    if action is None or key in NOT_IN_FILES:
        hint = "" if action else parser.with_suggestion(name).removeprefix(name[:80])
        raise ValueError(f"{where} is not an option of a config file{hint}")
    if value is not None and _as_json(value) is None:
        return  # not given, as YAML's null says
    if action.nargs == 0:
        if str(value).lower() not in ("true", "false"):
            raise ValueError(f"{where} must be true or false, got {value!r:.80}")
        if str(value).lower() == "true":
            yield name
        elif (negated := f"--no-{name.removeprefix('--')}") in parser.by_name:  # vLLM's --enable-prefix-caching
            yield negated
    elif isinstance(value, dict) and (name in JSON_FLAGS or (action.dest == "ignored" and action.nargs is None)):
        yield f"{name}={json.dumps({inner: _as_json(entry) for inner, entry in value.items()})}"
    elif isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        yield from (name, *value) if action.nargs == "+" else (f"{name}={' '.join(value)}",)
    elif isinstance(value, str) and value:
        yield f"{name}={value}"
    else:
        is_secret = action.dest in OPTIONS and OPTIONS[action.dest].secret
        raise ValueError(f"{where} must be a value" + ("" if is_secret else f", got {value!r:.80}"))


def _as_json(entry: Any) -> Any:
    """A number, truth value or null that a config file holds as text; other entries as they are."""
    if not isinstance(entry, str) or isinstance(entry, Quoted):
        return entry
    return json.loads(entry) if NUMBER.fullmatch(entry) else JSON_VALUES.get(entry.lower(), entry)
