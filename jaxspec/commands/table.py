"""Tables for people."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(aligned)} |"

    rule = f"|{'|'.join('-' * (width + 1) + (':' if column else '-') for column, width in enumerate(widths))}|"
    return "\n".join([line(header), rule, *map(line, rows)])


def listing(lines: dict[str, str]) -> str:
    """Names and what they stand for, in two columns."""
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in lines.items())
