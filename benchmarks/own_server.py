"""A server process of ours, for benchmarks that ask one."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO

from benchmarks.engines import BenchmarkError

START_SECONDS = 900
LOOK_SECONDS = 0.02


@contextmanager
def serving(flags: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """The URL of `jaxspec serve` with these flags (and these variables besides this process's own), until the block ends.

    Raises BenchmarkError with the end of its log if it does not start.
    """
    command = [sys.executable, "-m", "jaxspec.serve", "--port=0", *flags]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log, env={**os.environ, **(environment or {})})
        try:
            yield wait_for_url(process, log)
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_for_url(process: subprocess.Popen, log: TextIO) -> str:
    """Reads the server's log until it says where it listens."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(LOOK_SECONDS)
        log.seek(0)
        if found := re.search(r"ready at (http://[\d.]+:\d+)", log.read()):
            return found[1]
    log.seek(0)
    raise BenchmarkError(f"the server was not ready: {log.read()[-1000:]}")
