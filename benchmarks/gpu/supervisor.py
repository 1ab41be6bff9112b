"""The parent process: it starts workers, collects their results, and replaces a worker that dies or hangs."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, Queue
from typing import IO, Any

from .parts import Part, Run

FOLDER = Path(__file__).parents[2] if __package__ == "benchmarks.gpu" else None
"""Where workers run: in a clone its root, so that they can import benchmarks."""
COMMAND = (sys.executable, "-c", f"from {__package__}.worker import main; main()")
LIMITS = {"start": 240.0, "run": 150.0, "compile": 400.0}
"""Seconds after which a worker counts as hung, by what it does. The first contact compiles and autotunes for minutes."""
GRACE = 15.0
"""Seconds after the deadline until a busy worker is killed."""
MOST_ENDS = 3
"""Workers that may die in one run of a part before the rest of it is left out."""
MEMORY_SHARE = "0.88"
"""JAX's share of the GPU's memory: no other process needs it while a worker runs."""

Results = dict[str, dict[str, Any]]


class NoDevice(Exception):
    """JAX found no GPU. The message lists the devices."""


class Supervisor:
    """Runs parts in worker processes and keeps their results: rows, skipped and failed cases by part."""

    def __init__(self, size: str, deadline: float, cache: str, heard: Callable[[dict], None], command: Sequence[str] = COMMAND):
        self.results: Results = {}
        self.environment: dict[str, Any] = {}
        self._size, self._deadline, self._cache, self._heard, self._command = size, deadline, cache, heard, command
        self._current: dict | None = None
        """The case under way."""
        self._started: list[dict] = []
        """The cases that the current run has started."""
        self._finished = False
        self._phase, self._phase_began = "start", 0.0

    def run(self, parts: Sequence[Part]) -> None:
        """Runs these parts. A worker that dies or hangs costs its case. Raises NoDevice."""
        if not all(run.uses_jax for part in parts[:1] for run in part.runs):
            self._find_device()
        for part in parts:
            began = time.time()
            self.results[part.name] = {"date": now(), "rows": [], "skipped": [], "failed": []}
            for run in part.runs:
                self._run(part, run, min(self._deadline, began + part.seconds))
            self.take({"kind": "finished", "part": part.name, "seconds": time.time() - began})

    def _run(self, part: Part, run: Run, until: float) -> None:
        """Starts workers for one run of a part until all its cases have been started. Compiling does not count against `until`."""
        self._started, ends = [], 0
        while True:
            if time.time() > self._deadline:
                return self.skip(part.name, named(run), "time budget: no time was left")
            before = len(self._started)
            ended = self._run_worker(part, run, until)
            if self._finished:
                return None
            if ended is not None:
                case = self._current or named(run)
                if time.time() > self._deadline:
                    return self.skip(part.name, case, f"time budget: {ended}")
                self.take({"kind": "failed", "part": part.name, "case": case, "error": ended})
                ends += 1
            if len(self._started) == before:  # it could not even begin: another one would not either
                return None
            if ends == MOST_ENDS and not part.alone:
                return self.skip(part.name, named(run), f"{ends} workers ended early: the rest is left out")

    def _find_device(self) -> None:
        """Starts a worker only to learn the devices. Raises NoDevice."""
        ended = self._run_worker(None, Run(), self._deadline)
        if not self.environment:
            raise NoDevice(f"JAX reported no devices: {ended}")

    @property
    def failures(self) -> int:
        return sum(len(found["failed"]) for found in self.results.values())

    def skip(self, part: str, case: Mapping[str, Any], reason: str) -> None:
        """Records a case that was not measured, with the reason."""
        self.take({"kind": "skipped", "part": part, "case": case, "reason": reason})

    def take(self, message: dict) -> None:
        """Adds a worker's message to the results."""
        kind = message["kind"]
        if kind == "environment":
            self.environment = message["environment"]
        elif kind == "phase":
            self._phase, self._phase_began = message["phase"], time.time()
        elif kind == "case":
            self._current = message["case"]
            self._started.append(message["case"])
            self._phase, self._phase_began = "run", time.time()
        elif kind == "all":
            self._finished = True
        elif "part" in message:
            found = self.results.setdefault(message["part"], {"date": now(), "rows": [], "skipped": [], "failed": []})
            self._current = None
            if kind == "row":
                found["rows"].append(message["row"])
            elif kind in ("skipped", "failed"):
                found[kind].append({name: value for name, value in message.items() if name not in ("kind", "part")})
            elif kind == "finished":
                found["seconds"] = message["seconds"]
        self._heard(message)

    @property
    def doing(self) -> str:
        """What the worker does, and for how long."""
        return f"{self._phase} {time.time() - self._phase_began:.0f} s"

    def peaks(self) -> dict[str, float | None]:
        """The measured peaks, for the next worker."""
        rows = self.results.get("copy", {}).get("rows") or [{}]
        return {"bandwidth": rows[0].get("bytes_per_second"), "arithmetic": rows[0].get("operations_per_second")}

    def _run_worker(self, part: Part | None, run: Run, until: float) -> str | None:
        """Runs one worker until it ends. Returns the reason if it ended before its work was done.

        A worker has a process group of its own, which is killed with it: a server that it started must not outlive it.
        """
        task = {
            "part": part.name if part else None, "run": run.name, "alone": part is not None and part.alone, "done": self._started,
            "size": self._size, "deadline": self._deadline, "until": until, "uses_jax": run.uses_jax, "cache": self._cache,
            **self.peaks(),
        }  # fmt: skip
        environment = {**os.environ, **run.environment}
        if run.xla_flags:
            environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {run.xla_flags}".strip()
        if "XLA_CLIENT_MEM_FRACTION" not in environment:
            environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", MEMORY_SHARE)
        command = [*self._command, json.dumps(task)]
        self._current, self._finished, self._phase, self._phase_began = None, False, "start", time.time()
        with (
            tempfile.TemporaryFile("w+", errors="replace") as errors,
            subprocess.Popen(
                command, cwd=FOLDER, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            ) as process,
        ):
            assert process.stdout
            lines: Queue[str | None] = Queue()
            reader = threading.Thread(target=forward, args=(process.stdout, lines), daemon=True)
            reader.start()
            try:
                hung = self._listen(lines)
                with suppress(subprocess.TimeoutExpired):
                    if hung is not None:
                        process.send_signal(signal.SIGUSR1)  # the worker writes where its threads are
                    process.wait(1.0 if hung else GRACE)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                reader.join()
            process.wait()
            if self.environment and self.environment["platform"] != "gpu" and self._size != "tiny":
                raise NoDevice(f"JAX finds no GPU, only {', '.join(self.environment['devices'])}")
            if hung is None and process.returncode == 0:
                return None
            return f"{hung or f'the worker ended with status {process.returncode}'}; last output: {tail(errors)}"

    def _listen(self, lines: Queue[str | None]) -> str | None:
        """Takes messages until the worker ends. Returns the reason to kill it, if there is one."""
        while True:
            limit, left = LIMITS[self._phase], self._deadline + GRACE - time.time()
            silence = self._phase_began + limit - time.time()
            if left <= 0:
                return f"stopped during {self.doing}"
            if silence <= 0:
                return f"the worker hung: {self.doing}"
            with suppress(Empty):
                line = lines.get(timeout=min(silence, left))
                if line is None:
                    return None
                self.take(json.loads(line))


def named(run: Run) -> dict[str, str]:
    """The case that stands for a whole run of a part."""
    return {"run": run.name} if run.name else {}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def forward(source: IO[str], lines: Queue[str | None]) -> None:
    """Copies the lines of a file to a queue."""
    for line in source:
        lines.put(line)
    lines.put(None)


def tail(errors: IO[str]) -> str:
    """The end of a process's output, in one line."""
    errors.seek(0)
    return " ".join(errors.read()[-2000:].split())[-600:] or "none"
