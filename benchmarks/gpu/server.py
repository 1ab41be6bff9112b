"""A server with the built-in model under load: only that it serves on this device, and how fast."""

import importlib.util
import json
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from .. import serving, start
from .lab import Cases, Lab, Skip
from .parts import AT_ONCE

NEEDED = ("fastapi", "uvicorn", "pydantic", "aiohttp")


def cases(lab: Lab) -> Cases:
    yield {"model": "built-in"}, partial(load, lab)


def load(lab: Lab) -> dict[str, Any]:
    """Requests per second and latencies, by the number of requests at once. Raises Skip without the server's packages."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise Skip(f"not installed: {', '.join(missing)}")
    cache = {} if lab.cache is None else {"JAXSPEC_COMPILATION_CACHE": str(lab.cache)}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as until_measured:
        url, _ = until_measured.enter_context(start.serving([*lab.size.server_flags], cache))
        out = Path(folder) / "serving.jsonl"
        for at_once in AT_ONCE:
            options = {"base-url": url, "num-prompts": lab.size.server_requests, "max-concurrency": at_once, "out": out}
            serving.main([f"--{name}={value}" for name, value in options.items()])
        results = [json.loads(line)["results"] for line in out.read_text().splitlines()]
        return {"at_once": dict(zip(AT_ONCE, results, strict=True))}
