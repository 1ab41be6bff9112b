"""The served model: its name, its context length, and how text becomes token ids."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from time import time
from typing import Any, NoReturn

from jaxspec.engine.program_table import ProgramCount
from jaxspec.server.errors import ApiError, echo, wrong
from jaxspec.text.answer_parser import ReasoningFormat
from jaxspec.text.chat_template import ChatTemplate, RenderError
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.text.tool_formats import ToolFormat
from jaxspec.tree_shape import TreeShape

MAX_COMPLETIONS = 256
"""Completions that one request may ask for: n of each prompt."""
MAX_OTHER_NAMES = 20
"""The most other names that get a warning."""
LONG_TOKEN = 16
"""Characters per token of unusually long tokens; only indentation and the like is longer."""
TRUNCATION_SLACK = 16
"""Tokens by which the count may change where a text is truncated."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedModel:
    """The model as the routes know it. Its methods raise ApiError, naming the client's field at fault."""

    name: str
    context_length: int
    tree: TreeShape
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None = None
    """The caller closes it."""
    trees: tuple[TreeShape, ...] = ()
    """All trees that requests may ask for."""
    algorithm: str = "NONE"
    """Where drafts come from, as --speculative-algorithm calls it."""
    programs: Callable[[], ProgramCount] = ProgramCount
    """The number of compiled programs."""
    max_completions: int = MAX_COMPLETIONS
    """The most completions of one request: at most the queue's length, as a request is queued as a whole or not at all."""
    created: int = field(default_factory=lambda: int(time()))
    """Unix time, for OpenAI's model list."""
    other_names: tuple[str, ...] = ()
    """Other names that clients may use for it. Responses have `name`."""
    path: str | None = None
    """The model as it was given at the start: a path or a name. None: the same as `name`."""
    tokenizer_path: str | None = None
    """A directory that a client on this machine can load."""
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of SamplingParams for requests of OpenAI's API that leave them out."""
    devices: int = 1
    """How many devices run it."""
    strict_name: bool = False
    """Refuse requests for a model of another name."""
    tool_format: ToolFormat | None = None
    """How it writes tool calls. None: not known."""
    reasoning: ReasoningFormat | None = None
    """How it marks its thinking. None: thinking is not separated from the answer."""
    _token_texts: dict[int, str] = field(default_factory=dict)
    _other_names: set[str] = field(default_factory=set)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.other_names)

    def check_name(self, name: str | None) -> None:
        """A request for another model is answered all the same, as SGLang does, with a warning for each name in the log; with
        `strict_name` it is refused. Requests may leave the name out."""
        if name is None or name in self.names:
            return
        if self.strict_name:
            self.refuse_name(name)
        if name not in self._other_names and len(self._other_names) < MAX_OTHER_NAMES:
            self._other_names.add(name)
            shown = echo(name).encode("ascii", "backslashreplace").decode()
            logger.warning("unknown model %s requested; %s answers (--strict-model-name refuses such requests)", shown, self.name)

    def refuse_name(self, name: str) -> NoReturn:
        """Raises ApiError 404."""
        message = f"model {echo(name)} does not exist; this server has: {', '.join(self.names)}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def prompts(self, given: Any, param: str) -> list[tuple[str, list[int]]]:
        """The client's name and the token ids of each prompt. `given`: one prompt or a list of them, text or token ids."""
        if is_single(given):
            return [(param, self.token_ids(given, param))]
        return [(name := f"{param}.{index}", self.token_ids(prompt, name)) for index, prompt in enumerate(given)]

    def check_count(self, given: Any, n: int | None, *, param: str, n_param: str) -> None:
        """Refuses too many prompts, or too many completions of them, before the prompts are tokenized."""
        prompts, most = 1 if is_single(given) else len(given), self.max_completions
        if prompts > most:
            raise wrong(param, f"holds {prompts} prompts; a request takes at most {most}")
        if (count := prompts * (n or 1)) > most:
            raise wrong(n_param, f"= {n} makes {count} completions of {prompts} prompts; a request takes at most {most}")

    def token_text(self, token_id: int) -> str:
        """The text that one token, even a special one, adds inside a text. A part of a character becomes U+FFFD."""
        if (text := self._token_texts.get(token_id)) is None:
            text = self._token_texts[token_id] = self._decode_behind_another(token_id)
        return text

    def _decode_behind_another(self, token_id: int) -> str:
        """SentencePiece tokenizers drop the space with which a text begins, so that two tokens would have the same text."""
        assert self.tokenizer is not None
        first = self.tokenizer.encode("a", add_special_tokens=False)[-1:]
        alone, both, before = (
            str(self.tokenizer.decode(tokens, skip_special_tokens=False)) for tokens in ([token_id], [*first, token_id], first)
        )
        return both.removeprefix(before) if both.startswith(before) else alone

    def token_ids(self, prompt: str | list[int], param: str) -> list[int]:
        """Token ids of a prompt. The tokenizer adds its special tokens to text. Slow for long texts."""
        if not prompt:
            raise wrong(param, "must not be empty")
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise wrong(f"{param}:", "this model has no tokenizer; send token ids to /generate as input_ids")
        check_unicode(prompt, param)
        self._refuse_too_long(self.tokenizer, prompt, param)
        return self.tokenizer.encode(prompt)

    def chat_text(self, messages: Sequence[Mapping[str, Any]], *template: Any, **more: Any) -> str:
        """A conversation and the start of the reply. `template`, `more`: as ChatTemplate.render takes them."""
        if self.tokenizer is None or self.chat_template is None:
            what = "tokenizer; send token ids to /generate" if self.tokenizer is None else "chat template; use /v1/completions"
            raise wrong("messages:", f"this model has no {what}")
        try:
            return self.chat_template.render(messages, *template, **more)
        except RenderError as error:
            raise ApiError(error.status, str(error), param=error.param) from None

    def chat_token_ids(self, text: str) -> list[int]:
        """Token ids of a text from `chat_text`."""
        assert self.tokenizer is not None
        self._refuse_too_long(self.tokenizer, text, "messages")
        return self.tokenizer.encode(text, add_special_tokens=False)  # the template writes its own special tokens

    def has_special(self, *tags: str) -> bool:
        """Whether any of these is a special token, which usually is left out of the text."""
        return bool(tags) and not self._special_tokens.isdisjoint(tags)

    @cached_property
    def _special_tokens(self) -> frozenset[str]:
        """All special tokens, including those that `all_special_tokens` lacks."""
        if self.tokenizer is None:
            return frozenset()
        added = [str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return frozenset([*self.tokenizer.all_special_tokens, *added])

    def _refuse_too_long(self, tokenizer: Tokenizer, text: str, param: str) -> None:
        """Refuses a text if its beginning alone exceeds the context: tokenizing megabytes would take minutes.

        Truncation can change the last tokens, hence the slack. A text that passes is tokenized in full later.
        """
        head = text[: LONG_TOKEN * self.context_length]
        if len(head) < len(text) and (tokens := len(tokenizer.encode(head)) - TRUNCATION_SLACK) > self.context_length:
            raise self._exceeded(f"{param} has more than {tokens} tokens", param)

    def budget(self, prompt_tokens: int, max_tokens: int | None, default: int | None, *, param: str, budget_param: str) -> int:
        """Tokens to generate: max_tokens, else the default (None: no limit) or the rest of the context, whichever is less.

        `param` and `budget_param` are the client's names of the prompt and of max_tokens.
        """
        left = self.context_length - prompt_tokens
        if left < 1 or (max_tokens is not None and max_tokens > left):
            more = "" if max_tokens is None else f" and {budget_param} asks for {max_tokens} more"
            raise self._exceeded(f"{param} has {prompt_tokens} tokens{more}", param if left < 1 else budget_param)
        if max_tokens is not None:
            return max_tokens
        return left if default is None else min(default, left)

    def _exceeded(self, what: str, param: str) -> ApiError:
        message = f"{what}, but the context length is {self.context_length}, output included"
        return ApiError(400, message, param=param, code="context_length_exceeded")


def is_single(given: Any) -> bool:
    """Whether this is one prompt: a string or a list of token ids. An empty list is one empty prompt."""
    return isinstance(given, str) or not given or isinstance(given[0], int)


def check_unicode(text: str, param: str) -> None:
    """Refuses half of a surrogate pair, which JSON can hold but no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise wrong(param, f"is not valid Unicode: character {error.start} is half of a surrogate pair") from None
