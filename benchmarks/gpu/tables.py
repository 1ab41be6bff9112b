"""What benchmarks.gpu found, as tables for people."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from .. import record
from ..record import Spread

Row = Mapping[str, Any]
Column = Callable[[Row], str]


def spread(name: str) -> Column:
    return lambda row: str(Spread(row[name]))


def text(name: str) -> Column:
    return lambda row: str(row[name])


def number(name: str, digits: int, divided_by: float = 1.0) -> Column:
    return lambda row: f"{row[name] / divided_by:.{digits}f}"


def assumed_speeds(row: Row) -> str:
    return ", ".join(f"{speed:.0f} at {length}" for length, speed in row["tokens_per_second_at_assumed_accept_length"].items())


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
COLUMNS: dict[str, dict[str, Column]] = {
    "check": {
        "kernel": text("kernel"),
        "implementation": text("implementation"),
        "shape": text("shape"),
        "largest error": lambda row: f"{row['error']:.2g}",
        "allowed": lambda row: f"{row['bound']:.2g}",
    },
    "copy": {
        "copied, GB": number("copied_bytes", 2, 1e9),
        "read and written, GB/s": number("bytes_per_second", 1, 1e9),
        "matrix product, TFLOP/s": number("operations_per_second", 2, 1e12),
    },
    "cycle": CYCLE,
    "attention": {"attention": text("attention"), **CYCLE},
    "peer": {
        "": text("name"),
        "step, ms (min..max)": spread("milliseconds"),
        "tokens/s": lambda row: f"{1e3 / median(row['milliseconds']):.1f}",
        "x our plain cycle": lambda row: f"{row['over_plain_cycle']:.2f}" if "over_plain_cycle" in row else "",
    },
    "compile": {
        "program": text("program"),
        "": text("way"),
        "trace and lower, s": number("lower_seconds", 2),
        "compile or load, s": number("compile_seconds", 2),
        "found in the cache": text("found_in_cache"),
    },
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
"""Header and content of each section's columns."""


def show(section: str, found: Mapping[str, Any]) -> str:
    """A section's table, and a line for all that was skipped or failed."""
    columns = COLUMNS[section]
    parts = [f"{section} ({found.get('seconds', 0):.0f} s)"]
    if found["rows"]:
        parts.append(record.table(list(columns), [[column(row) for column in columns.values()] for row in found["rows"]]))
    for kind, key in (("skipped", "reason"), ("failed", "error")):
        parts += [f"{kind}: {name}: {reason}" for name, reason in by_reason(found[kind], key).items()]
    return "\n".join(parts) + "\n"


def by_reason(entries: Sequence[Mapping[str, Any]], key: str) -> dict[str, str]:
    """Cases, joined where the reason is the same, and it; the JSON names all."""
    joined: dict[str, list[str]] = {}
    for entry in entries:
        joined.setdefault(entry[key], []).append(" ".join(map(str, entry["case"].values())) or "all")
    return {"; ".join(names[:3]) + more(len(names) - 3): reason for reason, names in joined.items()}


def more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""


def head(environment: Mapping[str, Any], size: str) -> str:
    """Where the figures come from, and what they are worth."""
    devices = ", ".join(environment.get("devices", ["no device"]))
    lines = [
        f"{environment.get('date')}, {devices}, {'; '.join(environment.get('driver', [])) or 'no NVIDIA driver'}",
        f"jax {environment.get('jax')}, jaxlib {environment.get('jaxlib')}, jaxspec {environment.get('jaxspec')}",
    ]
    note = worth(environment, size)
    return "\n".join([*lines, *([note] if note else [])])


def worth(environment: Mapping[str, Any], size: str) -> str | None:
    """A warning where the figures say nothing about a GPU with a real model."""
    if environment.get("platform") != "gpu":
        return "NOT A GPU: these figures show that the benchmark works, and nothing else"
    return "tiny sizes: these figures show that the benchmark works, and nothing else" if size == "tiny" else None
