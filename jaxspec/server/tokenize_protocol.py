"""The requests of the tokenizer's endpoints. vLLM and SGLang have nearly the same; both are understood."""

from typing import Annotated, Any

from pydantic import FailFast, Field

from jaxspec.server.fields import MAX_INT, Strict, Strings, TemplateOptions, described_as, only
from jaxspec.server.openai_protocol import Message

MAX_TEXTS = 1024
"""Texts in one request, as in vLLM."""

type Texts = Annotated[Strings, Field(max_length=MAX_TEXTS)]
type TokenList = Annotated[list[Annotated[int, Field(ge=0, le=MAX_INT)]], FailFast()]
type TokenLists = Annotated[list[TokenList], Field(max_length=MAX_TEXTS), FailFast()]
type Messages = Annotated[list[Message], Field(min_length=1), FailFast()]
Prompts = Annotated[str | Texts | None, described_as(f"a string or a list of at most {MAX_TEXTS} strings")]
Tokens = Annotated[
    TokenList | TokenLists, described_as(f"a list of token ids, 0 or larger, or a list of at most {MAX_TEXTS} such lists")
]


class TokenizeRequest(Strict):
    """POST /tokenize. Either prompt or messages."""

    model: str | None = None
    """None: the served model."""
    prompt: Prompts = None
    """A list of them, as in SGLang, gets lists."""
    messages: Messages | None = None
    """As in /v1/chat/completions."""
    add_special_tokens: bool | None = None
    """None: those that begin and end a prompt. A chat template writes its own, so messages get none."""
    return_token_strs: bool | None = None
    """vLLM's: the answer carries the tokens as the vocabulary has them."""
    chat_template_kwargs: TemplateOptions | None = None
    """Variables that the model's own template reads."""

    # Not supported yet.
    add_generation_prompt: Annotated[Any, only(True)] = None
    continue_final_message: Annotated[Any, only(False)] = None
    tools: Annotated[Any, only([])] = None
    chat_template: Annotated[Any, only()] = None
    """Never from a request: a template is a program."""


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = None
    """None: the served model."""
    tokens: Tokens
    """A list of lists, as in SGLang, gets a list of texts."""
    skip_special_tokens: bool | None = None
    """None: they are in the text, as in vLLM: lm-eval wants to see the end-of-sequence token."""
