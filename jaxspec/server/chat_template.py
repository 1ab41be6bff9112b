"""The model's chat template: from a conversation to the text of the prompt, within limits of time and output."""

import contextlib
import logging
import queue
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from jaxspec.server.errors import ApiError, echo
from jaxspec.server.template_process import TemplateProcess
from jaxspec.tokenizer import Tokenizer

RENDER_SECONDS = 2.0
"""For one conversation; most take a millisecond."""
START_SECONDS = 15.0
"""For a process to start and compile the template; mostly a fifth of a second."""
MAX_CHARACTERS = 8 * 2**20
"""Of a rendered text; a million tokens are about half as many."""
PROCESSES = 2
"""The second is started when two conversations are rendered at once."""
OURS = ("messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize")
"""Variables that no request may set, besides special tokens such as bos_token."""

logger = logging.getLogger(__name__)


class ChatTemplate:
    """Renders conversations in processes of their own, which are stopped and replaced at a limit. Thread-safe; close() it.

    `source` tells the owner where the text is from. Raises ValueError, naming it, if the text is no template.
    """

    def __init__(
        self,
        text: str,
        special_tokens: Mapping[str, str],
        source: str,
        *,
        seconds: float = RENDER_SECONDS,
        max_characters: int = MAX_CHARACTERS,
    ):
        self.text = text
        self._variables = {**special_tokens, "tools": None, "documents": None}
        self._source, self._seconds, self._max_characters = source, seconds, max_characters
        self._max_bytes = 6 * max_characters + 2**20  # a character in JSON has up to six
        self._is_open = True
        self._idle: queue.LifoQueue[TemplateProcess | None] = queue.LifoQueue()
        for _ in range(PROCESSES - 1):
            self._idle.put(None)  # to be started
        process, names = self._start()
        self._idle.put(process)
        self._options = [name for name in names if not (name in OURS or name.startswith("_") or name.endswith("_token"))]

    @classmethod
    def of_model(cls, tokenizer: Tokenizer | None, text: str | None = None, source: str = "the chat template") -> Self | None:
        """The given text, else the tokenizer's template (of several the one named default), else None.

        Raises ValueError for a text without a tokenizer, for several templates without a default, and for what is no template.
        """
        if tokenizer is None:
            if text is not None:
                raise ValueError(f"{source} has no use: the model has no tokenizer")
            return None
        if text is None:
            text, source = tokenizer.chat_template, _template_file(tokenizer)
            if isinstance(text, dict):
                if "default" not in text:
                    raise ValueError(f"{source} has chat templates named {', '.join(text)}, but no default: give --chat-template")
                text = text["default"]
        return None if text is None else cls(text, tokenizer.special_tokens_map, source)

    def render(
        self, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any] | None = None, *, param: str = "messages"
    ) -> str:
        """The conversation and the start of the reply, as text. Blocks: for a millisecond, at worst for twice the limit of time.

        `options` are the request's chat_template_kwargs; `param` is the client's name of messages.

        Raises ApiError: the template has no such option, refuses the conversation, exceeds a limit, or all processes are busy.
        """
        options = options or {}
        self._check(options)
        with self._process() as process:
            question = {"variables": {"messages": messages, "add_generation_prompt": True, **options}}
            answer = self._ask(process, question, self._seconds)
        if "error" in answer:
            raise ApiError(400, f"{param}: the model's chat template can't render them: {echo(answer['error'])}", param=param)
        return answer["text"]

    def close(self) -> None:
        """Ends the processes, each after the conversation that it renders. Nothing can be rendered afterwards."""
        if self._is_open:
            self._is_open = False
            for _ in range(PROCESSES):
                if (process := self._idle.get()) is not None:
                    process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, options: Mapping[str, Any]) -> None:
        for name in options:
            if name not in self._options:
                its = f"its options: {', '.join(self._options)}" if self._options else "it has none"
                message = f"chat_template_kwargs: {echo(name)} is no option of the model's chat template; {its}"
                raise ApiError(400, message, param="chat_template_kwargs")

    @contextlib.contextmanager
    def _process(self) -> Iterator[TemplateProcess]:
        """A process for one conversation, a new one if the last has ended."""
        try:
            process = self._idle.get(timeout=self._seconds)
        except queue.Empty:
            raise ApiError(503, "too many conversations are being rendered: try again later") from None
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

    def _start(self) -> tuple[TemplateProcess, list[str]]:
        """A process that has compiled the template, and the names that the template reads. Raises ValueError."""
        process = TemplateProcess()
        question = {"template": self.text, "variables": self._variables, "max_characters": self._max_characters}
        answer = self._ask(process, question, START_SECONDS)
        if "error" in answer:
            process.close()
            raise ValueError(f"{self._source} is no chat template: {answer['error']}")
        return process, answer["options"]

    def _ask(self, process: TemplateProcess, question: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The answer. Without one the process is ended, and the answer is an error too."""
        try:
            return process.ask(question, seconds, self._max_bytes)
        except TimeoutError:
            error = f"it takes more than {seconds:g} seconds"
        except ConnectionError:
            error = "its process ended"
        process.close()
        logger.warning("a process of the chat template is replaced: %s", error)
        return {"error": error}


def _template_file(tokenizer: Tokenizer) -> str:
    """Where transformers found the template, as far as can be told."""
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        if tokenizer.name_or_path and (file := Path(tokenizer.name_or_path) / name).is_file():
            return str(file)
    return "the tokenizer's chat template"
