"""What benchmarks.gpu prints: a table per part when it has ended, and a summary of about 40 lines at the end."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from .. import record
from ..record import Spread
from .parts import ANCHORS, AT_ONCE, FLAGS, ORDER

Row = Mapping[str, Any]
Results = Mapping[str, Mapping[str, Any]]
"""By part: "environment", "size", and lists of "rows", "skipped" and "failed"; "seconds" unless it was interrupted."""
UNKNOWN = "-"
DETAILS = (
    "versions", "nvidia_smi", "operations", "bytes", "arithmetic_roofline_ms", "context_grew_by", "trace_seconds", "lower_seconds",
    "first_run_seconds", "custom_calls", "temporary_bytes", "tokens_per_second_at_assumed_accept_length", "at_once",
)  # fmt: skip
"""Columns of rows that only the file has."""


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
        else:
            kind = "failed" if "failed" in line else "skipped"
            found[line["part"]][kind].append((" ".join(map(str, line["case"].values())) or "all", line[kind]))
    return {part: found[part] for part in ORDER if part in found}


def show(part: str, found: Mapping[str, Any]) -> str:
    """A part's table, and lines for what was skipped or failed."""
    lines = [f"{part} ({found['seconds']:.0f} s)" if "seconds" in found else f"{part} (interrupted)"]
    if found["rows"]:
        shape = {"gemm": products, "profile": profiles}.get(part, columns_of)
        lines.append(shape(found["rows"]))
    lines += [f"{kind}: {line}" for kind in ("skipped", "failed") for line in by_reason(found[kind])]
    return "\n".join(lines) + "\n"


def columns_of(rows: Sequence[Row], without: Sequence[str] = DETAILS) -> str:
    """All figures of the rows, by their names."""
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in without]
    return record.table([name.replace("_", " ") for name in names], [[shown(row.get(name)) for name in names] for row in rows])


def shown(value: Any) -> str:
    """A figure: the median and limits of repeated measurements, three digits of one, and names with their values.

    In:  [1.0, 2.0, 4.0]        Out: "2.00 (1.00..4.00)"
    In:  {"3/1/4": 8}           Out: "3/1/4 8"
    In:  1234567.0 or 0.012345  Out: "1.23e+06" or "0.0123"
    """
    match value:
        case None:
            return UNKNOWN
        case [float(), *_]:
            return str(Spread(value))
        case list():
            return ", ".join(map(str, value)) or "none"
        case dict():
            return ", ".join(f"{name} {shown(each)}" for name, each in value.items())
        case float():
            return f"{value:.3g}"
    return str(value)


