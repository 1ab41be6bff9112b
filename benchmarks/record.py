"""What every benchmark writes: where it ran, with which flags and prompts, and its results; and tables for people."""

import argparse
import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax
import jaxlib

from benchmarks.prompts import PromptSet

RESULTS = Path(__file__).parent / "results"


def environment() -> dict:
    """Versions and hardware."""
    try:
        own = version("jaxspec-llm")
    except PackageNotFoundError:
        own = "not installed"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "jaxspec": own,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "devices": [device.device_kind for device in jax.devices()],
    }


def cpu_model() -> str:
    """The processor's name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line] if info.exists() else []
    )
    return names[0] if names else platform.processor() or platform.machine()


def write(benchmark: str, arguments: argparse.Namespace, prompts: PromptSet | None, results: object) -> None:
    """Writes the record of a run as JSON to arguments.out and says so."""
    record = {
        "benchmark": benchmark,
        "environment": environment(),
        "flags": {name: _plain(value) for name, value in vars(arguments).items() if name != "out"},
        **({} if prompts is None else {"prompts": prompts.describe()}),
        "results": results,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {arguments.out}")


def _plain(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return Path(str(value)).name if os.path.isabs(str(value)) else str(value)  # where it lies on this machine tells nobody anything


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


def common_arguments(parser: argparse.ArgumentParser, *, out: str, num_prompts: int, max_tokens: int = 128) -> None:
    """The options that every benchmark has."""
    parser.add_argument("--model", type=Path, help="a Hugging Face model directory (default: the built-in model)")
    parser.add_argument("--draft", type=Path, help="its EAGLE-3 head (default: the built-in head, with the built-in model)")
    parser.add_argument("--prompts", type=Path, help="a file: one prompt per line, or .jsonl (default: built-in held-out code)")
    parser.add_argument("--num-prompts", type=int, default=num_prompts, help="prompts to use (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=max_tokens, help="tokens to generate per prompt (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS / out, help="where the JSON goes (default: %(default)s)")
