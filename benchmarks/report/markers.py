"""Tables in Markdown files that are made from results, never typed. A marker says which:

    <!-- results: peers contenders -->
    ...                                     replaced by the command, what it ran on, and the table
    <!-- end of results -->

The words are the file in benchmarks/results (without .jsonl), the name of the table, and, if it is not the newest record, `before`
for the one before it. `agreement` is a table of every benchmark: the newest record against the one before with the same command.
"""

import re
from collections.abc import Callable

START = "<!-- results: "
MARKER = re.compile(r"<!-- results: (?P<words>[^>]*?) -->\n(?P<old>.*?)<!-- end of results -->", re.DOTALL)


def replaced(text: str, block: Callable[[list[str]], str]) -> str:
    """The text with every marked place filled; `block` makes the content from the marker's words.

    Raises ValueError for a start without an end.
    """
    places = list(MARKER.finditer(text))
    if len(places) != text.count(START) or any(START in place["old"] for place in places):
        raise ValueError("a marker `<!-- results: ... -->` has no `<!-- end of results -->` behind it")

    def fill(match: re.Match[str]) -> str:
        return f"<!-- results: {match['words']} -->\n{block(match['words'].split())}\n<!-- end of results -->"

    return MARKER.sub(fill, text)
