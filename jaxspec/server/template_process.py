"""Starts, asks and stops one process of template_worker.py."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("template_worker.py")
CHUNK = 2**20
"""Bytes received at once."""


class TemplateProcess:
    """A process that answers one question at a time; after an error of `ask` it is good for nothing but close()."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            # A process group of its own: Ctrl-C in the terminal is for the server alone.
            command = [sys.executable, "-P", str(WORKER)]
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, process_group=0)

    @property
    def is_alive(self) -> bool:
        """False once the process has ended for whatever reason."""
        return self._process.poll() is None

    def ask(self, question: Mapping[str, Any], seconds: float, max_bytes: int) -> dict[str, Any]:
        """The answer. Raises TimeoutError, or ConnectionError if the process has ended or says more than max_bytes."""
        deadline = time.monotonic() + seconds
        self._socket.settimeout(seconds)
        self._socket.sendall(json.dumps(question).encode() + b"\n")
        answer = bytearray()
        while not answer.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            part = self._socket.recv(CHUNK)
            answer += part
            if not part or len(answer) > max_bytes:
                raise ConnectionError
        return json.loads(answer)

    def close(self) -> None:
        """Ends the process, whatever it is doing. Again: nothing happens."""
        self._socket.close()
        self._process.kill()
        self._process.wait()
