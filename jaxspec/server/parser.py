"""The command line parser: one line for every mistake, and a help that can be searched."""

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Ends a wrong command line with one line and exit status 2. Knows its options by name.

    `only` leaves out every option that does not contain the word: what a search in the help shows.
    """

    def __init__(self, prog: str, *, usage: str, description: str | None = None, epilog: str | None = None, only: str = ""):
        super().__init__(prog, usage, description, epilog, add_help=False, allow_abbrev=False)
        self.by_name: dict[str, argparse.Action] = {}
        """Every option, by each of its spellings."""
        self._only = only.lower()

    def add_group(self, title: str, description: str | None = None) -> "Group":
        """A section of the help; one without options does not show."""
        return Group(self, self.add_argument_group(title, None if self._only else description))

    def shows(self, text: str) -> bool:
        """Whether the search finds something in an option's text."""
        return self._only in text.lower()

    def parse_all(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """As parse_args; an unknown option is told with the one that was perhaps meant, and without its value."""
        options, rest = self.parse_known_args(argv)
        unknown = next((argument for argument in rest if argument.startswith("-")), None)
        if unknown is not None:
            self.error(f"there is no option {self.with_suggestion(unknown.partition('=')[0])}")
        if rest:
            self.error(f"one model directory at most, got another: {rest[0]!r:.200}")
        return options

    def with_suggestion(self, name: str) -> str:
        """An unknown name, and what was perhaps meant.

        In:  --speculative-num-step
        Out: --speculative-num-step: did you mean --speculative-num-steps?
        """
        close = difflib.get_close_matches(name, self.by_name, 1, 0.75)
        return f"{name[:80]}: did you mean {close[0]}?" if close else name[:80]

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")


class Group:
    """A section of the help."""

    def __init__(self, parser: Parser, group: Any):
        self._parser, self._group = parser, group

    def add(self, *names: str, help: str, **settings: Any) -> None:
        """An option, if the parser's search finds it."""
        if self._parser.shows(" ".join([*names, help])):
            action = self._group.add_argument(*names, help=help, **settings)
            self._parser.by_name.update((name, action) for name in action.option_strings)
