"""What the programs of this folder found: lines of JSON, to which each run adds. An interrupted run goes on after them."""

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.record import environment


def recorded(out: Path | None) -> list[dict[str, Any]]:
    """The lines of a file that other runs have added."""
    return list(map(json.loads, out.read_text().splitlines())) if out is not None and out.exists() else []


def record(out: Path | None, **found: Any) -> dict[str, Any]:
    """Adds a line with what was found, and where; returns it."""
    known = environment(os.getloadavg()[0])
    line = {name: known[name] for name in ("date", "jaxspec", "jax", "python", "cpu", "xla_flags")} | found
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
    return line
