"""A server with the built-in model under load: only that it serves on this device, and how fast."""

import importlib.util
import json
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from .. import serving, start
from .kernels import Cases
from .lab import Lab, Skip

NEEDED = ("fastapi", "uvicorn", "pydantic", "aiohttp")
TREES = ("plain", "3/1/4")


def cases(lab: Lab, run: str) -> Cases:
    for concurrency in (1, 8):
        yield {"model": "built-in", "concurrency": concurrency}, partial(load, lab, concurrency)


def load(lab: Lab, concurrency: int) -> dict[str, Any]:
    """Requests per second and latencies at this concurrency. Raises Skip without the server's packages."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise Skip(f"not installed: {', '.join(missing)}")
    cache = {} if lab.cache is None else {"JAXSPEC_COMPILATION_CACHE": str(lab.cache)}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as until_measured:
        with lab.compile_phase():
            url, _ = until_measured.enter_context(start.serving([], cache))
        out = Path(folder) / "serving.jsonl"
        serving.main(["--base-url", url, "--num-prompts", "32", "--max-concurrency", str(concurrency), "--out", str(out)])
        return json.loads(out.read_text().splitlines()[-1])["results"]
