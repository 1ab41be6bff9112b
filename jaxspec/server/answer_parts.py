"""The parts of an answer in the order in which they come, as the Responses and the Messages API have them: thinking, text, and each
call. A whole answer is a stream of one update."""

from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pydantic_core import from_json

from jaxspec.engine.request import GenerationOutput, Update
from jaxspec.server.model import ServedModel
from jaxspec.server.running import RequestBatch
from jaxspec.text.answer_parser import AnswerFormat, AnswerParser
from jaxspec.text.answer_reader import Arguments, CallStart, Content, Event, Reasoning

type PartKind = Literal["thinking", "text", "call"]
_KINDS: dict[type[Event], PartKind] = {Content: "text", Reasoning: "thinking", CallStart: "call", Arguments: "call"}


@dataclass
class AnswerPart:
    """A part, as far as it came."""

    kind: PartKind
    name: str = ""
    """Of a call: the tool."""
    text: str = ""
    """Of a call: its arguments, a JSON object, unless the answer was cut off."""


class Change(NamedTuple):
    """A part begins, without text; it grows by a piece; or it ends: it is complete, or the answer has ended within it."""

    what: Literal["begun", "grown", "ended"]
    number: int
    part: AnswerPart
    piece: str = ""


class AnswerParts:
    """The parts of one answer, from its updates."""

    def __init__(self, form: AnswerFormat):
        self.parts: list[AnswerPart] = []
        self._parser, self._is_open = AnswerParser(form), False

    def add(self, update: Update) -> list[Change]:
        """What an update changes. Of two parts that follow each other, the first ends before the second begins."""
        changes: list[Change] = []
        for event in self._parser.add(update.text, is_last=update.output is not None):
            kind = _KINDS[type(event)]
            if not self._is_open or isinstance(event, CallStart) or self.parts[-1].kind != kind:
                changes += self._end()
                self.parts.append(AnswerPart(kind, event.name if isinstance(event, CallStart) else ""))
                self._is_open = True
                changes.append(Change("begun", len(self.parts) - 1, self.parts[-1]))
            if not isinstance(event, CallStart):
                self.parts[-1].text += event.text
                changes.append(Change("grown", len(self.parts) - 1, self.parts[-1], event.text))
        return changes if update.output is None else changes + self._end()

    def _end(self) -> list[Change]:
        was_open, self._is_open = self._is_open, False
        return [Change("ended", len(self.parts) - 1, self.parts[-1])] if was_open else []


def is_unfinished(arguments: str) -> bool:
    """Whether a call's arguments are only the beginning of a JSON object, because the answer ended within them."""
    for allow_partial in (False, True):
        with suppress(ValueError):
            from_json(arguments or "{", allow_partial=allow_partial)
            return allow_partial
    return False  # the model wrote no JSON


def as_update(output: GenerationOutput) -> Update:
    """A whole answer as its only update."""
    return Update(output.request_id, output.text, output.token_ids, output, output.logprobs)


def thinking_tokens(model: ServedModel, batch: RequestBatch, output: GenerationOutput) -> int:
    """How many tokens of an answer are thinking, tags included: the fewest first tokens whose text covers all of it."""
    end, params = batch.answer.thinking_in(output.text), batch.prompts[0].params
    if not end:
        return 0
    tokenizer, tokens = model.tokenizer, list(output.token_ids)
    assert tokenizer is not None

    def length(count: int) -> int:
        return len(str(tokenizer.decode(tokens[:count], skip_special_tokens=params.skip_special_tokens)))

    return bisect_left(range(len(tokens)), end, key=length)
