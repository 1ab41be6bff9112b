"""One page of HTML with everything in it: no scripts, no fonts, no files beside it."""

from html import escape
from pathlib import Path

from benchmarks.options import show
from benchmarks.plots import save_figure, svg_text
from benchmarks.record import measured_on
from benchmarks.report.agreement import agreement_table, agreements, widest
from benchmarks.report.figures import figures
from benchmarks.report.results import Results, about, tables_of

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
    """The newest record of every file, with how it agrees with the one before."""
    parts = [section(name, records) for name, records in results.files.items()]
    links = " · ".join(f'<a href="#{escape(name)}">{escape(name)}</a>' for name in results.files)
    head = '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>jaxspec benchmarks</title>'
    return f"{head}<style>{CSS}</style></head>\n<body><h1>jaxspec benchmarks</h1>\n<p>{links}</p>\n{''.join(parts)}</body></html>\n"


def section(name: str, records: list[dict]) -> str:
    """One benchmark."""
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
        lines.append(
            f"<p>Run twice: the ratios of both runs differ by {widest(found):.1%} at most.</p>{html_table(agreement_table(found))}"
        )
    return "\n".join(lines) + "\n"


def html_table(markdown: str) -> str:
    """A table of jaxspec.commands.common as HTML.

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


def write_pictures(results: Results, directory: Path) -> None:
    """Every figure of every newest record as an SVG file named after both."""
    for name, records in results.files.items():
        for title, figure in figures(records[-1]).items():
            path = directory / f"{name}_{title}.svg"
            save_figure(figure, path)
            print(f"picture: {show(path)}")
