"""Log probabilities in three shapes: OpenAI's for completions, OpenAI's for chat, and SGLang's.

There is one entry per generated token. A final stop token has one too, although its text is not in the response.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypedDict

from pydantic import SkipValidation

from jaxspec.engine.request import TokenLogprob
from jaxspec.server.model import ServedModel
from jaxspec.server.sending import ResponseModel
from jaxspec.text.detokenizer import Detokenizer

LOWEST = -9999.0
"""OpenAI's number for "impossible": JSON has no -Infinity."""


class CompletionLogprobs(ResponseModel):
    """OpenAI's `logprobs` of a completion, or of a piece of one."""

    tokens: list[str]
    token_logprobs: SkipValidation[list[float | None]]
    top_logprobs: SkipValidation[list[dict[str, float] | None]]
    text_offset: list[int]


def completion_logprobs(
    model: ServedModel, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None], offsets: Iterable[int]
) -> CompletionLogprobs:
    """The entries of these tokens. A token without an entry, the first of a prompt, gets nulls.

    `offsets`: where in the choice's text each token begins.
    """

    def top(entry: TokenLogprob) -> dict[str, float]:
        """The most likely tokens and the token itself. Of several tokens with the same text, the most likely one counts."""
        found: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            found.setdefault(model.token_text(token), finite(logprob))
        return found

    return CompletionLogprobs(
        tokens=[model.token_text(token) for token in token_ids],
        token_logprobs=[None if entry is None else finite(entry.logprob) for entry in entries],
        top_logprobs=[None if entry is None else top(entry) for entry in entries],
        text_offset=list(offsets),
    )


def prompt_offsets(
    model: ServedModel, token_ids: Sequence[int], written: str | None, *, skip_special_tokens: bool = True
) -> list[int]:
    """Where the text of each token begins in the echoed prompt. `written`: the prompt as the client wrote it: special tokens in it
    stay, even if they are skipped elsewhere; those that the tokenizer adds at the beginning have no text there. None: the prompt
    was token ids, and their decoded text is the echo."""
    assert model.tokenizer is not None
    places = None if written is None else _places(str(model.tokenizer.decode(list(token_ids), skip_special_tokens=False)), written)
    detokenizer = Detokenizer(model.tokenizer, skip_special_tokens=skip_special_tokens and places is None, with_offsets=True)
    detokenizer.add(token_ids)
    if places is None:
        return [min(offset, len(written or detokenizer.text)) for offset in detokenizer.offsets]
    return [places[min(offset, len(places) - 1)] for offset in detokenizer.offsets]


def _places(text: str, echo: str) -> list[int] | None:
    """Where in `echo` each character of the decoded text is, and where it ends. The text may have more tokens on both sides, and
    SentencePiece tokenizers write a space after special ones. None: `echo` is a different text."""
    end, found, begin = len(echo), [len(echo)], text.rfind(echo)
    for character in reversed(text if begin < 0 else text[: begin + len(echo)]):
        if end and character == echo[end - 1]:
            end -= 1
        elif end and character != " ":
            return None
        found.append(end)
    return None if end else found[::-1]


def join(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    later = dict(second)
    return CompletionLogprobs(**{field: entries + later[field] for field, entries in first})


class ChatAlternative(TypedDict):
    """One likely token."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatEntry(ChatAlternative):
    """One token of a reply."""

    top_logprobs: list[ChatAlternative]


class ChatLogprobs(ResponseModel):
    """OpenAI's `logprobs` of a chat reply, or of a piece of one."""

    content: SkipValidation[list[ChatEntry]]
    refusal: str | None


def chat_logprobs(model: ServedModel, entries: Iterable[TokenLogprob]) -> ChatLogprobs:
    """The log probabilities of the next tokens of a reply."""

    def alternative(token: int, logprob: float) -> ChatAlternative:
        text = model.token_text(token)
        is_whole = "\N{REPLACEMENT CHARACTER}" not in text  # else it is a part of a character, and its bytes are unknown
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode()) if is_whole else None}

    content: list[ChatEntry] = [
        {**alternative(entry.token_id, entry.logprob), "top_logprobs": [alternative(*each) for each in entry.top]}
        for entry in entries
    ]
    return ChatLogprobs(content=content, refusal=None)


type SglangEntry = list[float | int | str | None]
"""Log probability, token id and, if the request asked for it, text."""
type TextOf = Callable[[int], str]


def sglang_logprobs(
    token_ids: Sequence[int], entries: Sequence[TokenLogprob | None], text_of: TextOf | None
) -> list[SglangEntry]:  # fmt: skip
    """SGLang's [log probability, token id, text] per token; the text is null without `text_of`.

    In:  [5, 7], [None, TokenLogprob(7, -0.5, ())], None
    Out: [[None, 5, None], [-0.5, 7, None]]
    """
    return [
        [None if entry is None else finite(entry.logprob), token, text_of(token) if text_of else None]
        for token, entry in zip(token_ids, entries, strict=True)
    ]


def sglang_top(entries: Sequence[TokenLogprob | None], text_of: TextOf | None) -> list[list[SglangEntry] | None]:
    """The same for the most likely tokens of each position."""
    return [
        None if entry is None else [[finite(logprob), token, text_of(token) if text_of else None] for token, logprob in entry.top]
        for entry in entries
    ]


def finite(logprob: float) -> float:
    """A number that JSON can hold; NaN counts as impossible too."""
    return max(LOWEST, logprob)
