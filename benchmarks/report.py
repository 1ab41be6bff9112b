"""Makes one self-contained page with plots and tables from results, and fills the tables of the README and docs/.

In a Markdown file, the lines between two markers are replaced by the command, the machine and the table:

    <!-- results: throughput speed -->
    <!-- end of results -->

The words are the result file (without .jsonl), whose newest record it is, and the table. --check changes nothing and only tells
whether the files are up to date. The page shows all tables, and how far two runs of one command agree.

Examples:
    jaxspec bench report
    jaxspec bench report --check
    jaxspec bench report --results my-results --html report.html --markdown
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec.commands.options import Parser

from .gpu.parts import RECORD as GPU_RECORD
from .options import IN_CLONE, RESULTS, exit_on_error, show
from .record import measured_on, read, table

ROOT = Path(__file__).parents[1]
MARKDOWN = (ROOT / "README.md", ROOT / "docs/performance.md") if IN_CLONE else ()


class Results:
    """All records of a directory by file name without suffix, oldest first; without `bench gpu`'s, which has another format."""

    def __init__(self, directory: Path):
        self.directory = directory
        files = (path for path in sorted(directory.glob("*.jsonl")) if path.name != GPU_RECORD)
        self.files = {path.stem: records for path in files if (records := read(path))}

    def newest(self, name: str) -> dict:
        """The newest record of a file. Raises ValueError if there is none."""
        if name not in self.files:
            raise ValueError(f"{self.directory.name} has no record of {name}: run that benchmark")
        return self.files[name][-1]

    def block(self, words: list[str]) -> str:
        """The text for a marker with these words (described above). Raises ValueError if there is no such record or table."""
        if len(words) != 2:
            raise ValueError(f"a marker names a file and a table; got {' '.join(words)!r}")
        name, title = words[0], words[1].replace("_", " ")
        record = self.newest(name)
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
    """A record's tables in Markdown by name, made by its benchmark."""
    return import_module(f".{record['benchmark']}", __package__).tables(record["results"])


def about(record: dict) -> str:
    """The first paragraph of a benchmark's docstring."""
    module = import_module(f".{record['benchmark']}", __package__)
    return " ".join((module.__doc__ or "").split("\n\n")[0].split())


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


# Do two runs agree? Only ratios taken within a run are compared: absolute times vary with the load of the machine.

RATIOS = ("speed_up", "decode_speed_up", "ratio_to_baseline")
"""Keys of results whose value is a Spread of ratios taken within a run."""


class Agreement(NamedTuple):
    """One ratio, measured twice."""

    what: str
    first: float
    second: float

    @property
    def difference(self) -> float:
        """Relative difference of the second run."""
        return self.second / self.first - 1


def agreements(records: Sequence[dict]) -> list[Agreement]:
    """The ratios of the newest record and of the last one before it with the same command; empty if there is none."""
    if not records:
        return []
    before = next((each for each in reversed(records[:-1]) if conditions(each) == conditions(records[-1])), None)
    if before is None:
        return []
    first, second = (dict(ratios(each["results"])) for each in (before, records[-1]))
    return [Agreement(what, first[what], second[what]) for what in second if what in first]


def conditions(record: dict) -> tuple:
    """Properties that must be the same in both runs."""
    where = record["environment"]
    prompts = record.get("prompts", {}).get("sha256")
    return record["command"], prompts, where["cpu"], where["cores"], where["jax"], where["devices"]


def ratios(results: Any, where: str = "") -> Iterator[tuple[str, float]]:
    """Every ratio in some results, with a name.

    In:  {"batches": [{"batch": 4, "speed_up": {"median": 1.3, ...}}]}
    Out: ("batch 4 speed_up", 1.3)
    """
    if isinstance(results, list):
        for each in results:
            yield from ratios(each, where)
    elif isinstance(results, dict):
        own = " ".join(f"{key} {results[key]}" for key in ("batch", "tree", "name") if isinstance(results.get(key), str | int))
        inner = f"{where} {own}".strip()
        for key, value in results.items():
            if key in RATIOS and isinstance(value, dict) and "median" in value:
                yield f"{inner} {key}".strip(), value["median"]
            else:
                yield from ratios(value, inner)


def agreement_table(found: Sequence[Agreement]) -> str:
    """Every ratio of both runs, and the difference."""
    rows = [[each.what, f"{each.first:.2f}", f"{each.second:.2f}", f"{each.difference:+.1%}"] for each in found]
    return table(["ratio", "first run", "second run", "difference"], rows)


