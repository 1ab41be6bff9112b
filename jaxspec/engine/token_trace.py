"""Where each token of a text comes from, and its own piece of the text. Plain Python, no JAX."""

from typing import NamedTuple

from jaxspec.engine.detokenizer import Decoder, Detokenizer
from jaxspec.engine.request import Update
from jaxspec.sampling_params import SamplingParams

PREFILL, DRAFT, BONUS, PLAIN = "prefill", "draft", "bonus", "plain"


class TracedToken(NamedTuple):
    """A token of the output."""

    id: int
    text: str
    """What it adds to the text. Half a character, or what might begin a stop string, comes with a later token."""
    origin: str
    """PREFILL: the first token. DRAFT: accepted. BONUS: the target's own, behind the accepted drafts. PLAIN: no draft was there."""
    depth: int
    """Of an accepted draft, from 1 on; 0 for others."""


class TokenTrace:
    """Takes the updates of one request, in order. The texts of all tokens together are the whole text."""

    def __init__(self, tokenizer: Decoder | None, params: SamplingParams):
        self._text = Detokenizer.of_request(tokenizer, params)

    def add(self, update: Update) -> list[TracedToken]:
        """The tokens of the update."""
        stopped = update.output is not None and isinstance(update.output.matched_stop, int)
        traced = []
        for index, token in enumerate(update.token_ids):
            is_last = index == len(update.token_ids) - 1
            shown = len(self._text.text)
            self._text.add([token], ends_with_stop=stopped and is_last)
            if is_last and update.output is not None:
                self._text.finish()
            traced.append(TracedToken(token, self._text.text[shown:], *_origin(update, index)))
        return traced


def _origin(update: Update, index: int) -> tuple[str, int]:
    """Origin and depth of one token of the update."""
    verification = update.verification
    if verification is None:
        return PREFILL, 0
    if verification.spec.num_steps == 0:
        return PLAIN, 0
    return (DRAFT, index + 1) if index < verification.accepted else (BONUS, 0)
