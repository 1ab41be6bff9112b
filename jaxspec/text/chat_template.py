"""The model's chat template: from a conversation to the text of the prompt.

A chat template is a program that comes with a model. jinja2's sandbox keeps it away from the interpreter but doesn't bound its time
or memory, and a thread can't be stopped. So it runs in a process with limits, which executes this same file. The file imports
little of jaxspec and no transformers, so that the process starts in a fifth of a second.

The process reads one JSON object per line from its standard input, a socket. The first is {"template", "variables",
"max_characters", "parts"}, and the reply {"names"} that the template or its parts read; each further one is {"variables"}, and the
reply {"text"}. Any reply can be {"error"}.
"""

import contextlib
import json
import logging
import queue
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from jaxspec.child_process import ChildProcess, answer

if TYPE_CHECKING:
    from jaxspec.text.tokenizer import Tokenizer

RENDER_SECONDS = 2.0
"""For one conversation; most take a millisecond."""
START_SECONDS = 15.0
"""For a process to start and compile the template; usually a fifth of a second."""
MAX_CHARACTERS = 8 * 2**20
"""The longest rendered text; a million tokens are about half of this."""
MAX_MEMORY = 512 * 2**20
"""Bytes of a process's address space, including 30 MiB of the interpreter."""
MAX_ERROR, MAX_QUOTED = 1000, 200
"""Characters of an error from the template, in a reply and in a message."""
PROCESSES = 2
"""The second starts when two conversations are rendered at once."""
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize")
"""Variables that no request may set, besides special tokens such as bos_token."""

logger = logging.getLogger(__name__)


class RenderError(ValueError):
    """A conversation can't be rendered. `status` is HTTP's, `param` the client's field at fault."""

    def __init__(self, message: str, param: str | None = None, status: int = 400):
        super().__init__(message)
        self.status, self.param = status, param  # what pickle restores: it knows the message only


