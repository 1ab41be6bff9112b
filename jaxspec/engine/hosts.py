"""Several processes, one on each host, that run one engine: rank 0 schedules and answers HTTP, the others launch what it launches.

Rank 0 has an authenticated connection to each of the others. Messages are JSON and the bytes of small arrays; nothing is pickled. A
process that dies closes its connections, at which the others end, too: a collective that waits for a dead process can't be given
up. Importing this loads no JAX.
"""

import contextlib
import itertools
import logging
import math
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from typing import Any, NoReturn

from jaxspec.checks import reason_of
from jaxspec.engine.connections import closed_after, connection_of, is_gone, wait_for_ever
from jaxspec.engine.messages import Arrays, Header, Leaf, described, pack, unpack

EXIT = 13
"""Exit status of a process whose group has lost one."""
WRONG_SETTINGS = 2
"""Exit status of one that can't do what rank 0 does: to start the group again would not help."""
KEY = "JAXSPEC_GROUP_KEY"
"""The variable with the key of the connections."""
LEAST_KEY = 16
RENDEZVOUS = 600.0
"""Seconds in which all processes must have found rank 0. They may start in any order."""
HANDSHAKE = 5
"""Seconds that rank 0 waits at each step of the proof that both ends know the key; for all steps together three times as long."""
LEAVING = 2.0
"""Seconds that rank 0 waits for the others when it ends in order."""
STAND_IN = 0.1
"""Seconds between two looks for messages that the thread which launches does not read."""
NOTICE = 0.5
"""Seconds that a failure waits: it may come of the end of another process, which the thread that sees it names."""
STOP = {"stop": True}
"""A process was told to end: rank 0 ends the group in order."""
STOP_SIGNAL = signal.SIGUSR2
"""Rank 0 sends it to itself at STOP. Not SIGTERM: rank 0 gets its own, too, which would count as a second one."""
SAME_SIGTERM = 1.0
"""Seconds in which a second SIGTERM says the same as the first: systemd tells every process of a service, and so does --dp-size."""
END = {"end": True}
"""Rank 0 has ended in order."""

logger = logging.getLogger(__name__)


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
        """As messages call a process."""
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


# Connections


class HostGroup:
    """What an engine tells the other processes of its group. This class is for a process that runs alone, and tells nothing."""

    def pages(self, number: int, identity: str) -> None:
        """Programs from now on are for so many pages. `identity`: a digest of all that they depend on beside that."""

    @contextlib.contextmanager
    def compiling(self, program: Any, *, timed: bool) -> Iterator[None]:
        """While this process compiles the program, the others do; at the end all have it. `timed`: as for compiler_options."""
        yield

    def launch(self, program: Any, leaves: Sequence[Leaf]) -> None:
        """This process is about to launch the program on these arrays."""

    def failed(self, error: Exception) -> None:
        """The engine can't go on."""


ALONE = HostGroup()


