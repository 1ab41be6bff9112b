"""Prints the tables of all results, and fills those of the README and docs/.

In a Markdown file, the lines between two markers are replaced by the command, the machine and the table:

    <!-- results: peers best -->
    <!-- end of results -->

The words are the result file (without .jsonl), whose newest record it is, and the table. --check changes nothing and only tells
whether the files are up to date.

Examples:
    jaxspec bench report
    jaxspec bench report --check
    jaxspec bench report --results my-results --markdown
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

from jaxspec.commands.bench import BENCHMARKS
from jaxspec.commands.options import Parser

from .gpu.parts import RECORD as GPU_RECORD
from .gpu.tables import by_part
from .gpu.tables import show as show_part
from .options import IN_CLONE, RESULTS, exit_on_error, show
from .record import measured_on, read, table

ROOT = Path(__file__).parents[1]
MARKDOWN = (ROOT / "README.md", ROOT / "docs/performance.md") if IN_CLONE else ()


class Results:
    """The newest record of each file that holds any, by its name without suffix; of `bench gpu`, in another format, by part."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.files: dict[str, dict] = {}
        for path in sorted({*directory.glob("*.jsonl")} - {directory / GPU_RECORD}):
            try:
                if records := read(path):
                    self.files[path.stem] = records[-1]
            except ValueError as error:
                print(f"left out: {error}", file=sys.stderr)
        gpu = directory / GPU_RECORD
        self.gpu = by_part(map(json.loads, gpu.read_text().splitlines())) if gpu.exists() else {}

    def block(self, words: list[str]) -> str:
        """The text for a marker with these words (described above). Raises ValueError if there is no such record or table."""
        if len(words) != 2:
            raise ValueError(f"a marker names a file and a table; got {' '.join(words)!r}")
        name, title = words[0], words[1].replace("_", " ")
        if name not in self.files:
            raise ValueError(f"{self.directory.name} has no record of {name}: run that benchmark")
        record = self.files[name]
        made = tables_of(record)
        if title not in made:
            raise ValueError(f"{name} has no table {title!r}; its tables: {', '.join(made)}")
        return f"`{brief(record['command'])}` ({measured_on(record)})\n\n{made[title]}"


def brief(command: str) -> str:
    """A command without the Pythons of other engines, which differ from machine to machine.

    In: "python -m benchmarks.peers --tree 3/1/4 --peer-python vllm=python"  Out: "python -m benchmarks.peers --tree 3/1/4"
    """
    return re.sub(r" --(torch|peer)-python[ =]\S+", "", command)


def tables_of(record: dict) -> dict[str, str]:
    """A record's tables in Markdown by name, made by its benchmark; of one that is gone, a table of its rows, or JSON."""
    if record["benchmark"] in BENCHMARKS:
        return import_module(f".{record['benchmark']}", __package__).tables(record["results"])
    if not isinstance(record["results"], list):
        return {"results": json.dumps(record["results"], indent=1)}
    rows = [{name: str(value) for name, value in row.items() if not isinstance(value, dict | list)} for row in record["results"]]
    return {"results": table(list(rows[0]), [list(row.values()) for row in rows])}


# Markers

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


# The command


def printed(results: Results) -> Iterator[str]:
    """The tables of the newest record of every file, then those of the GPU's parts."""
    for name, record in results.files.items():
        yield "\n\n".join([f"{name}: {record['command']} ({measured_on(record)})", *tables_of(record).values()])
    yield from (f"gpu, {show_part(part, found)}" for part, found in results.gpu.items())


def parse(arguments: Sequence[str] | None = None):
    parser, which = Parser("jaxspec bench report", __doc__), "files to fill (default: README and docs of this repository)"
    add = parser.add_argument
    add("--results", type=Path, default=RESULTS, metavar="DIR", help=f"a folder of .jsonl files (default: {show(RESULTS)})")
    add("--markdown", type=Path, nargs="*", default=list(MARKDOWN), metavar="FILE", help=which)
    add("--check", action="store_true", help="write nothing; exit with 1 if a Markdown file is out of date")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if --check finds a file that is out of date."""
    options = parse(arguments)
    results = Results(options.results)
    if not results.files:
        raise ValueError(f"no results in {options.results.resolve().name}/: run a benchmark first (`jaxspec bench` lists them)")
    stale = []
    for path in options.markdown:
        text = path.read_text()
        if (new := replaced(text, results.block)) != text:
            stale.append(path)
            if not options.check:
                path.write_text(new)
                print(f"updated: {show(path)}")
    if options.check:
        for path in stale:
            print(f"{show(path)} is out of date: run python -m benchmarks.report", file=sys.stderr)
        return 1 if stale else 0
    print("\n\n".join(printed(results)))
    return 0


if __name__ == "__main__":
    exit_on_error("report", main)
