"""The terminal of `jaxspec chat`: lines in, answers and notes out. Loads no JAX."""

import io
import os
import sys
from collections.abc import Iterable

from jaxspec.commands.generate import COLOURS, CONTROL, RESET

THINKING = "thinking"
"""The origin of a text that is not part of the answer."""
DIM = "\033[2m"
PROMPT = "> "


class Screen:
    """Standard input, output and error. Answers go to the output, all else to the error, so that a pipe gets answers alone."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        no_color = bool(os.environ.get("NO_COLOR"))  # https://no-color.org
        self.why_no_colours = "NO_COLOR is set" if no_color else "" if sys.stdout.isatty() else "the output is not a terminal"
        self._dims = sys.stderr.isatty() and not no_color
        if self.is_terminal:
            import readline  # noqa: F401  # edits the lines of `input`, and remembers them
        elif isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # or a line that can't be decoded would take others with it

    def read(self) -> str | None:
        """The next line; None at the end of the input. Raises KeyboardInterrupt for Ctrl-C."""
        if not self.is_terminal:
            return sys.stdin.readline() or None
        try:
            return input(PROMPT)
        except EOFError:
            print()
            return None

    def show(self, spans: Iterable[tuple[str, str]]) -> None:
        """A part of an answer: texts, each with its origin. Colours are those of `jaxspec generate`."""
        for text, origin in spans:
            colour = "" if self.why_no_colours else DIM if origin == THINKING else COLOURS.get(origin, "")
            text = text.translate(CONTROL)
            sys.stdout.write(f"{colour}{text}{RESET}" if colour and text else text)
        sys.stdout.flush()

    def end_of_answer(self) -> None:
        """After the last part."""
        print(flush=True)

    def note(self, text: str) -> None:
        """A line that is not part of an answer."""
        print(f"{DIM}{text}{RESET}" if self._dims and text else text, file=sys.stderr, flush=True)
