"""Log probabilities as clients expect them: OpenAI's two shapes (completions, chat) and SGLang's.

There is one entry per generated token, a final stop token included, although its text is not part of the answer's.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxspec.engine.detokenizer import Detokenizer
from jaxspec.engine.request import TokenLogprob
from jaxspec.server.model import ServedModel

LOWEST = -9999.0
"""OpenAI's number for "impossible": JSON has no -Infinity."""


class CompletionLogprobs:
    """OpenAI's `logprobs` object of a completion, in one piece or, as text_offset counts on, in several."""

    def __init__(self, model: ServedModel, offset: int = 0, skip_special_tokens: bool = True):
        """`offset`: where in the choice's text the first token begins."""
        self._model, self._offset = model, offset
        self._text = Detokenizer(model.tokenizer, (), skip_special_tokens)

    def add(self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None], most: int | None = None) -> dict[str, Any]:
        """The object for the next tokens. A token without an entry, the prompt's first, has nulls; `most` is the largest offset."""
        offsets = []
        for token in token_ids:
            offset = self._offset + len(self._text.text)
            offsets.append(offset if most is None else min(offset, most))
            self._text.add([token])
        return {
            "tokens": [self._model.token_text(token) for token in token_ids],
            "token_logprobs": [entry and finite(entry.logprob) for entry in entries],
            "top_logprobs": [entry and self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and, if it is not among them, the token itself. Of several with the same text the best counts."""
        top: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(self._model.token_text(token), finite(logprob))
        return top


def join(first: dict[str, list], second: dict[str, list]) -> dict[str, list]:
    """One object of two."""
    return {name: first[name] + second[name] for name in first}


def chat_logprobs(model: ServedModel, entries: Iterable[TokenLogprob]) -> dict[str, Any]:
    """OpenAI's `logprobs` object of a chat reply, or of a piece of one."""

    def shown(token: int, logprob: float) -> dict[str, Any]:
        text = model.token_text(token)
        known = "\N{REPLACEMENT CHARACTER}" not in text  # else it is a part of a character, and its bytes are not in the text
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode()) if known else None}

    content = [
        {**shown(entry.token_id, entry.logprob), "top_logprobs": [shown(token, logprob) for token, logprob in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


type NativeEntry = list[float | int | str | None]


def native_logprobs(
    token_ids: Sequence[int], entries: Sequence[TokenLogprob | None], text_of: Callable[[int], str] | None
) -> list[NativeEntry]:
    """SGLang's [log probability, token id, text] per token; the text is null without `text_of`.

    In:  [5, 7], [None, TokenLogprob(7, -0.5, ())], None
    Out: [[None, 5, None], [-0.5, 7, None]]
    """
    return [
        [entry and finite(entry.logprob), token, text_of(token) if text_of else None]
        for token, entry in zip(token_ids, entries, strict=True)
    ]


def native_top(entries: Sequence[TokenLogprob | None], text_of: Callable[[int], str] | None) -> list[list[NativeEntry] | None]:
    """The same for the likeliest tokens of each position."""
    return [
        entry and [[finite(logprob), token, text_of(token) if text_of else None] for token, logprob in entry.top]
        for entry in entries
    ]


def finite(logprob: float) -> float:
    """What JSON can carry; NaN counts as impossible too."""
    return max(LOWEST, logprob)