def products(rows: Sequence[Row]) -> str:
    """One line per matrix and number of rows: microseconds of each way, and the share of the copy's speed."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    found: dict[tuple[str, int], dict[str, str]] = {}
    for row in rows:
        share = f" ({row['share']:.2f})" if "share" in row else ""
        found.setdefault((row["matrix"], row["rows"]), {})[row["way"]] = f"{median(row['microseconds']):.1f}{share}"
    lines = [[matrix, str(count), *(times.get(way, UNKNOWN) for way in ways)] for (matrix, count), times in found.items()]
    return record.table(["matrix", "rows", *(f"{way}, us (share)" for way in ways)], lines)


LONGEST = 14
"""Kinds of kernels that are shown for each profile."""


def profiles(rows: Sequence[Row]) -> str:
    """Milliseconds per cycle of the kinds of kernels that take longest, for each profile."""
    lines = []
    for row in rows:
        kinds = [(kind, *each) for kind, each in row["microseconds_and_launches"].items()]
        rest = [sum(each[column] for each in kinds[LONGEST:]) for column in (1, 2)]
        shown_kinds = [*kinds[:LONGEST], ("others", *rest), ("all", 1e3 * row["busy_milliseconds"], row["kernels"])]
        lines += [
            [row["tree"], row["sampling"], kind, f"{count:.0f}", f"{microseconds / 1e3:.3f}"]
            for kind, microseconds, count in shown_kinds
        ]
    return record.table(["tree", "sampling", "kernel", "launches", "ms"], lines)


def by_reason(entries: Sequence[tuple[str, str]]) -> list[str]:
    """Cases with the same reason, joined; the file names all of them."""
    joined: dict[str, list[str]] = {}
    for case, reason in entries:
        joined.setdefault(reason, []).append(case)
    return [
        f"{'; '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}: {reason}"
        for reason, names in joined.items()
    ]


def head(environment: Mapping[str, Any], size: str) -> str:
    """Where the figures come from, and whether they say anything about a GPU with a real model."""
    devices = ", ".join(environment.get("devices", ["no device"]))
    lines = [
        f"{environment.get('date')}, {devices}, {'; '.join(environment.get('driver', [])) or 'no NVIDIA driver'}",
        f"jax {environment.get('jax')}, jaxlib {environment.get('jaxlib')}, jaxspec {environment.get('jaxspec')}",
    ]
    what = "NOT A GPU" if environment.get("platform") != "gpu" else "tiny sizes" if size == "tiny" else ""
    return "\n".join([*lines, *([f"{what}: these figures only show that the benchmark works"] if what else [])])


# The summary


def middle(rows: Iterable[Row], unit: str = "milliseconds", **wanted: Any) -> str:
    """The median of the first row with these values."""
    for row in rows:
        if all(row.get(name) == value for name, value in wanted.items()) and unit in row:
            return f"{median(row[unit]):.2f}"
    return UNKNOWN


def summary(results: Results, environment: Mapping[str, Any], size: str) -> str:
    """The answers in about 40 lines, with what the time model says and SGLang needs for the same."""
    rows = {part: results[part]["rows"] if part in results else [] for part in ORDER}
    failed = [f"failed: {part}: {line[:160]}" for part in results for line in by_reason(results[part]["failed"])]
    matrices = [row for row in (*rows["gemm"], *rows["peer"]) if row.get("rows") in (1, 8)]
    peers = [row for row in rows["peer"] if "name" in row]
    greedy = [row for row in rows["cycle"] if row["sampling"] == "greedy"]
    blocks = [
        head(environment, size),
        states(results),
        *(f"copy: {row['bytes_per_second'] / 1e9:.0f} GB/s" for row in rows["copy"]),
        products(matrices) if matrices else "",
        cycles(rows["cycle"]),
        programs(greedy),
        variants("flags", [{"flags": "as it is", **row} for row in greedy], rows["flags"], FLAGS),
        columns_of(rows["text"]) if rows["text"] else "",
        host(rows["engine"]),
        *fastest(rows["tiles"]),
        *(f"{row['name']}: {middle([row])} ms; our plain cycle: {middle(greedy, tree='plain')}" for row in peers),
        *(under_load(row) for row in rows["server"]),
        *failed[:6],
    ]
    return "\n".join(filter(None, blocks))


def states(results: Results) -> str:
    """Which parts have figures."""
    state: dict[str, list[str]] = {}
    for part in ORDER:
        found, kind = results.get(part), "complete"
        if found is None:
            kind = "not run"
        elif not found["rows"]:
            kind = "nothing"
        elif found["skipped"] or found["failed"] or "seconds" not in found:
            kind = "with gaps"
        state.setdefault(kind, []).append(part)
    return "; ".join(f"{kind}: {' '.join(parts)}" for kind, parts in state.items())


def cycles(rows: Sequence[Row]) -> str:
    """Each tree's cycles with every kind of sampling, measured and modelled, beside SGLang's greedy ones."""
    if not rows:
        return ""
    kinds = list(dict.fromkeys(row["sampling"] for row in rows))
    lines = []
    for tree in dict.fromkeys(row["tree"] for row in rows):
        measured = {row["sampling"]: row for row in rows if row["tree"] == tree}
        models = [shown(measured.get(kind, {}).get("model_milliseconds")) for kind in kinds]
        share = shown(measured.get("greedy", {}).get("share_of_byte_roofline"))
        anchor = f"{ANCHORS[tree]:.2f}" if tree in ANCHORS else UNKNOWN
        lines.append([tree, *(middle(rows, tree=tree, sampling=kind) for kind in kinds), " / ".join(models), anchor, share])
    names = [f"{kind}, ms" for kind in kinds]
    return record.table(["tree", *names, "model, ms", "SGLang on an H200, greedy, ms", "share of copy, greedy"], lines)


def programs(rows: Sequence[Row]) -> str:
    """What the compiler made of each cycle."""
    lines = []
    for row in rows:
        outside = row.get("outside_the_graph")
        graph = UNKNOWN if outside is None else "yes" if not outside else f"no: {', '.join(outside)}"
        traced = f"{row['trace_seconds'] + row['lower_seconds']:.1f}"
        seconds = [traced, f"{row['compile_seconds']:.1f}", shown(row.get("first_run_seconds"))]
        lines.append([row["tree"], shown(row.get("launches")), graph, *seconds])
    names = ["tree", "launches, greedy", "one graph", "trace + lower, s", "compile, s", "first run, s"]
    return record.table(names, lines) if lines else ""


def variants(column: str, before: Sequence[Row], rows: Sequence[Row], names: Iterable[str]) -> str:
    """Milliseconds per cycle of each variant, by tree; `before`: as it is."""
    if not rows:
        return ""
    trees, every = list(dict.fromkeys(row["tree"] for row in rows)), (*before, *rows)
    measured = [name for name in ("as it is", *names) if any(row[column] == name for row in every)]
    lines = [[name, *(middle(every, tree=tree, **{column: name}) for tree in trees)] for name in measured]
    return record.table([column, *(f"{tree}, ms" for tree in trees)], lines)


def host(rows: Sequence[Row]) -> str:
    """The engine's steps beside the device's time."""
    lines = [
        [row["tree"], str(row["requests"]), shown(row["device_milliseconds"]), middle([row]), middle([row], "serial_milliseconds")]
        for row in rows
    ]
    return record.table(["tree", "requests", "device, ms", "step with overlap, ms", "without, ms"], lines) if lines else ""


def under_load(row: Row) -> str:
    """The server's figures by the number of requests at once."""
    measured = {requests: row["at_once"][requests]["summary"] for requests in AT_ONCE}
    figures = [
        f"{requests} at once: {each['requests_per_second']:.1f} requests/s, {each['output_tokens_per_second']:.0f} tokens/s, "
        f"{each['failed']} failed"
        for requests, each in measured.items()
    ]
    return f"server: {'; '.join(figures)}"


def fastest(rows: Sequence[Row]) -> list[str]:
    """The best tiles for each shape."""
    lines = []
    for shape in dict.fromkeys((row["rows"], row["context"]) for row in rows):
        same = [row for row in rows if (row["rows"], row["context"]) == shape]
        best = min(same, key=lambda row: median(row["microseconds"]))
        own = middle(same, "microseconds", changed="as it is")
        found = f"{median(best['microseconds']):.2f} us with {best['changed']}, as it is {own}"
        lines.append(f"tiles, {shape[0]} rows, context {shape[1]}: {found}")
    return lines
