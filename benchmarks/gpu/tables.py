"""The tables of benchmarks.gpu: one per part when it has finished, and a summary of about 40 lines at the end."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from .. import record
from ..record import Spread
from .parts import ANCHORS, AT_ONCE, FLAGS, ORDER

Row = Mapping[str, Any]
Column = Callable[[Row], str]
Results = Mapping[str, Mapping[str, Any]]
UNKNOWN = "-"


def spread(name: str) -> Column:
    return lambda row: str(Spread(row[name])) if name in row else UNKNOWN


def text(name: str) -> Column:
    return lambda row: str(row.get(name, UNKNOWN))


def number(name: str, digits: int, divided_by: float = 1.0) -> Column:
    return lambda row: UNKNOWN if row.get(name) is None else f"{row[name] / divided_by:.{digits}f}"


def under_load(show: Column, requests: str) -> Column:
    return lambda row: show(row["at_once"][requests]["summary"])


def assumed_speeds(row: Row) -> str:
    return ", ".join(f"{speed:.0f} at {length}" for length, speed in row["tokens_per_second_at_assumed_accept_length"].items())


def is_one_graph(row: Row) -> str:
    outside = row.get("outside_the_graph")
    return UNKNOWN if outside is None else "yes" if not outside else f"no: {', '.join(outside)}"


def probed(row: Row) -> str:
    if "versions" in row:
        return f"missing: {' '.join(row['missing']) or 'nothing'}"
    return f"error {row['error']:.2g} of {row['bound']:.2g}" if "error" in row else f"{spread('milliseconds')(row)} ms"


def counts(name: str) -> Column:
    return lambda row: ", ".join(f"{tree} {count}/{row['prompts']}" for tree, count in row[name].items())


CYCLE: dict[str, Column] = {
    "tree": text("tree"),
    "batch": text("batch"),
    "context": text("context"),
    "cycle, ms (min..max)": spread("milliseconds"),
    "GB moved at least": number("bytes", 2, 1e9),
    "byte roofline, ms": number("byte_roofline_ms", 2),
    "share": number("share_of_byte_roofline", 2),
    "arithmetic roofline, ms": number("arithmetic_roofline_ms", 2),
    "tokens/s at ASSUMED accept length": assumed_speeds,
}
COMPILED: dict[str, Column] = {
    "trace, s": number("trace_seconds", 1),
    "lower, s": number("lower_seconds", 1),
    "compile and autotune, s": number("compile_seconds", 1),
    "from the cache": text("found_in_cache"),
    "fusions autotuned": text("autotuned"),
}
COLUMNS: dict[str, dict[str, Column]] = {
    "probe": {
        "what": text("what"),
        "compile, s": number("compile_seconds", 1),
        "first run, s": number("first_run_seconds", 2),
        "result": probed,
    },
    "copy": {
        "copied, GB": number("copied_bytes", 2, 1e9),
        "read and written, GB/s": number("bytes_per_second", 1, 1e9),
        "matrix product, TFLOP/s": number("operations_per_second", 2, 1e12),
    },
    "cycle": CYCLE
    | COMPILED
    | {"launches": text("launches"), "per layer": number("launches_per_layer", 1), "one graph": is_one_graph},
    "flags": {"flags": text("flags"), "tree": text("tree"), "cycle, ms (min..max)": spread("milliseconds"), **COMPILED},
    "text": {
        "attention": text("attention"),
        "dtype": text("dtype"),
        "same as the CPU's": counts("same_as_stored"),
        "same as plain here": counts("same_as_plain"),
    },
    "engine": {
        "measured": text("measured"),
        "tree": text("tree"),
        "requests": text("requests"),
        "step with overlap, ms (min..max)": spread("milliseconds"),
        "without": spread("serial_milliseconds"),
        "device, ms": number("device_milliseconds", 2),
        "launch, ms": number("launch_milliseconds", 2),
        "uploads per step": number("uploaded_arrays_per_step", 2),
        "nodes updated per cycle": number("updated_nodes_per_cycle", 1),
    },
    "check": {
        "kernel": text("kernel"),
        "implementation": text("implementation"),
        "shape": text("shape"),
        "largest error": lambda row: f"{row['error']:.2g}",
        "allowed": lambda row: f"{row['bound']:.2g}",
    },
    "attention": {"attention": text("attention"), **CYCLE},
    "tiles": {
        "rows": text("rows"),
        "context": text("context"),
        "changed": text("changed"),
        "call, us (min..max)": spread("microseconds"),
        "share": number("share", 2),
    },
    "peer": {"": text("name"), "step, ms (min..max)": spread("milliseconds"), "context": text("context")},
    "server": {
        f"{name}, {requests} at once": under_load(show, requests)
        for requests in AT_ONCE
        for name, show in {
            "requests/s": number("requests_per_second", 1),
            "tokens/s": number("output_tokens_per_second", 0),
            "failed": text("failed"),
        }.items()
    },
    "compile": {"program": text("program"), "": text("way"), **COMPILED},
    "kernels": {
        "implementation": text("implementation"),
        "batch": text("batch"),
        "context": text("context"),
        "rows": text("rows"),
        "call, us (min..max)": spread("microseconds"),
        "MB read": number("bytes", 2, 1e6),
        "roofline, us": number("roofline_microseconds", 2),
        "share": number("share", 2),
    },
    "prefill": {
        "chunk": text("chunk"),
        "context": text("context"),
        "ms (min..max)": spread("milliseconds"),
        "tokens/s": number("tokens_per_second", 0),
        "share of the arithmetic peak": number("share_of_arithmetic_peak", 2),
    },
    "grid": CYCLE,
}
"""Header and content of the columns of each part; those of `gemm` are in `products`."""


def show(part: str, found: Mapping[str, Any]) -> str:
    """A part's table, and lines for what was skipped or failed."""
    lines = [f"{part} ({found['seconds']:.0f} s)" if "seconds" in found else f"{part} (interrupted)"]
    if found["rows"]:
        lines.append(products(found["rows"]) if part == "gemm" else columns_of(found["rows"], COLUMNS[part]))
    for kind, key in (("skipped", "reason"), ("failed", "error")):
        lines += [f"{kind}: {name}: {reason}" for name, reason in by_reason(found[kind], key).items()]
    return "\n".join(lines) + "\n"


