"""--config FILE: options of the command line, in YAML."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from jaxspec.server.parser import Parser

MAX_BYTES = 64 * 1024
NOT_THERE = ("config", "help", "h")
"""Options that a file can't have."""


class _Loader(yaml.BaseLoader):
    """Every value is the text that stands there: a key like 0123 stays what it is. Nothing stands for something elsewhere."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="aliases are not supported", problem_mark=self.peek_event().start_mark)
        return super().compose_node(parent, index)


def read_config(path: Path, parser: Parser) -> list[str]:
    """The options of the file, as arguments of a command line.

    In:  max_running_requests: 4
         speculative-adaptive: true
    Out: ["--max-running-requests=4", "--speculative-adaptive"]

    Raises:
        ValueError: the file can't be read, is no mapping, or has a key or value that no option takes; the message names it.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"--config {path} is larger than {MAX_BYTES} bytes")
        options = yaml.load(content.decode(), _Loader)
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from None
    except (UnicodeDecodeError, RecursionError):
        raise ValueError(f"--config {path} is not YAML") from None
    except yaml.YAMLError as error:
        raise ValueError(f"--config {path} is not YAML that can be read: {' '.join(str(error).split())}") from None
    if not isinstance(options, dict):
        raise ValueError(f"--config {path} must hold options, one per line, as in port: 8000")
    return [argument for key, value in options.items() for argument in _arguments(path, str(key), value, parser)]


def _arguments(path: Path, key: str, value: Any, parser: Parser) -> Iterator[str]:
    """One option."""
    name = f"--{key.replace('_', '-')}"
    action = parser.by_name.get(name)
    where = f"--config {path}: {key[:80]}"
    if action is None or key in NOT_THERE:
        raise ValueError(f"{where} is no option of a config file{_suggestion(name, parser) if action is None else ''}")
    if action.nargs == 0:
        if str(value).lower() not in ("true", "false"):
            raise ValueError(f"{where} must be true or false, got {value!r:.80}")
        if str(value).lower() == "true":
            yield name
    elif isinstance(value, dict) and name == "--speculative-config":
        yield f"{name}={json.dumps({key: _number(its) for key, its in value.items()})}"
    elif isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        yield from (name, *value) if action.nargs == "+" else (f"{name}={' '.join(value)}",)
    elif isinstance(value, str) and value:
        yield f"{name}={value}"
    else:
        raise ValueError(f"{where} must be a value, got {value!r:.80}")


def _suggestion(name: str, parser: Parser) -> str:
    return parser.with_suggestion(name).removeprefix(name[:80])


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdecimal() else value