class Leader(HostGroup):
    """Rank 0's connections to the others. Any thread may use it."""

    def __init__(
        self, hosts: Hosts, key: bytes, versions: str, patience: float = RENDEZVOUS, on_stop: Callable[[], object] = lambda: None
    ):
        """Waits for the others. `versions`: of the software, which must be the same everywhere. `on_stop` is called when another
        process was told to end.

        Raises OSError if the address is unavailable, TimeoutError if they don't come in time.
        """
        self._hosts, self._on_stop = hosts, on_stop
        self._links: dict[Connection, int] = {}
        self._sending = threading.Lock()
        self._arrays, self._numbers = Arrays(), itertools.count()
        self._answers: dict[int, queue.SimpleQueue[str]] = {}
        """Of compilations under way."""
        self._is_closing, self._all_gone = False, threading.Event()
        host, _ = hosts.address
        deadline = time.monotonic() + patience
        with socket.create_server(hosts.address, family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
            while len(self._links) < hosts.nnodes - 1:
                listener.settimeout(max(0.001, deadline - time.monotonic()))
                try:
                    connected, _ = listener.accept()
                except TimeoutError:
                    missing = sorted(set(range(1, hosts.nnodes)) - set(self._links.values()))
                    raise TimeoutError(f"no connection of rank {', '.join(map(str, missing))} within {patience:g} s") from None
                try:
                    with closed_after(connected, 3 * HANDSHAKE):
                        self._welcome(connection_of(connected, HANDSHAKE), key, versions)
                except (AuthenticationError, EOFError, OSError, ValueError, KeyError) as error:
                    logger.warning("a connection for this group was refused: %s", error or type(error).__name__)
        threading.Thread(target=self._receive, name="group", daemon=True).start()

    def _welcome(self, link: Connection, key: bytes, versions: str) -> None:
        deliver_challenge(link, key)
        answer_challenge(link, key)
        hello, _ = unpack(link.recv_bytes(2**16))
        rank, wrong = hello["rank"], ""
        for old in [each for each, other in self._links.items() if other == rank and is_gone(each)]:  # it was started again
            del self._links[old]
        if hello["nnodes"] != self._hosts.nnodes or rank not in range(1, self._hosts.nnodes):
            wrong = f"rank {rank} of {hello['nnodes']} is none of the {self._hosts.nnodes} of this group"
        elif rank in self._links.values():
            wrong = f"rank {rank} has joined already"
        elif hello["versions"] != versions:
            wrong = f"rank {rank} has {hello['versions']}, and rank 0 has {versions}"
        link.send_bytes(pack({"refused": wrong}))
        if wrong:
            raise ValueError(wrong)
        wait_for_ever(link)
        self._links[link] = rank

    def _receive(self) -> None:
        while self._links:
            for link in wait(list(self._links)):
                assert isinstance(link, Connection)
                try:
                    header, _ = unpack(link.recv_bytes())
                except (EOFError, OSError):
                    rank = self._links.pop(link)
                    if not self._is_closing:
                        end(f"{self._hosts.name(rank)} is gone")
                    continue
                if header != STOP:
                    self._answers[header["number"]].put(header["error"] and f"rank {self._links[link]}: {header['error']}")
                elif not self._is_closing:
                    self._on_stop()
        self._all_gone.set()

    def _tell(self, message: bytes) -> None:
        for link in list(self._links):
            try:
                link.send_bytes(message)
            except OSError:
                if not self._is_closing:
                    end(f"{self._hosts.name(self._links.get(link, 0))} is gone")

    def pages(self, number: int, identity: str) -> None:
        with self._sending:
            self._tell(pack({"pages": number, "identity": identity}))

    @contextlib.contextmanager
    def compiling(self, program: Any, *, timed: bool) -> Iterator[None]:
        """Raises RuntimeError if another process can't compile it."""
        number, answers = next(self._numbers), queue.SimpleQueue[str]()
        self._answers[number] = answers
        with self._sending:
            self._tell(pack({"compile": described(program), "number": number, "timed": timed}))
        yield
        errors = [answers.get() for _ in range(self._hosts.nnodes - 1)]
        del self._answers[number]
        if any(errors):
            raise RuntimeError(next(filter(None, errors)))

    def launch(self, program: Any, leaves: Sequence[Leaf]) -> None:
        with self._sending:
            self._tell(self._arrays.encode(program, leaves))

    def failed(self, error: Exception) -> None:
        fail(self._hosts, error)

    def close(self) -> None:
        """Ends the others in order, and waits until they have ended, but not long."""
        self._is_closing = True
        with self._sending:
            self._tell(pack(END))
        self._all_gone.wait(LEAVING)


class Follower:
    """The connection of another rank to rank 0."""

    def __init__(self, hosts: Hosts, key: bytes, versions: str, patience: float = RENDEZVOUS):
        """Raises OSError if it can't join in time, AuthenticationError if rank 0 has another key, ValueError if it refuses."""
        deadline, reason = time.monotonic() + patience, ""
        while True:
            try:
                self._link = self._meet(hosts, key, versions, max(1, math.ceil(deadline - time.monotonic())))
                break
            except (OSError, EOFError) as error:  # rank 0 may come later, its name or a way to it; what is in its place may hang up
                before, reason = reason, str(error) or "it hangs up"
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank 0 does not answer at {hosts.dist_init_addr} after {patience:g} s: {reason}")
            if reason != before:
                logger.info("rank 0 is not yet at %s: %s", hosts.dist_init_addr, reason)
            time.sleep(0.1)
        wait_for_ever(self._link)
        self.arrays = Arrays()
        self._hosts, self._told = hosts, ToldToEnd()
        self._reading, self._received, self._to_send = threading.Lock(), queue.SimpleQueue[bytes](), queue.SimpleQueue[bytes]()
        """A signal's handler may interrupt a put, and put too: a lock would wait for itself."""
        for work in (self._stand_in, self._transmit):
            threading.Thread(target=work, name="group", daemon=True).start()

    @staticmethod
    def _meet(hosts: Hosts, key: bytes, versions: str, patience: int) -> Connection:
        """A connection to rank 0, which may be busy for so many seconds with one that says nothing, and has let this process in."""
        link = connection_of(socket.create_connection(hosts.address, timeout=HANDSHAKE), patience)
        answer_challenge(link, key)
        deliver_challenge(link, key)
        link.send_bytes(pack({"rank": hosts.node_rank, "nnodes": hosts.nnodes, "versions": versions}))
        if wrong := unpack(link.recv_bytes(2**16))[0]["refused"]:
            raise ValueError(wrong)
        return link

    def _transmit(self) -> None:
        with contextlib.suppress(OSError):  # rank 0 is gone: the thread that reads says so
            while True:
                self._link.send_bytes(self._to_send.get())

    def _stand_in(self) -> None:
        """Reads for the thread that launches while that one does not, as it may wait in a collective: a process that reads nothing
        for seconds counts as gone (DEAD), and the end of rank 0 would not be seen."""
        while not self._link.closed:
            time.sleep(STAND_IN)
            if self._reading.acquire(blocking=False):
                with contextlib.suppress(OSError):  # it was closed just now
                    while self._link.poll() and (message := self._read()):
                        self._received.put(message)
                self._reading.release()

    def _read(self) -> bytes:
        try:
            if (message := self._link.recv_bytes()) != _END:
                return message
        except (EOFError, OSError):
            end(f"{self._hosts.name(0)} is gone")
        leave(0)

    def messages(self) -> Iterator[tuple[Header, memoryview]]:
        """What rank 0 tells, for ever, to one thread: passed on by another it takes 42 us, not 33 (AMD EPYC, 29 November 2026)."""
        while True:
            with self._reading:
                message = self._read() if self._received.empty() else self._received.get()
            yield unpack(message)

    def answer(self, number: int, error: str = "") -> None:
        """A compilation has ended. Does not wait."""
        self._to_send.put(pack({"number": number, "error": error}))

    def stop(self, number: int, _frame: object = None) -> None:
        """A signal's handler. This process was told to end: so rank 0 ends the group in order. At the second time it ends alone."""
        if self._told.again(number):
            end(f"{self._hosts.name(self._hosts.node_rank)} was told twice to end")
        self._to_send.put(pack(STOP))


_END = pack(END)
