"""jaxspec collect-env: the machine, for a bug report. Keys and tokens are only shown as set."""

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from jaxspec.commands.common import listing, run_guarded
from jaxspec.commands.options import Parser
from jaxspec.host_memory import available_memory, contents, number
from jaxspec.version import DISTRIBUTION, own_version

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "jax", "jaxlib", "flax", "transformers", "tokenizers", "safetensors", "numpy", "ml-dtypes", "fastapi",
    "uvicorn", "jinja2", "optax", "torch",
)  # fmt: skip
PLUGINS = re.compile(r"jax-(cuda|rocm|metal|.*-plugin|.*-pjrt)|libtpu|nvidia-|triton")
"""JAX's plugins, and the libraries that they need."""
VARIABLES = re.compile(r"(XLA|JAX|JAXSPEC|LIBTPU|NCCL)_|(CUDA|NVIDIA)_VISIBLE_DEVICES$|LD_LIBRARY_PATH$")
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
SHOWN_CHARACTERS = 500
"""The most characters shown of a variable's value."""
GIB = 1 << 30


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report. The exit status is 0."""
    parser = Parser("jaxspec collect-env", "Versions, devices and settings for a bug report, without secrets.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)

    def run() -> int:
        found = collect()
        print(json.dumps(found, indent=1) if options.json else show(found))
        return 0

    return run_guarded(parser.prog, run)


def collect() -> dict[str, Any]:
    """Everything, by section."""
    named = [(each.metadata.get("Name"), each.metadata.get("Version")) for each in distributions()]
    installed = {name.lower().replace("_", "-"): version for name, version in named if name}  # a damaged one has none
    return {
        "jaxspec": {"version": own_version(), **checkout(ROOT)},
        "system": {
            "python": f"{platform.python_version()} ({platform.python_implementation()})",
            "os": platform.platform(),
            "cpu": cpu_model(),
            "cores": cores(),
            **memory(),
        },
        "packages": {name: installed[name] for name in PACKAGES if name in installed and name != DISTRIBUTION},
        "plugins": {name: version for name, version in sorted(installed.items()) if PLUGINS.match(name)},
        "devices": devices(),
        "cpu_kernels": cpu_kernels(),
        "driver": driver(),
        "compilation_cache": compilation_cache(),
        "environment": variables(os.environ),
    }


def show(found: Mapping[str, Any]) -> str:
    """The report as text, section by section."""
    sections = []
    for title, content in found.items():
        lines = content if isinstance(content, Mapping) else {f"{place}": line for place, line in enumerate(content)}
        shown = {f"  {plain_name(name)}": as_text(name, value) for name, value in lines.items()}
        sections.append(f"{title.replace('_', ' ')}:\n{listing(shown) if shown else '  none'}")
    return "\n\n".join(sections)


def as_text(name: str, value: object) -> str:
    """A value for people; sizes in MiB or GiB."""
    if isinstance(value, Mapping):
        return ", ".join(f"{plain_name(inner)} {as_text(inner, entry)}" for inner, entry in value.items())
    if name.endswith("bytes") and isinstance(value, int):
        return f"{value / GIB:.2f} GiB" if value >= GIB else f"{value / 2**20:.1f} MiB"
    return str(value)


def plain_name(name: str) -> str:
    """In:  "memory_bytes", "JAX_PLATFORMS"  Out: "memory", "JAX_PLATFORMS" """
    return name if name.isupper() else name.removesuffix("_bytes").replace("_", " ").replace("bytes", "size")


def cpu_kernels() -> dict[str, str]:
    """Whether the C++ kernels for CPUs run here."""
    from pallas_kernels.row_matmul import what_is_missing  # imports JAX

    return {"row_matmul": what_is_missing() or "yes"}


def checkout(root: Path) -> dict[str, Any]:
    """The clone's commit, and how many files differ from it; nothing if this is not a clone."""
    if not (root / ".git").exists():
        return {}
    head, status = output("git", "-C", str(root), "rev-parse", "HEAD"), output("git", "-C", str(root), "status", "--porcelain")
    return {} if head is None or status is None else {"commit": head, "changed_files": len(status.splitlines())}


def cpu_model() -> str:
    """The processor's name, if the system reports it."""
    found = re.search(r"^model name\s*: (.*)$", contents(Path("/proc/cpuinfo")), re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def cores() -> int | None:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def memory() -> dict[str, int]:
    """Main memory in bytes, total and what this process may still take, if the system reports it."""
    total = number(Path("/proc/meminfo"), r"MemTotal:\s+(\d+) kB")
    return {} if total is None else {"memory_bytes": 1024 * total, "available_bytes": available_memory()}


def devices() -> list[dict[str, Any]]:
    """JAX's devices, or its error if it finds none."""
    from jaxspec.placement import available_devices  # imports JAX

    try:
        found = available_devices()
    except ValueError as error:  # such as a plugin that does not match its driver: the report is for this
        return [{"error": str(error)}]
    return [{"kind": device.device_kind, "platform": device.platform, **device_memory(device.memory_stats())} for device in found]


def device_memory(statistics: Mapping[str, int] | None) -> dict[str, int]:
    """A device's memory: JAX's limit, and what is in use; CPUs don't report it."""
    names = {"limit_bytes": "bytes_limit", "used_bytes": "bytes_in_use"}
    return {name: statistics[key] for name, key in names.items() if key in statistics} if statistics else {}


def driver() -> list[str]:
    """NVIDIA's GPUs as nvidia-smi lists them: name, driver version, memory."""
    if shutil.which("nvidia-smi") is None:
        return []
    listed = output("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    return ["nvidia-smi fails"] if listed is None else listed.splitlines()


def compilation_cache() -> dict[str, Any]:
    """Where compiled programs are kept, and how large they are."""
    from jaxspec.engine.program_cache import enable_compilation_cache

    directory = enable_compilation_cache()
    if directory is None:
        return {"directory": "off"}
    sizes = [file.stat().st_size for file in directory.rglob("*") if file.is_file()]
    home = os.path.expanduser("~")
    shown = f"~/{directory.relative_to(home)}" if directory.is_relative_to(home) else str(directory)  # no user's name
    return {"directory": shown, "files": len(sizes), "bytes": sum(sizes)}


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that change what JAX or jaxspec does, without the values of secrets.

    In:  {"JAX_PLATFORMS": "cpu", "JAXSPEC_API_KEY": "abc", "HOME": "/root"}
    Out: {"JAXSPEC_API_KEY": "(set)", "JAX_PLATFORMS": "cpu"}
    """
    chosen = [name for name in sorted(environment) if VARIABLES.match(name)]
    return {name: "(set)" if SECRET.search(name) else environment[name][:SHOWN_CHARACTERS] for name in chosen}


def output(*command: str) -> str | None:
    """The output of a command; None if it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
