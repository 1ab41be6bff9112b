"""The processes of other engines. Each may run in another Python environment; requests and answers are lines of JSON."""

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from .options import BenchmarkError
from .side_by_side import alternate

Timed = tuple[float, list[list[int]]]
"""Seconds for all prompts, and their tokens."""
SIDES = Path(__file__).with_name("peer_sides.py")


class Kind(NamedTuple):
    """An engine to compare with."""

    name: str
    """As in peer_sides.SIDES."""
    install: str
    """Arguments of pip install."""
    takes_gguf: bool = False
    """It loads a GGUF file, not a Hugging Face directory."""
    script: str = str(SIDES)


KINDS = (
    Kind("transformers", "torch transformers"),
    Kind("openvino-genai", "torch openvino-genai 'optimum-intel[openvino]'"),
    Kind("ctranslate2", "torch transformers ctranslate2"),
    Kind("llama.cpp", "xllamacpp", takes_gguf=True),
)


class NotRun(BenchmarkError):
    """A peer, or one way to run it, failed. The message says why, and what to install if that helps."""


class Peer:
    """One engine's process and its children. They are stopped (SIGSTOP) between requests, so that busy-waiting threads take no time
    from others. Their messages go to a file, because they would garble the progress bar.
    """

    def __init__(self, kind: Kind, python: str):
        self.kind = kind
        self.messages = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed in close()
        command = [python, kind.script, kind.name]
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.messages, text=True, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self.messages.close()
            raise NotRun(f"its Python does not start: {error.strerror}") from None

    def versions(self) -> dict[str, str]:
        """Versions of its packages and of Python. Raises NotRun if a package is missing."""
        return self.ask(op="versions")["versions"]

    def load(self, **task: Any) -> dict[str, list[str]]:
        """Loads the model in one precision (see peer_sides.Task). Returns the ways to run each contender."""
        return self.ask(op="load", **task)["ways"]

    def generate(self, prompts: Sequence[Sequence[int]], **how: Any) -> Timed:
        """Runs all prompts in sequence. `how`: precision, contender, way and max_tokens, as peer_sides.py explains."""
        answer = self.ask(op="generate", prompts=prompts, **how)
        return answer["seconds"], answer["token_ids"]

    def fastest(self, ways: Sequence[str], prompts: Sequence[Sequence[int]], **how: Any) -> str:
        """The fastest way on these prompts, after an untimed pass of each. Raises NotRun if every way fails."""
        if len(ways) == 1:
            return ways[0]
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for number, way in alternate(ways, 3):
            if way not in seconds:
                continue
            try:
                taken, _ = self.generate(prompts, way=way, **how)
            except NotRun:
                del seconds[way]
                if not seconds:
                    raise
            else:
                seconds[way] += [taken] if number else []
        return min(seconds, key=lambda way: min(seconds[way]))

    def ask(self, **request: Any) -> dict[str, Any]:
        """Sends a request and waits for the answer. Raises NotRun if the process reports an error or ended."""
        assert self.process.stdin and self.process.stdout
        self.signal(signal.SIGCONT)
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        self.signal(signal.SIGSTOP)
        if not line:
            self.signal(signal.SIGCONT)
            raise NotRun(f"its process ended with status {self.process.wait()}{self.last_message()}")
        answer = json.loads(line)
        if "error" in answer:
            installing = f": pip install {self.kind.install}" if answer["missing"] else ""
            raise NotRun(one_line(answer["error"]) + installing)
        return answer

    def signal(self, number: signal.Signals) -> None:
        """Signals the process and its children."""
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(self.process.pid, number)

    def last_message(self) -> str:
        """The last line of its messages."""
        self.messages.seek(0)
        lines = [line for line in self.messages.read().splitlines() if line.strip()]
        return f" ({one_line(lines[-1])})" if lines else ""

    def close(self) -> None:
        """Ends the process; kills it after 10 s."""
        assert self.process.stdin and self.process.stdout
        self.signal(signal.SIGCONT)
        with suppress(BrokenPipeError):  # it has ended already
            self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        self.signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()
        self.messages.close()


def one_line(message: str) -> str:
    """A message for a table and a record: short, and without directories of this machine.

    In: "can't read\\n/home/me/model/config.json"  Out: "can't read config.json"
    """
    return re.sub(r"(?<![\w.:/])/(?:[^\s/'\"|]+/)*(?=[^\s/'\"|])", "", " ".join(message.split())).replace("|", "/")[:200]