def columns_of(rows: Iterable[Row], columns: Mapping[str, Column]) -> str:
    return record.table(list(columns), [[column(row) for column in columns.values()] for row in rows])


def products(rows: Sequence[Row], only: Sequence[int] | None = None) -> str:
    """One line per matrix and number of rows: microseconds of each way, and the share of the copy's speed.

    `only`: these numbers of rows.
    """
    ways = list(dict.fromkeys(row["way"] for row in rows))
    found: dict[tuple[str, int], dict[str, str]] = {}
    for row in rows:
        if only is None or row["rows"] in only:
            share = f" ({row['share']:.2f})" if "share" in row else ""
            found.setdefault((row["matrix"], row["rows"]), {})[row["way"]] = f"{median(row['microseconds']):.1f}{share}"
    lines = [[matrix, str(count), *(times.get(way, UNKNOWN) for way in ways)] for (matrix, count), times in found.items()]
    return record.table(["matrix", "rows", *(f"{way}, us (share)" for way in ways)], lines)


def by_reason(entries: Sequence[Mapping[str, Any]], key: str) -> dict[str, str]:
    """Cases with the same reason, joined; the JSON names all of them."""
    joined: dict[str, list[str]] = {}
    for entry in entries:
        joined.setdefault(entry[key], []).append(" ".join(map(str, entry["case"].values())) or "all")
    return {"; ".join(names[:3]) + more(len(names) - 3): reason for reason, names in joined.items()}


def more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""


def head(environment: Mapping[str, Any], size: str) -> str:
    """Where the figures come from."""
    devices = ", ".join(environment.get("devices", ["no device"]))
    lines = [
        f"{environment.get('date')}, {devices}, {'; '.join(environment.get('driver', [])) or 'no NVIDIA driver'}",
        f"jax {environment.get('jax')}, jaxlib {environment.get('jaxlib')}, jaxspec {environment.get('jaxspec')}",
    ]
    note = worth(environment, size)
    return "\n".join([*lines, *([note] if note else [])])


def worth(environment: Mapping[str, Any], size: str) -> str | None:
    """A warning if the figures say nothing about a GPU with a real model."""
    if environment.get("platform") != "gpu":
        return "NOT A GPU: these figures only show that the benchmark works"
    return "tiny sizes: these figures only show that the benchmark works" if size == "tiny" else None


