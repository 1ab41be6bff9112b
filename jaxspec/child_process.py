"""Processes that can be killed, for work that may take any time or memory. They start fast: the files that they run, and this one,
import little."""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

ORPHAN_SECONDS = 20
"""For one answer, after which a process ends itself, in case its server is gone and can't stop it."""


class ChildProcess:
    """A process that runs a file and answers one request at a time. When `ask` fails, close it."""

    def __init__(self, file: str) -> None:
        self._socket, other_end = socket.socketpair()
        command = [sys.executable, "-P", file]  # -P: the file's folder is not on its path
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # it imports what this process would
        with other_end:
            self._process = subprocess.Popen(  # in a group of its own: Ctrl-C is for the server alone
                command, stdin=other_end.fileno(), stdout=subprocess.DEVNULL, env=environment, process_group=0
            )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: Mapping[str, Any] | bytes, seconds: float, max_bytes: int) -> dict[str, Any]:
        """The reply to a request, or its JSON. Raises TimeoutError, or ConnectionError: it ended or said more than max_bytes."""
        deadline = time.monotonic() + seconds
        self._socket.settimeout(seconds)
        self._socket.sendall((request if isinstance(request, bytes) else json.dumps(request).encode()) + b"\n")
        reply = bytearray()
        while not reply.endswith(b"\n"):
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            part = self._socket.recv(2**20)
            reply += part
            if not part or len(reply) > max_bytes:
                raise ConnectionError
        return json.loads(reply)

    def close(self) -> None:
        """Ends the process, even in the middle of a conversation. May be repeated."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


def answer(reply: Callable[[bytes], bytes], limits: Mapping[int, int]) -> None:
    """In such a process: answers each line with one until the other end is closed, which also happens when the server ends.
    `limits`: of resources, as `resource.setrlimit` has them."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # meant for the server, which may still have requests
    for kind, most in limits.items():
        allowed = resource.getrlimit(kind)[1]
        limit = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        with contextlib.suppress(ValueError):  # macOS can't limit the address space; the limit of time remains
            resource.setrlimit(kind, (limit, limit))
    with contextlib.suppress(ConnectionError), socket.socket(fileno=0) as connection, connection.makefile("rb") as lines:
        for line in lines:
            signal.alarm(ORPHAN_SECONDS)  # without a handler it ends the process at any point
            answered = reply(line)
            signal.alarm(0)
            connection.sendall(answered + b"\n")
