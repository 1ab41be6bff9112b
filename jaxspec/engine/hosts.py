"""The processes that run one engine together, one on each host: which they are (Hosts), and how each of them ends.

Rank 0 schedules and answers HTTP, the others launch what it launches (host_group.py). A process that dies closes its connections,
and the others then end, too: a collective that waits for a dead process can't be given up. Importing this loads no JAX.
"""

import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from jaxspec.checks import reason_of

EXIT = 13
"""Exit status of a process whose group has lost one."""
WRONG_SETTINGS = 2
"""Exit status of a process that can't do what rank 0 does: starting the group again would not help."""
KEY = "JAXSPEC_GROUP_KEY"
"""The variable with the key of the connections."""
LEAST_KEY = 16
NOTICE = 0.5
"""Seconds that a failure waits: if another process's end caused it, the thread that notices that end first says which process."""
STOP_SIGNAL = signal.SIGUSR2
"""Rank 0 sends it to itself at STOP. Not SIGTERM: rank 0 gets its own, too, which would count as a second one."""
SAME_SIGTERM = 1.0
"""Seconds in which a second SIGTERM says the same as the first: systemd tells every process of a service, and so does --dp-size."""


@dataclass(frozen=True)
class Hosts:
    """The processes that run one engine together, one on each host."""

    nnodes: int = 1
    """Processes that run one model together, one on each host."""
    node_rank: int = 0
    """Which of these this is, from 0; 0 schedules and answers HTTP."""
    dist_init_addr: str | None = None
    """Address of rank 0, HOST:PORT, where the others find it; JAX takes the port after it, too. None: there is one process."""

    def __post_init__(self):
        if self.nnodes < 1 or not 0 <= self.node_rank < self.nnodes:
            raise ValueError(f"--node-rank must be from 0 to --nnodes - 1 = {self.nnodes - 1}, got {self.node_rank}")
        if self.nnodes > 1 and self.dist_init_addr is None:
            raise ValueError(f"--nnodes {self.nnodes} needs --dist-init-addr: the address of rank 0, as in 10.0.0.1:5000")
        if self.dist_init_addr is not None:
            host, colon, port = self.dist_init_addr.rpartition(":")
            if not (host and colon and port.isdecimal() and 0 < int(port) < 65535):
                raise ValueError(f"--dist-init-addr must be HOST:PORT with a port below 65535, got {self.dist_init_addr!r:.200}")

    def check_devices(self, tp_size: int, dp_size: int) -> None:
        """Raises ValueError if these processes can't share a model's devices evenly, or would do it several times."""
        if tp_size % self.nnodes:
            raise ValueError(f"--tp-size counts the devices of all hosts: {tp_size} can't be divided by --nnodes {self.nnodes}")
        if self.nnodes > 1 and dp_size > 1:
            raise ValueError(f"--dp-size {dp_size} starts servers on one host: leave it out, or --nnodes {self.nnodes}")

    @property
    def address(self) -> tuple[str, int]:
        """Where rank 0 listens for the others."""
        host, _, port = (self.dist_init_addr or "").rpartition(":")
        return host.removeprefix("[").removesuffix("]"), int(port)

    @property
    def coordinator(self) -> str:
        """HOST:PORT of JAX's own service."""
        host, _, port = (self.dist_init_addr or "").rpartition(":")
        return f"{host}:{int(port) + 1}"

    def name(self, rank: int) -> str:
        """The name of a process in messages."""
        return f"rank {rank} of {self.nnodes}"


def group_key(environment: Mapping[str, str]) -> bytes:
    """The key. Raises ValueError if the variable has none."""
    key = environment.get(KEY, "")
    if len(key) < LEAST_KEY:
        raise ValueError(
            f"the variable {KEY} must hold a secret of at least {LEAST_KEY} characters, the same on every host, as made by "
            "`openssl rand -hex 32`"
        )
    return key.encode()


class ToldToEnd:
    """The signals, SIGTERM and SIGINT, that have told this process to end."""

    def __init__(self) -> None:
        self._first = math.inf

    def again(self, number: int) -> bool:
        """A signal has come: whether it is a second one, which ends at once what the first let finish."""
        if self._first == math.inf:
            self._first = time.monotonic()
            return False
        return number != signal.SIGTERM or time.monotonic() > self._first + SAME_SIGTERM


# The end. Every way out of a process of a group is `leave`: Python's own would wait for processes that are gone.

_leaving = threading.RLock()


def leave(status: int, line: str = "") -> NoReturn:
    """Ends this process at once, with a last line in the log. Of several threads that call it, one gets through."""
    with _leaving:  # reentrant: a signal's handler may interrupt this
        if line:
            os.write(sys.stderr.fileno(), f"{line}\n".encode())  # not print: another thread may hold its lock
        os._exit(status)


def end(reason: str) -> NoReturn:
    """The group has lost a process and can't go on."""
    leave(EXIT, f"jaxspec: {reason}; whoever started this group must restart it")


def fail(hosts: Hosts, error: BaseException | None) -> NoReturn:
    """This process can't go on after this exception."""
    time.sleep(NOTICE)
    if error is not None:
        traceback.print_exception(error)
    end(f"{hosts.name(hosts.node_rank)} failed: {reason_of(error)}")


def status_of(ended: SystemExit) -> int:
    """The exit status that it asks for; 1 if it has a message in place of one."""
    return ended.code if isinstance(ended.code, int) else 1


def run_to_the_end(hosts: Hosts, work: Callable[[], int]) -> NoReturn:
    """Runs the work of one process of a group, and ends the process with the status that it returns; after an exception, of any
    thread, as `end`."""
    threading.excepthook = lambda caught: fail(hosts, caught.exc_value)
    try:
        status = work()
    except SystemExit as ended:
        status = status_of(ended)
    except BaseException as error:
        fail(hosts, error)
    leave(status)
