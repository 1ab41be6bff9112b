"""What is recorded of the command line: no keys, no headers' values, and no machine but this one."""

import argparse
import math
import shlex
from collections.abc import Sequence
from urllib.parse import urlsplit

LOCAL = ("127.0.0.1", "localhost", "::1")
SECRET = ("--api-key", "--header")
ADDRESS = ("--base-url", "--host", "--port")


def is_local(url: str) -> bool:
    return urlsplit(url).hostname in LOCAL


def recordable(options: argparse.Namespace, base_url: str) -> argparse.Namespace:
    """The options as they may be recorded."""
    values = dict(vars(options))
    values["api_key"] = "(secret)" if options.api_key else None
    values["header"] = [f"{name}=(secret)" for name, _ in options.header]
    values["command"] = public_command(shlex.split(options.command), base_url)
    values["base_url"] = base_url if is_local(base_url) else None
    for name in ("host", "port"):
        values[name] = values[name] if is_local(base_url) else None
    if math.isinf(options.request_rate):
        values["request_rate"] = "inf"  # JSON has no infinity
    return argparse.Namespace(**values)


def public_command(words: Sequence[str], base_url: str) -> str:
    """A command without the options SECRET and their values, and without ADDRESS unless it is this machine's.

    In:  ["python", "-m", "benchmarks.serving", "--header", "A=b", "C=d", "--api-key", "x", "--port", "8000"]
    Out: "python -m benchmarks.serving --port 8000"
    """
    dropped = SECRET if is_local(base_url) else SECRET + ADDRESS
    kept, is_dropped = [], False
    for word in words:
        if word.startswith("--"):
            is_dropped = word.partition("=")[0] in dropped
        if not is_dropped:
            kept.append(word)
    return shlex.join(kept)
