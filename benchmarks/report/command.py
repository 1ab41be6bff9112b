"""Makes one self-contained page with plots and tables from benchmarks/results, and fills the tables of the README and docs/.

A table between `<!-- results: ... -->` and `<!-- end of results -->` in a Markdown file is replaced by what the results say,
with the command that made it (benchmarks/report/markers.py), so no figure is typed by hand; --check only tells whether all is
up to date.

Examples:
    python -m benchmarks.report
    python -m benchmarks.report --check
    python -m benchmarks.report --results my-results --html report.html --markdown
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.options import RESULTS, show
from benchmarks.report.markers import replaced
from benchmarks.report.results import Results
from jaxspec.commands.options import Parser

ROOT = RESULTS.parents[1]
MARKDOWN = (ROOT / "README.md", ROOT / "docs/performance.md")


def parse(arguments: Sequence[str] | None = None):
    parser = Parser("jaxspec bench report", __doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help=f"of .jsonl files (default: {show(RESULTS)})")
    parser.add_argument("--html", type=Path, metavar="FILE", help="the page (default: report.html in --results)")
    parser.add_argument("--markdown", type=Path, nargs="*", default=list(MARKDOWN), metavar="FILE", help="(default: README, docs)")
    parser.add_argument(
        "--pictures",
        type=Path,
        metavar="DIR",
        help="also write every plot there (default: docs/images, of the results of this repository)",
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a Markdown file is not up to date")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if --check finds a file that is not up to date."""
    options = parse(arguments)
    from benchmarks.report.page import page, write_pictures  # says what to install

    results = Results(options.results)
    if not results.files:
        raise ValueError(f"{options.results} holds no results: run a benchmark first (`jaxspec bench` lists them)")
    stale = []
    for path in options.markdown:
        text = path.read_text()
        if (new := replaced(text, results.block)) != text:
            stale.append(path)
            if not options.check:
                path.write_text(new)
                print(f"tables renewed: {show(path)}")
    if options.check:
        for path in stale:
            print(f"{show(path)} is not up to date: run python -m benchmarks.report", file=sys.stderr)
        return 1 if stale else 0
    html = options.html or options.results / "report.html"
    html.write_text(page(results))
    print(f"page: {show(html)}")
    pictures = options.pictures or (ROOT / "docs/images" if options.results == RESULTS else None)
    if pictures:
        write_pictures(results, pictures)
    return 0
