"""The parent process: it starts workers, collects their results, and replaces a worker that dies or hangs."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from typing import IO, Any

FOLDER = Path(__file__).parents[2] if __package__ == "benchmarks.gpu" else None
"""Where workers run: in a clone its root, so that they can import benchmarks."""
COMMAND = (sys.executable, "-c", f"from {__package__}.worker import main; main()")
SILENCE = {"check": 60.0, "kernels": 60.0}
OTHER_SILENCE = 150.0
"""Seconds without a message after which a worker counts as hung. Compiling a few cycles at a time takes less."""
GRACE = 20.0
"""Seconds after the deadline until a busy worker is killed."""
MEMORY_SHARE = "0.88"
"""JAX's share of the GPU's memory: no other process needs it while a worker runs."""

Results = dict[str, dict[str, Any]]


class NoDevice(Exception):
    """JAX found no GPU. The message lists the devices."""


class Supervisor:
    """Runs sections in worker processes and keeps their results: rows, skipped and failed cases by section."""

    def __init__(self, size: str, deadline: float, cache: str, heard: Callable[[dict], None], command: Sequence[str] = COMMAND):
        self.results: Results = {}
        self.environment: dict[str, Any] = {}
        self._size, self._deadline, self._cache, self._heard, self._command = size, deadline, cache, heard, command
        self._current: dict[str, Any] = {}

    def run(self, sections: Sequence[str]) -> None:
        """Runs these sections. A worker that ends early costs the rest of its section. Raises NoDevice."""
        waiting = list(sections)
        while waiting:
            if time.time() > self._deadline:
                for section in waiting:
                    self.skip(section, {}, "time budget: no time was left for this section")
                return
            ended = self._run_worker(waiting)
            finished = [section for section in waiting if "seconds" in self.results.get(section, {})]
            waiting = [section for section in waiting if section not in finished]
            if waiting and ended is not None:
                current = {"section": waiting[0], "case": {}} | self._current
                if time.time() > self._deadline:
                    self.skip(current["section"], current["case"], ended)
                else:
                    self.take({"kind": "failed", **current, "error": f"{ended}; the rest of the section is left out"})
                waiting.remove(current["section"])

    def find_device(self) -> None:
        """Starts a worker only to learn the devices. Raises NoDevice."""
        ended = self._run_worker([])
        if not self.environment:
            raise NoDevice(f"JAX reported no devices: {ended}")

    def skip(self, section: str, case: dict, reason: str) -> None:
        """Records a case that was not measured, with the reason."""
        self.take({"kind": "skipped", "section": section, "case": case, "reason": reason})

    def take(self, message: dict) -> None:
        """Adds a worker's message to the results."""
        kind = message["kind"]
        if kind == "environment":
            self.environment = message["environment"]
        elif kind == "case":
            self._current = {"section": message["section"], "case": message["case"]}
        else:
            found = self.results.setdefault(message["section"], {"rows": [], "skipped": [], "failed": []})
            if kind == "row":
                found["rows"].append(message["row"])
            elif kind in ("skipped", "failed"):
                found[kind].append({name: value for name, value in message.items() if name not in ("kind", "section")})
            elif kind == "finished":
                found["seconds"], self._current = message["seconds"], {}
        self._heard(message)

    @property
    def failures(self) -> int:
        return sum(len(found["failed"]) for found in self.results.values())

    def peaks(self) -> dict[str, float | None]:
        """The measured peaks, for the next worker."""
        rows = self.results.get("copy", {}).get("rows") or [{}]
        return {"bandwidth": rows[0].get("bytes_per_second"), "arithmetic": rows[0].get("operations_per_second")}

    def _run_worker(self, sections: Sequence[str]) -> str | None:
        """Runs one worker until it ends. Returns the reason if it ended before its work was done."""
        task = {"sections": list(sections), "size": self._size, "deadline": self._deadline, "cache": self._cache, **self.peaks()}
        environment = {**os.environ}
        if "XLA_CLIENT_MEM_FRACTION" not in environment:
            environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", MEMORY_SHARE)
        command = [*self._command, json.dumps(task)]
        self._current = {}
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(command, cwd=FOLDER, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
        ):
            assert process.stdout
            lines: Queue[str | None] = Queue()
            reader = threading.Thread(target=forward, args=(process.stdout, lines), daemon=True)
            reader.start()
            try:
                hung = self._listen(lines)
                if hung is None:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(GRACE)  # it has finished and is about to end
            finally:
                process.kill()
                reader.join()
            process.wait()
            if self.environment and self.environment["platform"] != "gpu" and self._size != "tiny":
                raise NoDevice(f"JAX finds no GPU, only {', '.join(self.environment['devices'])}")
            if self.environment and all("seconds" in self.results.get(section, {}) for section in sections):
                return None
            return f"{hung or f'the worker ended with status {process.returncode}'}; last output: {tail(errors)}"

    def _listen(self, lines: Queue[str | None]) -> str | None:
        """Takes messages until the worker ends. Returns the reason to kill it, if there is one."""
        while True:
            left = self._deadline + GRACE - time.time()
            silence = SILENCE.get(self._current.get("section", ""), OTHER_SILENCE)
            try:
                line = lines.get(timeout=max(0.0, min(silence, left)))
            except Empty:
                return "time budget: the worker was stopped" if left <= silence else f"the worker hung for {silence:.0f} s"
            if line is None:
                return None
            self.take(json.loads(line))


def forward(source: IO[str], lines: Queue[str | None]) -> None:
    """Copies the lines of a file to a queue."""
    for line in source:
        lines.put(line)
    lines.put(None)


def tail(errors: IO[str]) -> str:
    """The end of a process's output, in one line."""
    errors.seek(0)
    return " ".join(errors.read()[-2000:].split())[-600:] or "none"