def widest(found: Sequence[Agreement]) -> float:
    """The largest absolute difference; 0.0 if there are none."""
    return max((abs(each.difference) for each in found), default=0.0)


# The page

CSS = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 14px; display: block; overflow-x: auto; }
td { font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
code, pre { background: #f4f4f4; padding: .1rem .3rem; border-radius: 3px; }
pre { padding: .6rem; overflow-x: auto; }
svg { max-width: 100%; height: auto; }
.note { color: #666; }
"""


def page(results: Results) -> str:
    """HTML of the newest record of every file, and its agreement with the run before."""
    parts = [section(name, records) for name, records in results.files.items()]
    links = " · ".join(f'<a href="#{escape(name)}">{escape(name)}</a>' for name in results.files)
    head = '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>jaxspec benchmarks</title>'
    return f"{head}<style>{CSS}</style></head>\n<body><h1>jaxspec benchmarks</h1>\n<p>{links}</p>\n{''.join(parts)}</body></html>\n"


def section(name: str, records: list[dict]) -> str:
    """One benchmark."""
    from .plots import figures, svg_text

    record = records[-1]
    prompts = record.get("prompts")
    about_prompts = f"; {prompts['count']} prompts ({prompts['source']}, sha256 {prompts['sha256'][:12]})" if prompts else ""
    lines = [
        f'<h2 id="{escape(name)}">{escape(name)}</h2>',
        f"<p>{escape(about(record))}</p>",
        f"<pre>{escape(record['command'])}</pre>",
        f'<p class="note">{escape(measured_on(record) + about_prompts)}</p>',
        *(svg_text(figure) for figure in figures(record).values()),
        *(html_table(markdown) for markdown in tables_of(record).values()),
    ]
    if found := agreements(records):
        lines.append(f"<p>Two runs: their ratios differ by at most {widest(found):.1%}.</p>{html_table(agreement_table(found))}")
    return "\n".join(lines) + "\n"


def html_table(markdown: str) -> str:
    """A table of jaxspec.commands.table as HTML.

    In:  | a | b |      Out: <table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr></table>
         |---|--:|
         | 1 | 2 |
    """
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()]
    lines = [html_row(header, "th"), *(html_row(row, "td") for row in rows)]
    return f"<table>{''.join(lines)}</table>"


def html_row(cells: list[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{bold(escape(cell))}</{tag}>' for cell in cells)}</tr>"


def bold(cell: str) -> str:
    """**x** as <b>x</b>."""
    return f"<b>{cell[2:-2]}</b>" if cell.startswith("**") and cell.endswith("**") and len(cell) > 4 else cell


def write_pictures(results: Results, directory: Path, *, only_existing: bool) -> None:
    """Writes the plots of every newest record as SVG files; `only_existing`: those that replace a file."""
    from .plots import figures, save_figure

    for name, records in results.files.items():
        for title, figure in figures(records[-1]).items():
            path = directory / f"{name}_{title}.svg"
            if path.exists() or not only_existing:
                save_figure(figure, path)
                print(f"picture: {show(path)}")


# The command


def parse(arguments: Sequence[str] | None = None):
    parser = Parser("jaxspec bench report", __doc__)
    parser.add_argument(
        "--results", type=Path, default=RESULTS, metavar="DIR", help=f"a folder of .jsonl files (default: {show(RESULTS)})"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="the page (default: report.html in --results)")
    parser.add_argument(
        "--markdown",
        type=Path,
        nargs="*",
        default=list(MARKDOWN),
        metavar="FILE",
        help="files to fill (default: README and docs of this repository)",
    )
    parser.add_argument(
        "--pictures",
        type=Path,
        metavar="DIR",
        help="write every plot to this folder (default: replace those in docs/images, for the results of this repository)",
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a Markdown file is out of date")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if --check finds a file that is out of date."""
    options = parse(arguments)
    from . import plots as plots  # the error says what to install

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
    html = options.html or options.results / "report.html"
    html.write_text(page(results))
    print(f"page: {show(html)}")
    if options.pictures:
        write_pictures(results, options.pictures, only_existing=False)
    elif IN_CLONE and options.results == RESULTS:
        write_pictures(results, ROOT / "docs/images", only_existing=True)
    return 0


if __name__ == "__main__":
    exit_on_error("report", main)
