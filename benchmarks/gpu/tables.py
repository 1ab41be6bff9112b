"""What benchmarks.gpu prints when a part has ended, and what `bench report` shows of its record."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .. import record
from ..record import Spread
from .parts import ORDER

Row = Mapping[str, Any]
Results = Mapping[str, Mapping[str, Any]]
"""By part: "environment", "size", and lists of "rows", "skipped" and "failed"; "seconds" unless it was interrupted."""
ANCHORS = {"plain": 5.26, "3/1/4": 7.1, "7/1/8": 8.6}
"""SGLang on an H200, Llama 3.1 8B with EAGLE-3, batch 1: milliseconds per greedy cycle of each tree."""
DETAILS = (
    "versions", "nvidia_smi", "operations", "bytes", "arithmetic_roofline_ms", "context_grew_by", "trace_seconds", "lower_seconds",
    "first_run_seconds", "custom_calls", "temporary_bytes", "tokens_per_second_at_assumed_accept_length",
    "microseconds_and_launches",
)  # fmt: skip
"""Columns of rows that only the file has; some are of earlier versions."""
LONGEST = 14
"""Kinds of kernels that are shown for each profile."""


def by_part(lines: Iterable[Row]) -> Results:
    """The results of the last run of each part, in the order of parts."""
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        if "begins" in line:
            found[line["part"]] = {**line, "rows": [], "skipped": [], "failed": []}
        elif "seconds" in line:
            found[line["part"]]["seconds"] = line["seconds"]
        elif "row" in line:
            found[line["part"]]["rows"].append({**line["case"], **line["row"]})
        elif "starts" not in line:
            kind = "failed" if "failed" in line else "skipped"
            found[line["part"]][kind].append((" ".join(map(str, line["case"].values())) or "all", line[kind]))
    return {part: found[part] for part in ORDER if part in found}


def show(part: str, found: Mapping[str, Any]) -> str:
    """A part's table, and lines for what was skipped or failed."""
    lines = [f"{part} ({found['seconds']:.0f} s)" if "seconds" in found else f"{part} (interrupted)"]
    if found["rows"]:
        lines.append(table_of(part, found["rows"]))
    lines += [f"{kind}: {line}" for kind in ("skipped", "failed") for line in by_reason(found[kind])]
    return "\n".join(lines) + "\n"


def table_of(part: str, rows: Sequence[Row]) -> str:
    """All figures of the rows, by their names; greedy cycles beside SGLang's, and profiles kernel by kernel."""
    if part == "profile":
        return profiles(rows)
    if part == "cycle":
        rows = [{**row, "SGLang_ms": ANCHORS.get(row["tree"]) if row["sampling"] == "greedy" else None} for row in rows]
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in DETAILS]
    return record.table([name.replace("_", " ") for name in names], [[shown(row.get(name)) for name in names] for row in rows])


def shown(value: Any) -> str:
    """A figure: the median and limits of repeated measurements, three digits of one, and names with their values.

    In:  [1.0, 2.0, 4.0]        Out: "2.00 (1.00..4.00)"
    In:  {"3/1/4": 8}           Out: "3/1/4 8"
    In:  1234567.0 or 0.012345  Out: "1.23e+06" or "0.0123"
    """
    match value:
        case None:
            return "-"
        case [float(), *_]:
            return str(Spread(value))
        case list():
            return ", ".join(map(str, value)) or "none"
        case dict():
            return ", ".join(f"{name} {shown(each)}" for name, each in value.items())
        case float():
            return f"{value:.3g}"
    return str(value)


def profiles(rows: Sequence[Row]) -> str:
    """Milliseconds per cycle of the kinds of kernels that take longest, for each profile."""
    lines = []
    for row in rows:
        kinds = [(kind, *each) for kind, each in row["microseconds_and_launches"].items()]
        rest = [sum(each[column] for each in kinds[LONGEST:]) for column in (1, 2)]
        every = [*kinds[:LONGEST], ("others", *rest), ("all", 1e3 * row["busy_milliseconds"], row["kernels"])]
        lines += [[row["tree"], row["sampling"], kind, f"{count:.0f}", f"{time / 1e3:.3f}"] for kind, time, count in every]
    return record.table(["tree", "sampling", "kernel", "launches", "ms"], lines)


def by_reason(entries: Sequence[tuple[str, str]]) -> list[str]:
    """Cases with the same reason, joined; the file names all of them."""
    joined: dict[str, list[str]] = {}
    for case, reason in entries:
        joined.setdefault(reason, []).append(case)
    return [f"{'; '.join(names[:3])}{f' and {len(names) - 3} more' * (len(names) > 3)}: {why}" for why, names in joined.items()]


def head(environment: Mapping[str, Any], size: str) -> str:
    """Where the figures come from, and whether they say anything about a GPU with a real model."""
    devices = ", ".join(environment.get("devices", ["no device"]))
    lines = [
        f"{environment.get('date')}, {devices}, {'; '.join(environment.get('driver', [])) or 'no NVIDIA driver'}",
        f"jax {environment.get('jax')}, jaxlib {environment.get('jaxlib')}, jaxspec {environment.get('jaxspec')}",
    ]
    what = "NOT A GPU" if environment.get("platform") != "gpu" else "tiny sizes" if size == "tiny" else ""
    return "\n".join([*lines, *([f"{what}: these figures only show that the benchmark works"] if what else [])])
