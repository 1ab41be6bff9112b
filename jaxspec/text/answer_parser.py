"""From the text of an answer to its parts: thinking, content and tool calls. One parser feeds whole responses and streams."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from jaxspec.text.answer_reader import AnswerReader, Arguments, CallStart, Content, Event, Reading, Reasoning, merged
from jaxspec.text.tool_parsers import ToolParser, Tools


class Thinking(Enum):
    """What an answer may begin with."""

    NONE = "none"
    POSSIBLE = "possible"
    """It thinks if it begins with the tag."""
    OPEN = "open"
    """It begins within the thinking, because the prompt ends with the tag, or since the model always thinks."""


class ReasoningFormat(NamedTuple):
    """How a model marks its thinking."""

    begin: str
    end: str
    is_forced: bool
    """The model always thinks, and may leave out the first tag."""

    def after(self, prompt: str) -> Thinking:
        """What an answer to this prompt may begin with.

        In:  "<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n" (a template that was told not to think)
        Out: Thinking.NONE
        """
        end = prompt.rstrip()
        if end.endswith(self.begin):
            return Thinking.OPEN
        if end.endswith(self.end):
            return Thinking.NONE
        return Thinking.OPEN if self.is_forced else Thinking.POSSIBLE

    def within(self, text: str) -> Thinking:
        """What an answer may continue with after this text, which is not empty."""
        return Thinking.OPEN if text.rfind(self.begin) > text.rfind(self.end) else Thinking.NONE


THINK = ReasoningFormat("<think>", "</think>", is_forced=False)
REASONING_FORMATS = {"qwen3": THINK, "mimo": THINK, "deepseek-r1": THINK._replace(is_forced=True)}
REASONING_FORMATS |= {"deepseek_r1": REASONING_FORMATS["deepseek-r1"]}
"""By SGLang's names, and vLLM's."""


@dataclass(frozen=True)
class AnswerFormat:
    """What to expect of an answer."""

    reasoning: ReasoningFormat | None = None
    """None: thinking is content like any other."""
    thinking: Thinking = Thinking.NONE
    is_separate: bool = True
    """The thinking becomes events of its own; else it remains in the content, tags included."""
    tool_parser: ToolParser | None = None
    """None: no part of it is a call."""
    tools: Tools = field(default_factory=dict)
    only_one_call: bool = False
    """Further calls are left out."""

    def thinking_in(self, text: str) -> int:
        """How many characters at the beginning of an answer are separate thinking, tags included.

        In:  "<think>hm</think> Yes." (of a model that may think)
        Out: 17
        """
        if self.reasoning is None or self.thinking is Thinking.NONE or not self.is_separate:
            return 0
        if self.thinking is Thinking.POSSIBLE and not text.lstrip().startswith(self.reasoning.begin):
            return 0
        end = text.find(self.reasoning.end)
        return len(text) if end < 0 else end + len(self.reasoning.end)


class AnswerParser:
    """Turns the text of one answer, in pieces of any size, into events. Merged, they don't depend on the pieces."""

    def __init__(self, form: AnswerFormat):
        self._form, self._reader = form, AnswerReader()
        self._reading = self._read()
        self._has_parts = form.tool_parser is not None or (form.reasoning is not None and form.thinking is not Thinking.NONE)
        """False: all of the text is content."""

    def add(self, text: str, *, is_last: bool = False) -> list[Event]:
        """The events that more text brings. `is_last`: no more will come."""
        if not self._has_parts:
            return [Content(text)] if text else []
        self._reader.text += text
        self._reader.has_ended = is_last
        found: list[Event] = []
        for event in self._reading:
            if event is None:  # it needs more text
                break
            if not (self._form.only_one_call and isinstance(event, CallStart | Arguments) and event.call):
                found.append(event)
        return merged(found)

    def _read(self) -> Reading[None]:
        if self._form.reasoning is not None and self._form.thinking is not Thinking.NONE:
            yield from self._read_thinking(self._form.reasoning)
        if self._form.tool_parser is not None:
            yield from self._form.tool_parser(self._reader, self._form.tools)
        yield from self._reader.until(None, Content)

    def _read_thinking(self, form: ReasoningFormat) -> Reading[None]:
        reader, kept = self._reader, not self._form.is_separate
        yield from reader.spaces()
        if not (yield from reader.take(form.begin)) and self._form.thinking is Thinking.POSSIBLE:
            reader.at = reader.mark
            return
        if kept:
            if reader.at:
                yield Content(reader.text[: reader.at])
            if (yield from reader.until(form.end, Content, str)):
                yield Content(form.end)
            reader.mark = reader.at
            return
        yield from reader.spaces()
        yield from reader.until(form.end, Reasoning)
        yield from reader.spaces()
        reader.mark = reader.at


class Call(NamedTuple):
    name: str
    arguments: str
    """A JSON object, unless the answer was cut off."""


class Answer(NamedTuple):
    content: str
    reasoning: str
    calls: list[Call]

    @classmethod
    def of(cls, events: Sequence[Event]) -> "Answer":
        """From all its events."""
        content, reasoning = ("".join([each.text for each in events if isinstance(each, kind)]) for kind in (Content, Reasoning))
        arguments = {each.call: "" for each in events if isinstance(each, CallStart)}
        for each in events:
            if isinstance(each, Arguments):
                arguments[each.call] += each.text
        return cls(content, reasoning, [Call(each.name, arguments[each.call]) for each in events if isinstance(each, CallStart)])
