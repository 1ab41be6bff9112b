"""The record of a benchmark run: one line of JSON with the environment, the command, the prompts and the results."""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from jaxspec.commands.collect_env import cores, cpu_model
from jaxspec.commands.common import PromptSet
from jaxspec.commands.common import table as table
from jaxspec.version import own_version

from .options import all_shortened, is_busy, shortened
from .options import show as show_path

NOT_FLAGS = ("out", "command", "load_average")
"""Attributes of parsed options that are not recorded as flags."""


@dataclass(frozen=True)
class Spread:
    """Repeated measurements of one quantity."""

    values: list[float]

    def __str__(self) -> str:
        return f"{median(self.values):.2f} ({min(self.values):.2f}..{max(self.values):.2f})"

    def describe(self) -> dict:
        """For JSON."""
        return {"median": median(self.values), "min": min(self.values), "max": max(self.values), "values": self.values}


def environment(load_average: float) -> dict:
    """Versions and hardware. `devices` is empty if this process does not use JAX; the load average is that before the run."""
    jax = sys.modules.get("jax")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "jaxspec": own_version(),
        "jax": importlib.metadata.version("jax"),
        "jaxlib": importlib.metadata.version("jaxlib"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu_model(),
        "cores": cores(),
        "load_average": load_average,
        "xla_flags": " ".join(map(shortened, os.environ.get("XLA_FLAGS", "").split())),
        "devices": [device.device_kind for device in jax.devices()] if jax else [],
    }


def write(benchmark: str, options: argparse.Namespace, prompts: PromptSet | None, results: Any) -> dict:
    """Appends the record of a run to options.out, prints where, and returns it. `results` must be JSON."""
    record = {
        "benchmark": benchmark,
        "command": options.command,
        "environment": environment(options.load_average),
        "flags": {name: _plain(value) for name, value in vars(options).items() if name not in NOT_FLAGS},
        **({} if prompts is None else {"prompts": prompts.describe()}),
        "results": results,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(f"added to {show_path(options.out)}")
    return record


def read(path: Path) -> list[dict]:
    """The records of a file, oldest first. Raises ValueError if the file cannot be read or holds something else."""
    try:
        records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise ValueError(f"can't read results: {error}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} holds no results: expected one JSON object per line ({error})") from None
    if not all(isinstance(each, dict) and {"benchmark", "environment", "results"} <= each.keys() for each in records):
        raise ValueError(f"{path} holds no results of these benchmarks")
    return records


def _plain(value: object) -> object:
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return all_shortened(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return shortened(str(value))


def measured_on(record: dict) -> str:
    """One line about a record: the date, the versions, the hardware, and the load of the machine if it was high.

    Out: "20 November 2026, jax 0.12.0.1, AMD EPYC, 2 cores"
    """
    where = record["environment"]
    day = datetime.fromisoformat(where["date"])
    devices = sorted({device for device in where["devices"] if device != "cpu"})
    hardware = devices or [f"{where['cpu']}, {where['cores']} cores"]
    load = where.get("load_average", 0.0)
    busy = [f"busy machine: load average {load:.1f}"] if is_busy(load, where["cores"]) else []
    return f"{day.day} {day:%B %Y}, jax {where['jax']}, {', '.join(hardware + busy)}"


def shares(values: Sequence[float], others: Sequence[float]) -> list[float]:
    return [value / other for value, other in zip(values, others, strict=True)]
