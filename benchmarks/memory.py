"""How much memory a benchmark takes: of an engine by its arrays and programs, of the process and the device by what they report."""

from contextlib import suppress
from pathlib import Path

import jax

from jaxspec.engine.engine import Engine

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def restart_peak() -> None:
    """The process's peak begins anew (Linux); the device's can't."""
    with suppress(OSError):
        CLEAR.write_text("5")


def peaks() -> dict[str, int]:
    """Bytes: the most that was resident since `restart_peak`, and the most that was ever in use on the device, as far as known."""
    found = dict[str, int]()
    if STATUS.exists():
        line = next((line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:")), None)
        if line:
            found["process_peak_bytes"] = int(line.split()[1]) * 1024
    if stats := jax.devices()[0].memory_stats():
        found["device_peak_bytes"] = stats["peak_bytes_in_use"]
    return found


def of_engine(engine: Engine) -> dict[str, int]:
    """Bytes of weights, of caches and other state, and of the temporaries of the program that takes most."""
    runner = engine.runner
    programs = runner.programs
    return {
        "weights_bytes": sum(array.nbytes for array in jax.tree.leaves(runner.params)),
        "state_bytes": sum(array.nbytes for array in jax.tree.leaves(runner.state)),
        "temporary_bytes": max((programs.temporary_bytes(program) for program in programs.compilations), default=0),
    }
