"""The conversation of `jaxspec chat`: reads questions and commands, shows answers as they come. Loads no JAX.

Answers come from an `AnswerSource`, an engine in this process (chat_engine.py) or a running server (chat_server.py).
"""

import contextlib
import difflib
import json
import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from jaxspec.commands.chat_screen import THINKING, Screen
from jaxspec.commands.common import listing
from jaxspec.commands.generate import LEGEND
from jaxspec.sampling_params import declaration
from jaxspec.tree_shape import PLAIN, TreeShape

STOPPED = "stopped"
"""The reason of an answer that Ctrl-C ended."""
ENDS = {"length": "cut off: no more tokens", STOPPED: STOPPED, "abort": "aborted by the server", "timeout": "out of time"}
"""Why an answer ended, where it did not end by itself."""

type Messages = Sequence[dict[str, str]]


class Piece(NamedTuple):
    """A part of an answer, as it comes."""

    spans: tuple[tuple[str, str], ...] = ()
    """Texts, each with its origin: one of jaxspec/engine/output.py's, THINKING, or "" if unknown."""
    tokens: int = 0
    forwards: int = 0
    """Finished forwards of the target, not counting those for the prompt."""
    forwarded: int = 0
    """Tokens that these forwards emitted."""
    finish: str | None = None
    """OpenAI's finish_reason, in one of the last pieces."""


@dataclass
class Wishes:
    """What the user asks of answers."""

    tree: TreeShape | None = None
    """None: the model's own."""
    temperature: float | None = None
    """None: the model's or the server's own."""
    max_tokens: int | None = None
    """None: as many as the context holds."""
    shows_drafts: bool = False


class AnswerSource(Protocol):
    """Answers conversations."""

    def about(self) -> dict[str, str]:
        """What answers, for /stats."""

    def prepare(self, tree: TreeShape | None) -> None:
        """Prepares to answer with this tree, and says so if that takes long. Raises ValueError if it can't be used."""

    def answer(self, messages: Messages, wishes: Wishes) -> Generator[Piece]:
        """The answer in pieces; closing the generator ends it. Raises ValueError or OSError, with one line."""


@dataclass
class Figures:
    """The figures of one answer, or of all answers."""

    answers: int = 0
    """Answers with at least one token."""
    tokens: int = 0
    forwards: int = 0
    forwarded: int = 0
    to_first: float = 0.0
    """Seconds to the first token of each answer."""
    after: float = 0.0
    """Seconds from the first token of each answer to the last."""

    def add(self, other: "Figures") -> None:
        for name, value in vars(other).items():
            setattr(self, name, vars(self)[name] + value)

    def __str__(self) -> str:
        """The known figures. The speed is measured after the first token: the time to it includes reading the prompt.

        Out: 24 tokens, 31.5 tokens/s, 2.35 tokens per forward of the target, first token after 0.21 s
        """
        parts = [f"{self.tokens} token{'s' * (self.tokens != 1)}"]
        if self.after > 0 and self.tokens > self.answers:
            parts.append(f"{(self.tokens - self.answers) / self.after:.1f} tokens/s")
        if self.forwards:
            parts.append(f"{self.forwarded / self.forwards:.2f} tokens per forward of the target")
        if self.answers:
            parts.append(f"first token after {self.to_first / self.answers:.2f} s")
        return ", ".join(parts)


class SlashCommand(NamedTuple):
    """A line that begins with a slash."""

    takes: str
    """What follows its name."""
    help: str
    run: Callable[[str], None]