# The summary


def middle(rows: Iterable[Row], unit: str = "milliseconds", **wanted: Any) -> str:
    """The median of the first row with these values."""
    for row in rows:
        if all(row.get(name) == value for name, value in wanted.items()) and unit in row:
            return f"{median(row[unit]):.2f}"
    return UNKNOWN


def summary(results: Results, environment: Mapping[str, Any], size: str) -> str:
    """The answers in about 40 lines, with what SGLang needs for the same."""
    rows = {part: found["rows"] for part, found in results.items()}
    failed = [
        f"{part}: {name}: {error[:110]}" for part in results for name, error in by_reason(results[part]["failed"], "error").items()
    ]
    plain = middle(rows.get("cycle", []), tree="plain")
    blocks = [
        head(environment, size),
        states(results),
        *(f"copy: {row['bytes_per_second'] / 1e9:.0f} GB/s" for row in rows.get("copy", [])),
        products(rows["gemm"], only=(1, 8)) if rows.get("gemm") else "",
        cycles(rows["cycle"]) if rows.get("cycle") else "",
        settings(rows["flags"]) if rows.get("flags") else "",
        columns_of(rows["text"], COLUMNS["text"]) if rows.get("text") else "",
        host(rows["engine"]) if rows.get("engine") else "",
        *fastest(rows.get("tiles", [])),
        *(f"{row['name']}: {median(row['milliseconds']):.2f} ms; our plain cycle: {plain}" for row in rows.get("peer", [])),
        columns_of(rows["server"], COLUMNS["server"]) if rows.get("server") else "",
        *(f"failed: {line}" for line in failed[:6]),
    ]  # fmt: skip
    return "\n".join(filter(None, blocks))


def states(results: Results) -> str:
    """Which parts have figures."""
    state: dict[str, list[str]] = {}
    for part in ORDER:
        found = results.get(part)
        missing = found is not None and (found["skipped"] or found["failed"])
        kind = (
            "not run"
            if found is None
            else "nothing"
            if not found["rows"]
            else "with gaps"
            if missing or "seconds" not in found
            else "complete"
        )
        state.setdefault(kind, []).append(part)
    return "; ".join(f"{kind}: {' '.join(parts)}" for kind, parts in state.items())


def cycles(rows: Sequence[Row]) -> str:
    """Cycles beside SGLang's."""
    columns: dict[str, Column] = {
        "tree": text("tree"),
        "cycle, ms": lambda row: middle([row]),
        "SGLang on an H200, ms": lambda row: f"{ANCHORS[row['tree']]:.2f}" if row["tree"] in ANCHORS else UNKNOWN,
        "model, ms": number("model_milliseconds", 2),
        "share of copy": number("share_of_byte_roofline", 2),
        "launches": text("launches"),
        "one graph": is_one_graph,
        "trace + lower, s": lambda row: f"{row['trace_seconds'] + row['lower_seconds']:.1f}",
        "compile, s": number("compile_seconds", 1),
        "first run, s": number("first_run_seconds", 2),
    }
    return columns_of(rows, columns)


def settings(rows: Sequence[Row]) -> str:
    """Milliseconds per cycle under each setting of XLA, by tree."""
    trees = list(dict.fromkeys(row["tree"] for row in rows))
    lines = [
        [name, *(middle(rows, flags=name, tree=tree) for tree in trees)]
        for name in FLAGS
        if any(row["flags"] == name for row in rows)
    ]
    return record.table(["flags", *(f"{tree}, ms" for tree in trees)], lines)


def host(rows: Sequence[Row]) -> str:
    """The engine's steps beside the device's time, and the graph updates."""
    lines = []
    for row in (row for row in rows if row["measured"] == "timed"):
        times = row["device_milliseconds"], median(row["milliseconds"]), median(row["serial_milliseconds"])
        lines.append([row["tree"], str(row["requests"]), *(f"{milliseconds:.2f}" for milliseconds in times)])
    updates = [
        f"graph updates, {row['tree']}: {row['updated_nodes_per_cycle']:.1f} nodes per cycle"
        for row in rows
        if "updated_nodes_per_cycle" in row
    ]
    shown = record.table(["tree", "requests", "device, ms", "step with overlap, ms", "without, ms"], lines) if lines else ""
    return "\n".join(filter(None, [shown, *updates]))


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
