"""What every benchmark writes: where it ran, with which flags and prompts, and its results; and tables for people."""

import argparse
import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import jax
import jaxlib

from jaxspec.commands.collect_env import cores, cpu_model
from jaxspec.commands.prompts import PromptSet
from jaxspec.commands.table import table as table
from jaxspec.version import own_version

RESULTS = Path(__file__).parent / "results"


def environment() -> dict:
    """Versions and hardware."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "jaxspec": own_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu_model(),
        "cores": cores(),
        "load_average": os.getloadavg()[0],
        "devices": [device.device_kind for device in jax.devices()],
    }


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


def common_arguments(parser: argparse.ArgumentParser, *, out: str, num_prompts: int, max_tokens: int = 128) -> None:
    """The options that every benchmark has."""
    parser.add_argument("--model", type=Path, help="a Hugging Face model directory (default: the built-in model)")
    parser.add_argument("--draft", type=Path, help="its EAGLE-3 head (default: the built-in head, with the built-in model)")
    parser.add_argument("--prompts", type=Path, help="a file: one prompt per line, or .jsonl (default: built-in held-out code)")
    parser.add_argument("--num-prompts", type=int, default=num_prompts, help="prompts to use (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=max_tokens, help="tokens to generate per prompt (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS / out, help="where the JSON goes (default: %(default)s)")
