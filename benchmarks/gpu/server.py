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

NEEDED = ("fastapi", "uvicorn", "pydantic", "aiohttp")
TINY_FLAGS = (
    *("--max-running-requests", "2", "--chunked-prefill-size", "64", "--speculative-request-trees", "none"),
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
)


def cases(lab: Lab) -> Cases:
    yield {"model": "built-in"}, partial(load, lab)


def load(lab: Lab) -> dict[str, Any]:
    """Speeds and first tokens by the number of requests at once. Raises Skip without the server's packages."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise Skip(f"not installed: {', '.join(missing)}")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as until_measured:
        url, _ = until_measured.enter_context(start.serving([*(TINY_FLAGS if lab.size.few else ()), f"--tp-size={lab.tp}"]))
        out, prompts, found = Path(folder) / "serving.jsonl", 2 if lab.size.few else 32, {}
        for at_once in lab.few((1, 8)):
            options = {"base-url": url, "num-prompts": prompts, "max-concurrency": at_once, "out": out}
            if serving.main([f"--{name}={value}" for name, value in options.items()]):
                raise RuntimeError("requests failed")
            results = json.loads(out.read_text().splitlines()[-1])["results"]
            found[f"tokens_per_second_of_{at_once}"] = results["summary"]["output_tokens_per_second"]
            found[f"first_token_ms_of_{at_once}"] = results["latency_ms"]["time_to_first_token"]["median"]
        return found
