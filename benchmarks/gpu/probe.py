"""The first minute on a GPU: does anything work at all, and how long does it take? Each case has a process of its own."""

import importlib.metadata
import importlib.util
import shutil
import subprocess
import time
from functools import partial
from typing import Any

import jax

from . import kernels
from .cycles import time_cycle
from .kernels import Cases, Checked
from .lab import Lab, Together

MODULES = (
    "jax", "jaxlib", "flax", "orbax.checkpoint", "jaxtyping", "safetensors", "flatbuffers", "torch", "triton", "jax_triton",
    "transformers", "tokenizers", "aiohttp", "fastapi", "uvicorn", "pydantic",
)  # fmt: skip
DISTRIBUTIONS = {"orbax.checkpoint": "orbax-checkpoint", "jax_triton": "jax-triton"}


def cases(lab: Lab, run: str) -> Cases:
    yield {"what": "machine"}, machine
    for checked in kernels.checked_kernels(lab):
        shape = min(checked.calls, key=lambda shape: size_of(checked, shape))
        for name in checked.implementations:
            if name != "reference":
                yield {"what": f"{checked.kernel} {name}, {shape}"}, partial(first_call, lab, checked, name, shape)
    short = lab.with_size(lab.size.one_layer())
    for tree in lab.size.trees[:3]:
        yield {"what": f"cycle {tree.name}, one layer"}, partial(time_cycle, short, tree, 1, lab.size.goal_context)


def machine() -> dict[str, Any]:
    """Versions of what is installed, what is missing, and what nvidia-smi says."""
    versions, missing = {}, []
    for module in MODULES:
        try:
            found = importlib.util.find_spec(module) is not None
            versions[module] = importlib.metadata.version(DISTRIBUTIONS.get(module, module)) if found else ""
        except (ImportError, importlib.metadata.PackageNotFoundError):
            found = False
        if not found:
            missing.append(module)
            versions.pop(module, None)
    smi = ""
    if shutil.which("nvidia-smi"):
        done = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=30, check=False)
        smi = done.stdout
    return {"versions": versions, "missing": missing, "nvidia_smi": smi}


def size_of(checked: Checked, shape: str) -> int:
    """Bytes of the arguments of a call."""
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(jax.eval_shape(checked.calls[shape])))


def first_call(lab: Lab, checked: Checked, name: str, shape: str) -> dict[str, Any]:
    """Seconds to compile and to run once, and the error against the reference."""
    started = time.perf_counter()
    programs = Together(lab, {shape: partial(kernels.lower, checked, name, checked.calls[shape])})
    program = kernels.taken(lab, programs, shape, name)
    compiled = time.perf_counter()
    jax.block_until_ready(program(*checked.calls[shape]()))
    ran = time.perf_counter()
    seconds = {"compile_seconds": compiled - started, "first_run_seconds": ran - compiled}
    return seconds | kernels.errors(lab, checked, program, shape)
