"""The process that renders conversations. Its standard input is a socket: a JSON object per line comes in, an answer goes out.

A chat template is a program that comes with a model. jinja2's sandbox keeps it away from the interpreter but bounds neither its
time nor its memory, and a thread can't be stopped; a process can. jaxspec/server/template_process.py runs this file by its path:
it imports nothing of jaxspec, so it starts in a tenth of a second.

The first line is {"template", "variables", "max_characters"}; the answer has the "options", names that the template reads from
outside. Every further line is {"variables"}, and the answer {"text"}. Instead of either it can be {"error"}.
"""

import contextlib
import json
import resource
import signal
import socket
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_MEMORY = 512 * 2**20
"""Bytes of address space, the interpreter's 30 MiB included."""
ORPHAN_SECONDS = 20
"""What takes longer has no server any more that would have stopped it."""
MAX_ERROR = 1000
"""Characters of a message."""


class Renderer:
    """One template, its sandbox, and what every conversation is rendered with."""

    def __init__(self) -> None:
        self._environment = make_environment()
        self._template = self._environment.from_string("")
        self._variables: dict[str, Any] = {}
        self._max_characters = 0

    def answer(self, line: bytes) -> dict[str, Any]:
        """The answer to one line."""
        question = json.loads(line)
        if "template" in question:
            return {"options": self.load(**question)}
        return {"text": self.render(question["variables"])}

    def load(self, template: str, variables: Mapping[str, Any], max_characters: int) -> list[str]:
        """The names that the template reads, besides those of jinja2's functions."""
        self._template = self._environment.from_string(template)
        self._variables, self._max_characters = dict(variables), max_characters
        return sorted(meta.find_undeclared_variables(self._environment.parse(template)))

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text. Raises ValueError if it gets too long."""
        pieces, length = [], 0
        for piece in self._template.generate({**self._variables, **variables}):
            length += len(piece)
            if length > self._max_characters:
                raise ValueError(f"the text has more than {self._max_characters} characters")
            pieces.append(piece)
        return "".join(pieces)


def make_environment() -> ImmutableSandboxedEnvironment:
    """What Hugging Face's chat templates expect; they give the same text with transformers."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
        "dict": SafeDict(),
        "namespace": SafeNamespace,
    }
    return environment


class GenerationBlock(Extension):
    """{% generation %} marks the assistant's tokens for training; here it is what it encloses."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_enclosed"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _enclosed(self, _context: nodes.EvalContext, caller: Callable[[], str]) -> str:
        return caller()


class SafeDict:
    """The class itself has methods that change a dictionary."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class SafeNamespace(Namespace):
    """Python itself would look up attributes with underscores."""

    def __init__(*args: Any, **attributes: Any):  # an attribute may be called self
        self, args = args[0], args[1:]
        attributes = dict(*args, **attributes)
        for name in attributes:
            _refuse_underscore(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"access to attribute {name!r} of a namespace is unsafe")


def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Unlike jinja2's, it escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    """How a template refuses a conversation."""
    raise TemplateError(message)


def strftime_now(format: str) -> str:
    """Today's date, for templates that tell it to the model."""
    return datetime.now().strftime(format)


def attempt(work: Callable[[bytes], dict[str, Any]], line: bytes) -> bytes:
    """What the work makes of the line, or {"error"} with the reason why it can't; as a line."""
    signal.alarm(ORPHAN_SECONDS)  # nobody catches it: it ends the process, whatever that is doing
    try:
        return json.dumps(work(line), ensure_ascii=False).encode() + b"\n"
    except TemplateSyntaxError as error:
        reason = f"line {error.lineno}: {error.message}"
    except MemoryError:
        reason = f"it needs more than {MAX_MEMORY // 2**20} MiB of memory"
    except UnicodeEncodeError:
        reason = "the text is not valid Unicode"
    except Exception as error:
        reason = str(error) or type(error).__name__
    finally:
        signal.alarm(0)
    return json.dumps({"error": reason[:MAX_ERROR]}).encode() + b"\n"


def limit_resources() -> None:
    """Bounds memory, and lets not even code that broke out of the sandbox write files or (unless it is root) start processes."""
    limits = {resource.RLIMIT_AS: MAX_MEMORY, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_NPROC: 0, resource.RLIMIT_CORE: 0}
    for kind, wanted in limits.items():
        allowed = resource.getrlimit(kind)[1]
        limit = wanted if allowed == resource.RLIM_INFINITY else min(wanted, allowed)
        with contextlib.suppress(ValueError):  # macOS can't limit the address space; the limit of time remains
            resource.setrlimit(kind, (limit, limit))


def main() -> None:
    """Answers until the other end is closed, which the end of the server does too."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # meant for the server, which answers running requests before it ends
    limit_resources()
    renderer = Renderer()
    with contextlib.suppress(ConnectionError), socket.socket(fileno=0) as connection, connection.makefile("rb") as lines:
        for line in lines:
            connection.sendall(attempt(renderer.answer, line))


if __name__ == "__main__":
    main()