class ChatTemplate:
    """Renders conversations in processes that are replaced when they exceed a limit. Thread-safe; close() ends the processes.

    `source` is the template's file, for errors; `stop`: strings that end an answer; `for_tools`: the template for requests
    with tools, if it differs (`without_tools`: for the others). Raises ValueError if a text is not a valid template.
    """

    def __init__(
        self,
        text: str,
        special_tokens: Mapping[str, str],
        source: str,
        *,
        stop: Sequence[str] = (),
        for_tools: str | None = None,
        seconds: float = RENDER_SECONDS,
        max_characters: int = MAX_CHARACTERS,
    ):
        self.text, self.without_tools, self.stop = text if for_tools is None else _by_tools(for_tools, text), text, tuple(stop)
        self._parts = [] if for_tools is None else [text, for_tools]
        self._variables = {**special_tokens, "tools": None, "documents": None}
        self._source, self._seconds, self._max_characters = source, seconds, max_characters
        self._is_open = True
        self._idle: queue.LifoQueue[ChildProcess | None] = queue.LifoQueue()
        for _ in range(PROCESSES - 1):
            self._idle.put(None)  # to be started
        process, names = self._start()
        self._idle.put(process)
        self.options = [name for name in names if not (name in RESERVED or name.startswith("_") or name.endswith("_token"))]
        """The variables that requests may set."""

    @classmethod
    def of_model(
        cls, tokenizer: "Tokenizer | None", text: str | None = None, source: str = "the chat template", stop: Sequence[str] = ()
    ) -> Self | None:
        """The given text, else the tokenizer's template (of several default, and tool_use where there are tools), else None.

        Raises ValueError for a text without a tokenizer, for several templates without a default, and for an invalid template.
        """
        if tokenizer is None:
            if text is not None:
                raise ValueError(f"{source} can't be used: the model has no tokenizer")
            return None
        for_tools = None
        if text is None:
            text, source = tokenizer.chat_template, _template_file(tokenizer.name_or_path)
            if isinstance(text, dict):
                if "default" not in text:
                    raise ValueError(f"{source} has chat templates named {', '.join(text)}, but no default: give --chat-template")
                for_tools, text = text.get("tool_use"), text["default"]
        return None if text is None else cls(text, tokenizer.special_tokens_map, source, stop=stop, for_tools=for_tools)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The conversation and the start of the reply, as text. Takes about a millisecond, at most twice the limit of time.

        `options`: the request's chat_template_kwargs; `tools`: in OpenAI's form.

        Raises RenderError: the template has no such option, refuses the conversation or exceeds a limit, or all processes are busy.
        """
        for name in (options := options or {}):
            if name not in self.options:
                known = f"an option of the model's chat template (its options: {', '.join(self.options) or 'none'})"
                raise RenderError(f"chat_template_kwargs: {_quote(name)} is not {known}", "chat_template_kwargs")
        if "developer" not in self.text:  # OpenAI's newer name of the system's role, which most templates would leave out
            messages = [
                {**each, "role": "system"} if isinstance(each, Mapping) and each.get("role") == "developer" else each
                for each in messages  # the template reports one of a wrong type
            ]
        variables = {"messages": messages, "add_generation_prompt": add_generation_prompt, **options, "tools": tools or None}
        try:
            line = json.dumps({"variables": variables}).encode()  # before a process is taken, which would be replaced
        except (RecursionError, TypeError) as error:
            reason = "are nested too deeply" if isinstance(error, RecursionError) else f"hold what JSON can't: {error}"
            raise RenderError(f"messages: they, or the tools, {reason}", "messages") from None
        with self._process() as process:
            reply = self._ask(process, line, self._seconds)
        if "error" in reply:
            raise RenderError(f"messages: the model's chat template can't render them: {_quote(reply['error'])}", "messages")
        return reply["text"]

    def close(self) -> None:
        """Ends the processes, each after its current conversation. Nothing can be rendered afterwards."""
        if self._is_open:
            self._is_open = False
            for _ in range(PROCESSES):
                if (process := self._idle.get()) is not None:
                    process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _process(self) -> Iterator[ChildProcess]:
        """A process for one conversation; a new one if the last has ended."""
        try:
            process = self._idle.get(timeout=self._seconds)
        except queue.Empty:
            raise RenderError("too many conversations are being rendered: try again later", status=503) from None
        try:
            if process is not None and not process.is_alive:
                process.close()
                process = None
            if process is None:
                process, _ = self._start()
            yield process
        except BaseException:
            if process is not None:
                process.close()
            raise
        finally:
            self._idle.put(process)

    def _start(self) -> tuple[ChildProcess, list[str]]:
        """A process that has compiled the template, and the names that the template reads. Raises ValueError."""
        process = ChildProcess(__file__)
        request = {"template": self.text, "variables": self._variables, "max_characters": self._max_characters}
        reply = self._ask(process, request | {"parts": self._parts}, START_SECONDS)
        if "error" in reply:
            process.close()
            raise ValueError(f"{self._source} is not a valid chat template: {reply['error']}")
        return process, reply["names"]

    def _ask(self, process: ChildProcess, request: Mapping[str, Any] | bytes, seconds: float) -> dict[str, Any]:
        """The reply. Without one the process is ended, and the reply is an error."""
        try:
            return process.ask(request, seconds, 6 * self._max_characters + 2**20)  # a character has up to six bytes in JSON
        except TimeoutError:
            error = f"it takes more than {seconds:g} seconds"
        except ConnectionError:
            error = "its process ended"
        process.close()
        logger.warning("replacing a process of the chat template: %s", error)
        return {"error": error}


def _quote(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    return quoted if len(quoted) <= MAX_QUOTED else quoted[: MAX_QUOTED - 3] + "..."


def _by_tools(having: str, lacking: str) -> str:
    """Joins two templates without changing whitespace: a tag swallows the line end after it, and a plus keeps what is before it."""
    having, lacking = (each.removesuffix("\n") for each in (having, lacking))  # as jinja2 does at a template's end
    return f"{{% if tools %}}\n{having}{{%+ else %}}\n{lacking}{{%+ endif %}}"


def _template_file(directory: str) -> str:
    """The file that transformers took the template from, as far as we can know."""
    files = [Path(directory) / name for name in ("chat_template.jinja", "tokenizer_config.json")] if directory else []
    return next((str(file) for file in files if file.is_file()), "the tokenizer's chat template")


# Everything below runs in the process.


class Renderer:
    """One template, its sandbox, and the variables of every conversation."""

    def __init__(self) -> None:
        self._environment = sandbox()

    def reply(self, line: bytes) -> dict[str, Any]:
        request = json.loads(line)
        if "template" in request:
            return {"names": self.load(**request)}
        return {"text": self.render(request["variables"])}

    def load(self, template: str, variables: Mapping[str, Any], max_characters: int, parts: Sequence[str] = ()) -> list[str]:
        """The names that the template, or its parts, read, without those of jinja2's functions."""
        self._template = self._environment.from_string(template)
        self._variables, self._max_characters = dict(variables), max_characters
        parsed = map(self._environment.parse, parts or [template])
        return sorted(set().union(*map(meta.find_undeclared_variables, parsed)))

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text. Raises ValueError if it gets too long."""
        pieces, length = [], 0
        for piece in self._template.generate({**self._variables, **variables}):
            length += len(piece)
            if length > self._max_characters:
                raise ValueError(f"the text has more than {self._max_characters} characters")
            pieces.append(piece)
        return "".join(pieces)


def sandbox() -> ImmutableSandboxedEnvironment:
    """The environment of transformers' `apply_chat_template`. A test compares the texts of both."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
    environment.filters["tojson"] = tojson
    functions = {"raise_exception": raise_exception, "strftime_now": lambda format: datetime.now().strftime(format)}
    environment.globals |= functions | {"dict": SafeDict(), "namespace": SafeNamespace}
    return environment


class GenerationBlock(Extension):
    """{% generation %} marks the assistant's tokens for training; here it renders as its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _content(self, _context: nodes.EvalContext, caller: Callable[[], str]) -> str:
        return caller()


class SafeDict:
    """Builds dictionaries. The class `dict` itself has methods that change them."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class SafeNamespace(Namespace):
    """Refuses attributes with underscores, which could reach into Python."""

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
    """Unlike jinja2's filter, it escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    """Called by a template to refuse a conversation."""
    raise TemplateError(message)


def attempt(work: Callable[[bytes], dict[str, Any]], line: bytes) -> bytes:
    """The reply to the line, or {"error"}."""
    try:
        return json.dumps(work(line), ensure_ascii=False).encode()
    except TemplateSyntaxError as error:
        reason = f"line {error.lineno}: {error.message}"
    except MemoryError:
        reason = f"it needs more than {MAX_MEMORY // 2**20} MiB of memory"
    except UnicodeEncodeError:
        reason = "the text is not valid Unicode"
    except Exception as error:
        reason = str(error) or type(error).__name__
    return json.dumps({"error": reason[:MAX_ERROR]}).encode()


def main() -> None:
    """Even code that broke out of the sandbox can't write files or, unless it runs as root, start processes."""
    limits = {resource.RLIMIT_AS: MAX_MEMORY, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_NPROC: 0, resource.RLIMIT_CORE: 0}
    renderer = Renderer()
    answer(lambda line: attempt(renderer.reply, line), limits)


if __name__ == "__main__":
    main()