class ChatLoop:
    """One conversation. `run` returns when the user leaves."""

    def __init__(
        self,
        source: AnswerSource,
        screen: Screen,
        wishes: Wishes,
        system: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.source, self.screen, self.wishes, self.system, self.clock = source, screen, wishes, system, clock
        self.messages: list[dict[str, str]] = []
        """Questions and answers so far."""
        self.total = Figures()
        self.has_left = False
        self.commands = {
            "tree": SlashCommand(
                "[S/K/N]", "draft trees of S steps, K children and N nodes; without numbers the model's own", self._tree
            ),
            "plain": SlashCommand("", "no drafts: the same text by plain decoding; /tree goes back", self._plain),
            "temperature": SlashCommand("[X]", "0: always the likeliest token; without a number the default", self._temperature),
            "system": SlashCommand("[TEXT]", "tell the model how to behave; without a text, nothing", self._system),
            "colour": SlashCommand("", "show which tokens were drafted, or stop showing it", self._colour),
            "stats": SlashCommand("", "figures of all answers, and the settings", self._stats),
            "clear": SlashCommand("", "forget the conversation", self._clear),
            "save": SlashCommand("FILE", "write the conversation as JSON into a new file", self._save),
            "help": SlashCommand("", "show these lines", self._help),
            "quit": SlashCommand("", "leave; so do Ctrl-D, and Ctrl-C twice", self._quit),
        }

    def run(self) -> None:
        """Answers until the user leaves. Ctrl-C ends an answer, or clears a line; twice in a row it leaves."""
        interrupted = False
        while not self.has_left:
            try:
                line = self.screen.read()
                if line is None:
                    return
                interrupted = False
                if line.startswith("/"):
                    self._obey(line)
                elif line.strip():
                    self._answer(line.strip())
            except KeyboardInterrupt:
                self.screen.note("" if interrupted else "\n(Ctrl-C again, or /quit, leaves)")
                self.has_left, interrupted = interrupted, True
            except BrokenPipeError:  # the reader of the output has closed it
                raise
            except (ValueError, OSError) as error:
                self.screen.note(f"error: {error}")

    def _answer(self, question: str) -> None:
        """Asks, and shows the answer. Even a partial answer joins the conversation, unless it failed."""
        asked = [*self.messages, {"role": "user", "content": question}]
        figures, said, finish = Figures(), list[str](), None
        started = latest = self.clock()
        with contextlib.closing(self.source.answer(self._with_system(asked), self.wishes)) as pieces:
            try:
                for piece in pieces:
                    # Noted before it is shown, so that Ctrl-C at any point loses nothing that was shown.
                    said += [text for text, origin in piece.spans if origin != THINKING]
                    self.screen.show(piece.spans)
                    if piece.tokens or piece.spans:
                        latest = self.clock()
                    if piece.spans and not figures.answers:
                        figures.answers, figures.to_first = 1, latest - started
                    figures.tokens += piece.tokens
                    figures.forwards += piece.forwards
                    figures.forwarded += piece.forwarded
                    finish = piece.finish or finish
            except KeyboardInterrupt:
                finish = STOPPED
            finally:
                self.screen.end_of_answer()
        figures.after = latest - started - figures.to_first if figures.answers else 0.0
        self.total.add(figures)
        if text := "".join(said):
            self.messages = [*asked, {"role": "assistant", "content": text}]
        self.screen.note(", ".join([str(figures), *([ENDS[finish]] if finish in ENDS else [])]))

    def _with_system(self, messages: Messages) -> Messages:
        """The messages, the system's first if there is one."""
        return messages if self.system is None else [{"role": "system", "content": self.system}, *messages]

    def _obey(self, line: str) -> None:
        """Runs a command. Raises ValueError for a wrong one."""
        name, _, rest = line[1:].strip().partition(" ")
        command, rest = self.commands.get(name), rest.strip()
        if command is None:
            close = difflib.get_close_matches(name, self.commands, 1)
            hint = f"did you mean /{close[0]}?" if close else "/help lists them"
            raise ValueError(f"there is no command /{name[:40]}: {hint} (a question may begin with a space)")
        if rest and not command.takes:
            raise ValueError(f"/{name} takes nothing, got {rest[:40]!r}")
        command.run(rest)

    def _tree(self, name: str) -> None:
        self._use(TreeShape.of(name) if name else None)

    def _plain(self, _: str) -> None:
        self._use(PLAIN)

    def _use(self, tree: TreeShape | None) -> None:
        self.source.prepare(tree)
        self.wishes.tree = tree
        self.screen.note(f"drafts: {tree_text(tree)}")

    def _temperature(self, text: str) -> None:
        try:
            value = float(text) if text else None
        except ValueError:
            raise ValueError(f"/temperature takes a number, got {text[:40]!r}") from None
        self.wishes.temperature = None if value is None else declaration("temperature").check.clean("/temperature", value)
        self.screen.note(f"temperature: {temperature_text(self.wishes.temperature)}")

    def _system(self, text: str) -> None:
        self.system = text or None
        self.screen.note("from the next question on" if text else "nothing is said about how to behave")

    def _colour(self, _: str) -> None:
        if self.screen.why_no_colours:
            raise ValueError(f"there are no colours: {self.screen.why_no_colours}")
        self.wishes.shows_drafts = not self.wishes.shows_drafts
        self.screen.note(LEGEND if self.wishes.shows_drafts else "no colours")

    def _stats(self, _: str) -> None:
        lines = self.source.about() | {
            "drafts": tree_text(self.wishes.tree),
            "temperature": temperature_text(self.wishes.temperature),
            "conversation": f"{len(self.messages) // 2} questions",
            "all answers": str(self.total),
        }
        self.screen.note(listing(lines))

    def _clear(self, _: str) -> None:
        self.messages = []
        self.screen.note("a new conversation begins")

    def _save(self, file: str) -> None:
        if not file:
            raise ValueError("/save needs the name of a file")
        with open(os.path.expanduser(file), "x", encoding="utf-8") as stream:  # never over another file
            stream.write(json.dumps({"messages": self._with_system(self.messages)}, ensure_ascii=False) + "\n")
        self.screen.note(f"written: {file}")

    def _help(self, _: str) -> None:
        self.screen.note(listing({f"/{name} {each.takes}".rstrip(): each.help for name, each in self.commands.items()}))

    def _quit(self, _: str) -> None:
        self.has_left = True


def tree_text(tree: TreeShape | None) -> str:
    """A tree for the user."""
    return "the model's own" if tree is None else "none, plain decoding" if tree == PLAIN else f"tree {tree.name}"


def temperature_text(temperature: float | None) -> str:
    """A temperature for the user."""
    return "the default" if temperature is None else f"{temperature:g}"
